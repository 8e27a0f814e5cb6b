"""A task that is cancelled, at whatever point, leaves no lock, no place in a queue and no half-used connection."""

from __future__ import annotations

import asyncio
import time
import types
from asyncio.selector_events import _SelectorSocketTransport
from contextlib import suppress

import pytest
from redis.asyncio.connection import AbstractConnection

from django_redislock.core import AsyncLock, Lock
from django_redislock.core.driver.async_server import async_server_of
from django_redislock.core.driver.cluster.cluster import Cluster
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from tests.support import BUSY, TimeLimit, async_client_at, queued, until

KEYS = lock_keys("redislock", "a")


@types.coroutine
def cancelled_at(coroutine, nth, late):
    """Run the coroutine in a task that is cancelled at its nth suspension: at once, or when what it awaits is there."""
    steps, count = coroutine.__await__(), 0
    proceed = steps.__next__
    while True:
        try:
            future = proceed()
        except StopIteration as stop:
            return stop.value
        count += 1
        if count == nth:
            task = asyncio.current_task()
            if late and future is not None:
                future.add_done_callback(lambda _, task=task: task.cancel())  # before the task itself hears of it
            else:
                task.cancel()
        try:
            result = yield future
        except BaseException as error:
            proceed = lambda error=error: steps.throw(error)  # noqa: E731
        else:
            proceed = lambda result=result: steps.send(result)  # noqa: E731


def at_each_suspension(main):
    """Run ``main(1)``, ``main(2)``, … until one returns that it was not cancelled; return how many there were."""
    for nth in range(1, 100):
        if not asyncio.run(main(nth)):
            return nth
    raise AssertionError("it does not end")


async def take(lock, client):
    await lock.acquire()
    await lock.release()


async def take_with_warm_connections(lock, client):
    await lock.acquire()


async def free_it(client):
    await until(lambda: queued(client, "a") == 1)
    Lock(client, "a").reset()


async def wait_and_take(lock, client):
    client.set(KEYS.lock, "x\n1\n1\n{}", px=30000)
    task = asyncio.create_task(free_it(client))
    try:
        await lock.acquire()
        await lock.release()
    finally:
        task.cancel()


async def try_once(lock, client):
    client.set(KEYS.lock, "x\n1\n1\n{}", px=30000)
    await lock.acquire(blocking=False)


async def block(lock, client):
    async with lock:
        await asyncio.sleep(0)


async def give_up(lock, client):
    client.set(KEYS.lock, "x\n1\n1\n{}", px=30000)
    await lock.acquire(timeout=0.05)


@pytest.mark.parametrize("late", [False, True], ids=["when it begins to wait", "when it need not wait any longer"])
@pytest.mark.parametrize(
    ("what", "least"),
    [(take, 3), (take_with_warm_connections, 1), (wait_and_take, 6), (try_once, 2), (block, 4), (give_up, 6)],
)
def test_cancelled_anywhere_nothing_is_left(aclient, client, what, least, late):
    async def main(nth):
        client.flushdb()
        lock = AsyncLock(aclient, "a")
        if what is take_with_warm_connections:
            async with lock:
                pass
        task = asyncio.create_task(cancelled(lock, nth))
        await asyncio.wait([task])
        if task.cancelled():
            # Free for the next one at once; what another one holds stays.
            await until(
                lambda: client.get(KEYS.lock) in (None, b"x\n1\n1\n{}") and queued(client, "a") == 0, timeout=1 + BUSY
            )
        else:
            await task
        return task.cancelled()

    async def cancelled(lock, nth):
        await cancelled_at(what(lock, client), nth, late)

    assert at_each_suspension(main) > least, "it waits more often than that"


async def acquire_by_id(aclient, nth, late):
    await cancelled_at(AsyncLock(aclient, "a", id="given").acquire(), nth, late)


@pytest.mark.parametrize("late", [False, True], ids=["when it begins to wait", "when it need not wait any longer"])
def test_a_cancelled_acquire_by_a_given_id_leaves_the_lock_to_the_object_that_holds_it_by_that_id(
    aclient, client, late
):
    async def main(nth):
        await warm.acquire()
        await warm.release()
        task = asyncio.create_task(acquire_by_id(aclient, nth, late))
        await asyncio.wait([task])
        assert await AsyncLock(aclient, "a", id="given").owned()
        return task.cancelled()

    warm = AsyncLock(aclient, "b")
    held = Lock(client, "a", id="given", expire=60)
    with held:
        assert at_each_suspension(main) > 1


@pytest.mark.parametrize("late", [False, True], ids=["when it begins to wait", "when it need not wait any longer"])
def test_a_cancelled_acquire_by_a_given_id_leaves_no_lock_of_its_own(aclient, client, late):
    async def main(nth):
        async with AsyncLock(aclient, "b"):
            pass
        task = asyncio.create_task(acquire_by_id(aclient, nth, late))
        await asyncio.wait([task])
        if task.cancelled():
            await until(lambda: not client.exists(KEYS.lock), timeout=1 + BUSY)
        return task.cancelled()

    assert at_each_suspension(main) > 1


def connections_of(aclient):
    server = server_of(aclient)
    nodes = server.table.nodes.values() if isinstance(server, Cluster) else [server]
    return [async_server_of(node)._commands.connection for node in nodes]


@pytest.mark.parametrize("late", [False, True], ids=["when it begins to wait", "when it need not wait any longer"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "its connection was cut"])
def test_a_cancelled_release_has_been_sent(aclient, client, connected, late):
    async def main(nth):
        lock = AsyncLock(aclient, "a")
        task = asyncio.create_task(cycle(lock, nth))
        await asyncio.wait([task])
        await until(lambda: not client.exists(KEYS.lock), timeout=1 + BUSY)
        if task.cancelled():
            assert lock.lost is None
        else:
            await task
        return task.cancelled()

    async def cycle(lock, nth):
        await lock.acquire()
        if not connected:
            addresses = {found["addr"] for found in client.client_list()} - {client.client_info()["addr"]}
            for address in addresses:
                client.client_kill(address)
            await until(lambda: not any(connections_of(aclient)))
        try:
            await cancelled_at(lock.release(), nth, late)
        except asyncio.CancelledError:
            assert lock._leases == {}, "nothing is kept of it"
            raise

    assert at_each_suspension(main) > (1 if connected else 2)


async def test_what_the_server_comes_to_after_the_cancellation_is_undone(redis_url, client, proxy):
    behind = async_client_at(proxy.url)
    async with AsyncLock(behind, "a"):
        pass
    proxy.stall()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await AsyncLock(behind, "a", expire=60).acquire()
    proxy.heal()
    await until(lambda: client.keys("*undone*") and not client.exists(KEYS.lock))
    async with AsyncLock(behind, "a"):
        pass


@pytest.mark.slow
async def test_a_connection_that_fell_silent_is_left_though_each_call_on_it_was_cancelled_before(proxy):
    """Calls with less time than the socket's timeout asked on the dead connection until TCP gave it up."""
    behind = async_client_at(proxy.url, socket_timeout=0.5)
    async with AsyncLock(behind, "a"):
        pass
    commands = async_server_of(server_of(behind))._commands
    connection = commands.connection
    proxy.forget_connections()
    async with asyncio.timeout(20):
        while commands.connection is connection:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await AsyncLock(behind, "a").acquire()
    async with AsyncLock(behind, "b"):
        pass


async def test_a_timeout_around_acquire_takes_back_the_place_in_the_queue(aclient, client):
    async def cancelled_acquire(lock):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await lock.acquire()
        assert 0.2 <= time.monotonic() - started < 0.2 + BUSY

    lock = AsyncLock(aclient, "a")
    async with AsyncLock(aclient, "a"):
        await asyncio.create_task(cancelled_acquire(lock))
        await until(lambda: queued(client, "a") == 0)
    async with asyncio.timeout(5), lock:
        pass


@pytest.mark.processes
@pytest.mark.parametrize("connected", [True, False])
async def test_in_a_black_hole_a_cancelled_task_is_back_within_a_second(client, proxy, connected):
    lock = AsyncLock(async_client_at(proxy.url, client_name="any"), "a")  # it has to say its name
    if connected:
        async with lock:
            pass
    proxy.black_hole()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await lock.acquire()
    assert time.monotonic() - started < 1 + BUSY


async def test_who_opens_the_connection_for_all_may_be_cancelled_and_who_waits_for_it_too(aclient):
    tasks = [asyncio.create_task(AsyncLock(aclient, f"lock {i}").acquire()) for i in range(20)]
    await asyncio.sleep(0)
    tasks[1].cancel()  # who waits for the other one to open it
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[2:] == [True] * 18
    assert {type(result) for result in results[:2]} == {asyncio.CancelledError}


@pytest.mark.parametrize("passed", [0, 1], ids=["of the calls", "of the wake-ups"])
@pytest.mark.slow
def test_a_cancellation_that_the_handshake_swallows_is_not_lost(redis_url, client, monkeypatch, passed):
    """`asyncio.wait_for` of Python 3.11 does so, in redis-py: the cancelled task waited for its lock for ever."""
    connect, connected = AbstractConnection.connect, []

    async def main():
        async def swallow(self):
            await connect(self)
            connected.append(self)
            if len(connected) > passed:
                swallowing.set()
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)

        swallowing = asyncio.Event()
        monkeypatch.setattr(AbstractConnection, "connect", swallow)
        task = asyncio.create_task(AsyncLock(async_client_at(redis_url), "a").acquire())
        await asyncio.wait_for(swallowing.wait(), 10)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()

    with Lock(client, "a"):
        asyncio.run(main())
    assert not queued(client, "a")


@pytest.mark.parametrize("what", ["a soft time limit", "a destructor that releases a lock"])
def test_what_comes_between_the_parts_of_a_request_gives_no_task_the_reply_of_another_one(
    client, redis_url, monkeypatch, what
):
    """The reply to a release passed for the grant of a lock that somebody else held."""
    write, left = _SelectorSocketTransport.write, [1]

    def interrupted(transport, data):
        write(transport, data)
        if b"lock:b" in data and left:
            left.clear()
            if what == "a soft time limit":
                raise TimeLimit
            transport.get_protocol()._send(b"*1\r\n$4\r\nPING\r\n", None)

    async def main():
        async with async_client_at(redis_url) as behind:
            async with AsyncLock(behind, "warm"):
                pass
            monkeypatch.setattr(_SelectorSocketTransport, "write", interrupted)
            locks = [AsyncLock(behind, name) for name in "bac"]
            return await asyncio.gather(*(lock.acquire(blocking=False) for lock in locks), return_exceptions=True)

    with Lock(client, "a"):
        first, *others = asyncio.run(main())
    assert isinstance(first, TimeLimit) if what == "a soft time limit" else first is True
    assert others == [False, True]
