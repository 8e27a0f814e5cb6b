"""The quorum lock for asyncio: the same algorithm, for tasks."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
import redis.asyncio

from django_redislock.core import AsyncQuorumLock, Lock, QuorumLock
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockLost
from tests.support import Proxy, async_client_at, until
from tests.support.locks import held_on

KEYS = lock_keys("redislock", "a")
SERVERS = 3
OPTIONS = {"socket_timeout": 1}


@pytest.fixture
def aclients(servers, clients):
    return [redis.asyncio.from_url(server.url) for server in servers]


async def test_tasks_and_threads_keep_each_other_out_and_wait_for_each_other(aclients, clients, calls):
    inside = []

    async def work(number):
        async with AsyncQuorumLock(aclients, "a"):
            inside.append(number)
            assert len(inside) == 1
            await asyncio.sleep(0)
            inside.remove(number)

    with QuorumLock(clients, "a"):
        before = calls()
        tasks = [asyncio.create_task(work(number)) for number in range(5)]
        await until(lambda: calls() >= before + 5)
    await asyncio.gather(*tasks)


async def test_a_cancelled_wait_holds_nothing(aclients, clients, calls):
    with QuorumLock(clients, "a"):
        before = calls()
        task = asyncio.create_task(AsyncQuorumLock(aclients, "a").acquire())
        await until(lambda: calls() > before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: held_on(clients) == [0, 0, 0])
    async with AsyncQuorumLock(aclients, "a", timeout=5):
        pass


@pytest.mark.parametrize("steps", range(8))
async def test_an_acquire_that_is_cancelled_at_any_point_holds_nothing(aclients, clients, steps):
    lock = AsyncQuorumLock(aclients, "a", expire=60)
    async with lock:  # its connections are open
        pass
    task = asyncio.create_task(lock.acquire())
    for _ in range(steps):
        await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await asyncio.create_task(lock.release())
    await until(lambda: held_on(clients) == [0, 0, 0])


async def test_a_cancelled_release_has_been_sent_to_every_server(aclients, clients, servers):
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.url)) for server in servers]
        lock = AsyncQuorumLock([async_client_at(proxy.url) for proxy in proxies], "a", expire=60)
        assert await lock.acquire()
        for proxy in proxies:
            proxy.delay_replies(0.1)
        task = asyncio.create_task(lock.release())
        await asyncio.sleep(0)  # it begins
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: held_on(clients) == [0, 0, 0])


async def test_a_loss_is_told_in_the_loop_of_the_holder(aclients, clients):
    told = []
    lock = AsyncQuorumLock(
        aclients, "a", expire=0.6, on_lost=lambda lock: told.append((lock.lost.code, asyncio.get_running_loop()))
    )
    await lock.acquire()
    for client in clients:
        Lock(client, "a").reset(by="me")
    await until(lambda: told)
    assert told == [("force_released", asyncio.get_running_loop())]
    with pytest.raises(LockLost):
        await lock.release()


async def test_a_block_that_another_task_ends_is_released(aclients, clients):
    """As when an asynchronous generator is closed by the loop."""

    lock = AsyncQuorumLock(aclients, "a")
    await lock.__aenter__()
    await asyncio.create_task(lock.__aexit__(None, None, None))
    await until(lambda: held_on(clients) == [0, 0, 0])  # the last server may execute it a moment later
