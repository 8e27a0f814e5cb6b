"""Forks that call no hook of Python, as uWSGI's: with each kind of lock idle, entered, and waited for elsewhere."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback

import pytest
import redis

from django_redislock.core import (
    AsyncLock,
    AsyncQuorumLock,
    AsyncSemaphore,
    Lock,
    QuorumLock,
    Semaphore,
    held_locks,
)
from django_redislock.exceptions import NotAcquired
from tests.support import fork_in_c, lived, say, wait_until


def databases(client):
    options = client.connection_pool.connection_kwargs
    return [redis.Redis(host=options["host"], port=options["port"], db=number) for number in range(3)]


MAKE = {
    "Lock": Lock,
    "re-entrant": lambda client, name, **options: Lock(client, name, reentrant=True, **options),
    "Semaphore": lambda client, name, **options: Semaphore(client, name, 1, **options),
    "QuorumLock": lambda client, name, **options: QuorumLock(databases(client), name, **options),
    "AsyncLock": AsyncLock,
    "AsyncSemaphore": lambda client, name, **options: AsyncSemaphore(client, name, 1, **options),
    "AsyncQuorumLock": lambda client, name, **options: AsyncQuorumLock(databases(client), name, **options),
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
def test_a_child_that_c_code_forked_owns_nothing_of_its_parents_and_renews_its_own(redis_url, run_python, kind):
    said = run_python(fork_with_lock, redis_url, kind).finish()[-1]
    assert said == {"idle": "well", "entered": "well", "waited for": "well"}


def fork_with_lock(url: str, kind: str) -> None:
    client, make = redis.Redis.from_url(url), MAKE[kind]
    told = {}
    for when in ("idle", "entered", "waited for"):
        lock = make(client, when, expire=1.5)
        if kind.startswith("Async"):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(enter_async(lock, leave=when == "idle"))
        else:
            enter(lock, leave=when == "idle")
        if when == "waited for":
            threading.Thread(target=wait, args=(make(client, when),), daemon=True).start()
            wait_until(lambda: client.exists(*client.keys("*queue*waited for*") or ["-"]) or "Quorum" in kind)
        told[when] = in_child(child_async if kind.startswith("Async") else child, client, lock, make, when)
        if when != "idle" and not kind.startswith("Async"):  # there, its task has ended
            assert lock.lost is None, "the parent still renews it"
    say(**told)
    os._exit(0)  # without a word to those who wait


def in_child(run, *args):
    """Call the function in a child that C code forked; return "well", or its traceback."""
    read, write = os.pipe()
    child = fork_in_c()
    if child == 0:
        try:
            result = run(*args)
            if result is not None:
                asyncio.run(result)
            os.write(write, b"well")
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def wait(lock):
    result = lock.acquire()
    if asyncio.iscoroutine(result):
        asyncio.run(result)


def enter(lock, leave):
    lock.__enter__()
    if leave:
        lock.release()


async def enter_async(lock, leave):
    await lock.acquire()
    if leave:
        await lock.release()


def child(client, lock, make, when):
    with pytest.raises(NotAcquired):
        lock.release()
    if when != "idle":
        lock.__exit__(None, None, None)  # its copy of its parent's block
        assert not make(client, when).acquire(timeout=0.1)
    mine = make(client, f"child's of {when}", expire=1.5)
    with mine:
        lived(1.7 if when == "entered" else 0)
        mine.raise_if_lost()
        check_records(client)


async def child_async(client, lock, make, when):
    with pytest.raises(NotAcquired):
        await lock.release()
    if when != "idle":
        assert not await make(client, when).acquire(timeout=0.1)
    mine = make(client, f"child's of {when}", expire=1.5)
    async with mine:
        await asyncio.sleep(1.7 if when == "entered" else 0)
        mine.raise_if_lost()
        check_records(client)


def check_records(client):
    held = [info for info in held_locks(client) if info.name.startswith("child's")]
    assert [info.pid for info in held] == [os.getpid()]
