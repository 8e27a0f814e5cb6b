"""Event loops: blocked, ended, closed with tasks pending, several at once, and in a forked child."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from contextlib import AsyncExitStack, suppress

import pytest
from asgiref.sync import async_to_sync

from django_redislock import NotAcquired
from django_redislock.core import AsyncLock, Lock, held_locks
from django_redislock.core.driver import wakeups_tasks
from django_redislock.core.driver.async_server import async_server_of
from django_redislock.core.driver.cluster.cluster import Cluster
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from tests.support import (
    acquire_and_release,
    async_client_at,
    destroy_generators,
    in_a_fork,
    in_threads,
    lock_programs,
    queued,
    until,
    wait_until,
    wait_until_collected,
)
from tests.support.locks import AsyncRLock


@pytest.mark.slow
async def test_a_blocked_loop_loses_no_lock(aclient, client):
    async with AsyncLock(aclient, "a", expire=1.5) as lock:
        time.sleep(2)  # the fault
        lock.raise_if_lost()
        assert await lock.owned()


@pytest.mark.slow
async def test_a_loop_that_was_blocked_does_not_call_the_server_silent(redis_url):
    lock = AsyncLock(async_client_at(redis_url, socket_timeout=0.5), "a")
    async with lock:
        pass
    task = asyncio.create_task(acquire_and_release(lock))
    await asyncio.sleep(0)  # it has sent its command
    time.sleep(1)  # the fault
    assert await task


def test_loops_that_are_closed_before_their_generators_leave_no_connection(aclient, client):
    """asyncio closes a socket by a callback of its loop: each stayed open until the garbage collector found it."""
    before = len(client.client_list())
    gc.disable()
    try:
        for _ in range(5):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(acquire_and_release(AsyncLock(aclient, "a")))
            loop.close()
        wait_until(
            lambda: len(client.client_list()) <= before + 1, message="the last loop's are closed by the next one"
        )
    finally:
        gc.enable()
    asyncio.run(acquire_and_release(AsyncLock(aclient, "a")))


def test_loops_one_after_the_other_leave_no_connection(aclient, client):
    lock = AsyncLock(aclient, "a")

    async def main():
        async with lock:
            task = asyncio.create_task(acquire_and_release(lock))
            await until(lambda: queued(client, "a") == 1)
        assert await task

    before = len(client.client_list())
    for _ in range(5):
        asyncio.run(main())
        async_to_sync(main)()
    wait_until(lambda: len(client.client_list()) <= before)


def test_an_ended_loop_is_not_kept(aclient):
    ended = []

    async def main():
        ended.append(weakref.ref(asyncio.get_running_loop()))
        async with AsyncLock(aclient, "a"):
            pass

    for _ in range(3):
        asyncio.run(main())
    gc.collect()
    assert [loop() for loop in ended[:-1]] == [None, None]


def test_loops_in_several_threads_at_once_share_one_lock(aclient, client):
    lock, inside, most = AsyncLock(aclient, "a"), [], []

    async def work():
        async with lock:
            inside.append(1)
            most.append(len(inside))
            await asyncio.sleep(0.001)
            inside.pop()

    async def main():
        await asyncio.gather(*[work() for _ in range(10)])

    before = len(client.client_list())
    in_threads(5, lambda number: asyncio.run(main()))
    assert most == [1] * 50
    wait_until(lambda: len(client.client_list()) <= before)


# The end of a loop


KEYS = lock_keys("redislock", "a")


@pytest.mark.slow
def test_a_loop_that_ends_with_a_lock_leaves_nothing_renewed(aclient, client, caplog):
    lock = AsyncLock(aclient, "a", expire=1.5)
    asyncio.run(lock.acquire())
    wait_until(lambda: not client.exists(KEYS.lock))
    wait_until(lambda: "ended without releasing" in caplog.text)


@pytest.mark.slow
def test_a_loop_that_is_closed_with_its_tasks_pending_leaves_nothing_renewed(aclient, client, caplog):
    async def hold():
        async with AsyncLock(aclient, "a", expire=1.5):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(hold())
    with suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(asyncio.shield(task), 0.3))
    assert client.exists(KEYS.lock)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    wait_until(lambda: not client.exists(KEYS.lock))
    wait_until(lambda: "ended without releasing" in caplog.text)
    task._log_destroy_pending = False
    with suppress(RuntimeError):  # its block cannot be left without a loop; here, and not whenever it is collected
        task.get_coro().close()


@pytest.mark.processes
def test_the_end_of_a_loop_is_a_clean_one(client, redis_url, run_python):
    before = len(client.client_list())
    process = run_python(lock_programs.end_loops, redis_url, env={"PYTHONDEVMODE": "", "PYTHONWARNINGS": "always"})
    process.wait_for(event="done")
    process.finish()
    assert process.errors == ""
    assert not client.keys("*:queue:*")
    assert not client.exists(lock_keys("redislock", "b").lock, lock_keys("redislock", "c").lock)
    wait_until(lambda: len(client.client_list()) <= before)


# Forks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("kind", "entries"), [(AsyncLock, 1), (AsyncRLock, 2)])
async def test_a_forked_child_owns_nothing_of_its_parents(aclient, client, kind, entries):
    async def child(lock):
        with pytest.raises(NotAcquired):
            await lock.release()
        for mine in (lock, kind(aclient, "a")):
            assert not await mine.acquire(blocking=False), "not inside"
            assert not await mine.acquire(timeout=0.1)
        for _ in range(entries):  # it leaves its copies of its parent's blocks
            await lock.__aexit__(None, None, None)
        assert await lock.locked()
        async with kind(aclient, "b"):
            pass

    lock = kind(aclient, "a", expire=1.5)
    async with AsyncExitStack() as blocks:
        for _ in range(entries):
            await blocks.enter_async_context(lock)
        waiter = asyncio.create_task(acquire_and_release(kind(aclient, "a")))
        await until(lambda: queued(client, "a") == 1)
        in_a_fork(lambda: asyncio.run(child(lock)))
        await asyncio.sleep(1.8)
        assert await lock.owned(), "the parent keeps and renews its lock"
    assert await waiter


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_runs_the_loop_of_its_parent_has_connections_of_its_own(aclient, client):
    async def cycle():
        async with AsyncLock(aclient, "a"):
            return async_server_of(server_of(aclient))

    loop = asyncio.new_event_loop()
    mine = loop.run_until_complete(cycle())

    def child():
        assert loop.run_until_complete(cycle()) is not mine

    in_a_fork(child)
    assert loop.run_until_complete(cycle()) is mine
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.mark.parametrize("first", ["any", "_acquire", "_acquire_once"])
@pytest.mark.parametrize("what", ["waits", "holds"])
def test_when_a_loop_is_closed_under_tasks_nothing_stays_held_or_queued(redis_url, client, monkeypatch, what, first):
    """Whatever the garbage collector destroys first: in one of eight runs it was a generator, and a place stayed."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(wakeups_tasks, "POLL_INTERVAL", 60)  # no call is under way when the loop is closed

    async def take(lock):
        async with lock:
            await asyncio.sleep(60)

    async def main():
        aclient = async_client_at(redis_url)
        async with AsyncLock(aclient, "warm"):
            pass
        locks = [AsyncLock(aclient, name, expire=600) for name in names]
        tasks = [asyncio.create_task(take(lock)) for lock in locks]
        await asyncio.sleep(0)
        if what == "waits":
            await until(lambda: all(queued(client, name) == 1 for name in names))
            lines = [connection for node in nodes for connection in async_server_of(node)._connections]
            await until(lambda: all(line.idle for line in lines))  # the tasks have got their replies
        if what == "holds":
            await until(lambda: all(lock.lost is None and lock._blocks for lock in locks))
        return tasks

    server = server_of(client)
    nodes = server.table.nodes.values() if isinstance(server, Cluster) else [server]
    names = [f"lock {i}" for i in range(20)]
    others = [Lock(client, name) for name in names]
    if what == "waits":
        for other in others:
            other.acquire()
    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(main())
    loop.close()
    destroy_generators(first)
    del tasks
    gc.collect()
    wait_until(lambda: not any(queued(client, name) for name in names))
    if what == "waits":
        for other in others:
            other.release()
    wait_until(lambda: not list(held_locks(client)), timeout=10)
    wait_until_collected(loop)
    # Python warns of transports that such a loop leaves open, and objects of other tests may be collected here, too.
    assert not [found.exc_value for found in ignored if "GeneratorExit" in str(found.exc_value)]
