"""The quorum lock for asyncio: the same algorithm, for tasks."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
import redis.asyncio

from django_redislock.core import AsyncQuorumLock, Lock, QuorumLock, held_locks
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import AcquireTimeout, AlreadyAcquired, LockLost, NotAcquired
from tests.support import Proxy, async_client_at, queued, until, wait_until, within
from tests.support.locks import held_on

KEYS = lock_keys("redislock", "a")
SERVERS = 3
OPTIONS = {"socket_timeout": 1}


@pytest.fixture
def aclients(servers, clients):
    return [redis.asyncio.from_url(server.url) for server in servers]


async def test_it_is_held_extended_and_released(aclients, clients):
    lock = AsyncQuorumLock(aclients, "a", label="me")
    async with lock:
        await until(lambda: held_on(clients) == [1, 1, 1])
        assert await lock.extend(20)
        assert [info.label for client in clients for info in held_locks(client)] == ["me"] * 3
        assert lock.lost is None
        with pytest.raises(AlreadyAcquired):
            await lock.acquire()
        with pytest.raises(AcquireTimeout):
            async with AsyncQuorumLock(aclients, "a", blocking=False):
                pass
    with pytest.raises(NotAcquired):
        await lock.release()
    wait_until(lambda: held_on(clients) == [0, 0, 0])


async def test_tasks_and_threads_keep_each_other_out_and_wait_for_each_other(aclients, clients):
    inside = []

    async def work(number):
        async with AsyncQuorumLock(aclients, "a"):
            inside.append(number)
            assert len(inside) == 1
            await asyncio.sleep(0)
            inside.remove(number)

    with QuorumLock(clients, "a"):
        tasks = [asyncio.create_task(work(number)) for number in range(5)]
        await until(lambda: all(queued(client, "a") == 5 for client in clients))
    await asyncio.gather(*tasks)


async def test_a_cancelled_acquire_holds_nothing_and_leaves_the_queues(aclients, clients):
    with QuorumLock(clients, "a"):
        task = asyncio.create_task(AsyncQuorumLock(aclients, "a").acquire())
        await until(lambda: all(queued(client, "a") for client in clients))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not any(queued(client, "a") for client in clients))
    await until(lambda: held_on(clients) == [0, 0, 0])
    async with AsyncQuorumLock(aclients, "a", timeout=5):
        pass


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


async def test_a_paused_server_costs_milliseconds(aclients, clients, servers):
    lock = AsyncQuorumLock(aclients, "a")
    async with lock:
        pass
    servers[1].pause()
    with within(1):
        for _ in range(5):
            assert await lock.acquire(blocking=False)
            await lock.release()


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


async def test_a_block_whose_lock_was_taken_away_ends_with_the_loss_or_with_its_own_error(aclients, clients):
    with pytest.raises(LockLost):
        async with AsyncQuorumLock(aclients, "a"):
            for client in clients:
                Lock(client, "a").reset(by="me")
    with pytest.raises(ZeroDivisionError) as raised:
        async with AsyncQuorumLock(aclients, "a"):
            for client in clients:
                Lock(client, "a").reset(by="me")
            raise ZeroDivisionError
    assert isinstance(raised.value.__context__, LockLost)


async def test_a_block_that_another_task_ends_is_released(aclients, clients):
    """As when an asynchronous generator is closed by the loop."""

    lock = AsyncQuorumLock(aclients, "a")
    await lock.__aenter__()
    await asyncio.create_task(lock.__aexit__(None, None, None))
    assert held_on(clients) == [0, 0, 0]


async def test_a_stuck_server_keeps_nobody_out(aclients, clients):
    with Lock(clients[0], "a", expire=20):
        assert await AsyncQuorumLock(aclients, "a").acquire(blocking=False)
