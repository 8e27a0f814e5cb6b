"""What the processes of the fault tests do; each says what happens to it in JSON lines."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from django_redislock.core import AsyncLock, Lock, QuorumLock
from django_redislock.core.driver.wakeups_threads import WaitingRoom
from django_redislock.exceptions import LockError, LockLost
from tests.support import async_client_at, client_at, say


def hold(url: str, name: str, expire: float, auto_renewal: bool = True) -> None:
    """Acquire, say so, and keep the lock until a line comes; then take the next step, if it is still ours."""
    lock = Lock(client_at(url), name, expire=expire, auto_renewal=auto_renewal)
    lock.acquire()
    say(event="held", fence=lock.fence, id=lock.id)
    input()
    try:
        lock.raise_if_lost()
        say(event="step")
    except LockLost as error:
        say(event="told", reason=error.record.reason)
    try:
        lock.release()
        say(event="released")
    except LockError as error:
        say(event="not released", error=type(error).__name__)


def contend_for_a_quorum(urls: list[str], expire: float, times: int) -> None:
    """Acquire a lock on all these servers so often, and say from when until when it was held."""
    lock = QuorumLock([client_at(url) for url in urls], "a", expire=expire)
    for _ in range(times):
        with lock:
            began = time.monotonic()
            if times == 1:
                say(event="held")
                time.sleep(60)
            time.sleep(0.002)
            ended = time.monotonic()
        say(event="held", **{"from": began, "until": ended})
    say(event="done")


def wait_and_hold(url: str, name: str, options: dict, timeout: float | None, client_options: dict) -> None:
    """Wait for the lock, say when it was taken, and keep it until a line comes."""
    lock = Lock(client_at(url, **client_options), name, **options)
    say(event="waiting")
    if lock.acquire(timeout=timeout):
        say(event="held", fence=lock.fence, at=time.time())
        input()
        lock.release()
        say(event="released")
    else:
        say(event="gave up")


def freeze_on_the_way_in(url: str, name: str, step: str) -> None:
    """Wait for the lock, but freeze just before that step into the waiting room."""
    original = getattr(WaitingRoom, step)

    def frozen(*args: object) -> object:
        setattr(WaitingRoom, step, original)
        os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args)

    setattr(WaitingRoom, step, frozen)
    wait_and_hold(url, name, {}, 60, {})


def race(url: str, count: int) -> None:
    """Fork so many processes. At each call on the channel `go`, each of them tries once to take the lock that it names,
    and reports whether it was taken."""
    children = []
    for _ in range(count):
        pid = os.fork()
        if not pid:
            _race(url)
            os._exit(0)
        children.append(pid)
    say(statuses=[os.waitpid(pid, 0)[1] for pid in children])


def _race(url: str) -> None:
    client = client_at(url)
    with client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe("go")
        pubsub.parse_response()
        while True:
            message = pubsub.get_message(timeout=60)
            if message is None or message["data"] == b"stop":
                break
            name = message["data"].decode()
            lock = Lock(client, name, expire=60, auto_renewal=False)
            client.rpush(f"result:{name}", f"{os.getpid()}:{int(lock.acquire(blocking=False))}")


def wait_in_forks(url: str, name: str, count: int) -> None:
    """Fork processes that wait for the lock and leave it at once, and say their ids."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if not pid:
            with Lock(client_at(url), name):
                pass
            os._exit(0)
        pids.append(pid)
    say(pids=pids)
    input()


async def _idle(client: Any, left: list[Any]) -> None:
    async with AsyncLock(client, "a"):
        pass
    await AsyncLock(client, "a").acquire()


async def _waiting(client: Any, left: list[Any]) -> None:
    holder = AsyncLock(client, "a")
    await holder.acquire()
    left.extend(asyncio.create_task(AsyncLock(client, "a").acquire()) for _ in range(5))
    while (await holder.owner()).waiting < 5:
        await asyncio.sleep(0.01)


async def _connecting(client: Any, left: list[Any]) -> None:
    left.append(asyncio.create_task(AsyncLock(client, "a").acquire()))
    await asyncio.sleep(0)


async def _within_a_generator(client: Any, left: list[Any]) -> None:
    async def held() -> AsyncIterator[None]:
        async with AsyncLock(client, "b"), AsyncLock(client, "c"):
            yield

    left.append(held())
    await anext(left[0])
    async with AsyncLock(client, "a"):
        pass


async def _failing(client: Any, left: list[Any]) -> None:
    await AsyncLock(client, "a").acquire()
    left.append(asyncio.create_task(AsyncLock(client, "a").acquire()))
    await asyncio.sleep(0.05)
    raise ZeroDivisionError


def end_loops(url: str) -> None:
    """Run event loops that end while tasks and a generator hold locks, wait for them, and connect."""
    client = async_client_at(url)
    logging.getLogger("django_redislock").setLevel("ERROR")
    for main in [_idle, _waiting, _connecting, _within_a_generator, _failing] * 3:
        left: list[Any] = []
        with suppress(ZeroDivisionError):
            asyncio.run(main(client, left))
        left.clear()
        gc.collect()
        asyncio.run(AsyncLock(client, "a").reset())
    say(event="done")
