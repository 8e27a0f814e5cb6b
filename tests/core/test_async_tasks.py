"""A task acquires for itself: which task holds, which may release, what a task that ends leaves behind, and crowds."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from asgiref.sync import sync_to_async

from django_redislock import AlreadyAcquired, LockLost, NotAcquired
from django_redislock.core import AsyncLock, Lock
from django_redislock.core.keys import lock_keys
from tests.support import acquire_and_release, begin, lock_programs, queued, servers_of, until, wait_until


async def test_of_two_calls_of_one_task_at_the_same_time_one_raises_instead_of_hanging(aclient):
    lock = AsyncLock(aclient, "a")
    results = await asyncio.gather(lock.acquire(), lock.acquire(), return_exceptions=True)
    assert [type(result) for result in results] == [bool, AlreadyAcquired]
    await lock.release()


KEYS = lock_keys("redislock", "a")


@pytest.mark.slow
async def test_what_is_kept_of_tasks_that_ended_is_little_and_keeps_none_of_them(aclient, client):
    tasks = weakref.WeakSet()

    async def lose(lock, operation):
        await lock.acquire()
        client.delete(KEYS.lock)
        with pytest.raises(LockLost):
            await getattr(lock, operation)()

    lock = AsyncLock(aclient, "a", auto_renewal=False)
    for number in range(300):
        task = asyncio.create_task(lose(lock, ("release", "extend")[number % 2]))
        tasks.add(task)
        await task
    del task
    await lock.acquire()
    gc.collect()
    assert len(tasks) <= 1
    assert len(lock._leases) <= 2
    assert len(lock._leases._ended) < 100
    await lock.release()


@pytest.mark.slow
async def test_the_task_that_calls_is_the_holder_whichever_task_runs_it(aclient):
    one, two = AsyncLock(aclient, "a", expire=2), AsyncLock(aclient, "b")
    assert await asyncio.wait_for(one.acquire(), 5)
    assert await asyncio.gather(two.acquire(), asyncio.shield(two.owned())) == [True, False]
    fence = one.fence
    await asyncio.sleep(2.5)
    assert await one.owned(), "renewed, for its task goes on"
    assert (one.fence, one.lost) == (fence, None)
    await asyncio.shield(two.release())
    await asyncio.wait_for(one.extend(5), 5)
    await asyncio.wait_for(one.release(), 5)
    assert not await one.locked()


async def test_a_thread_that_works_for_a_task_may_ask_its_lock(aclient, client):
    lock = AsyncLock(aclient, "a", auto_renewal=False)
    async with AsyncLock(aclient, "b"), lock:
        await sync_to_async(lock.raise_if_lost)()
        await asyncio.to_thread(lock.raise_if_lost)
        client.delete(KEYS.lock)
        with pytest.raises(LockLost):
            await lock.extend()
        with pytest.raises(LockLost):
            await sync_to_async(lock.raise_if_lost)()
        await lock.acquire()


async def test_a_block_of_a_generator_may_be_left_by_another_task(aclient, caplog):
    lock = AsyncLock(aclient, "a")

    async def held():
        async with lock:
            yield

    async def start(generator):
        await anext(generator)

    async def close(generator):
        await generator.aclose()

    await asyncio.create_task(acquire_and_release(lock))  # who has left is no longer asked about
    generator = held()
    await anext(generator)
    await asyncio.create_task(close(generator))
    assert not await lock.locked()
    # Among several it is the one of the generator; a task that is inside itself leaves its own.
    async with lock:
        await lock.release()
        generator = held()
        await asyncio.create_task(start(generator))
        with pytest.raises(NotAcquired):
            await lock.release()
        with pytest.raises(NotAcquired):
            await lock.__aexit__(None, None, None)
        assert await lock.locked()
        await asyncio.create_task(close(generator))
        assert not await lock.locked()
        await lock.acquire()
    others = [held(), held()]
    for other in others:
        await asyncio.create_task(start(other))
        await lock.reset()
    await close(others[0])
    assert "force-released" in caplog.text


def test_on_lost_is_called_in_the_loop_of_the_holder(aclient, client):
    told = []

    async def main():
        task = asyncio.current_task()

        def stop(lock):
            told.append((threading.get_ident(), lock.name))
            task.cancel()

        async with AsyncLock(aclient, "a", expire=0.5, on_lost=stop):
            client.delete(KEYS.lock)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(20)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        asyncio.run(main())
    assert isinstance(caught.value.__context__, LockLost) or caught.value.__context__ is not None
    assert told == [(threading.get_ident(), "a")]


# Many of them


async def test_tasks_threads_and_processes_are_served_first_come_first_served(aclient, client, redis_url, run_python):
    order, tasks, calls = [], [], []

    def thread(number):
        with Lock(client, "a", timeout=300):
            order.append(number)

    def process(number):
        waiter = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 300, {})
        waiter.wait_for(event="held")
        order.append(number)
        waiter.send()
        waiter.wait_for(event="released")

    async def task(number):
        async with AsyncLock(aclient, "a", timeout=300):
            order.append(number)

    async with AsyncLock(aclient, "a"):
        for number in range(9):
            if number % 3 == 0:
                tasks.append(asyncio.create_task(task(number)))
            else:
                calls.append(begin((thread, process)[number % 3 - 1], number))
            await until(lambda: queued(client, "a") == number + 1, timeout=120)  # noqa: B023
    await asyncio.gather(*tasks, *map(asyncio.wrap_future, calls))
    assert order == list(range(9))


@pytest.mark.slow
def test_a_thousand_waiting_tasks_use_one_blocked_connection(aclient, client):
    names = [f"lock {i}" for i in range(10)]
    served = []
    before = {found["id"] for found in client.client_list()}

    async def wait(number):
        name = names[number % 10]
        async with AsyncLock(aclient, name, timeout=300):
            served.append(number)

    async def main():
        holders = [AsyncLock(aclient, name, expire=120) for name in names]
        for holder in holders:
            await holder.acquire()
        tasks = [asyncio.create_task(wait(number)) for number in range(1000)]
        await until(lambda: sum(queued(client, name) for name in names) == 1000, timeout=120)
        found = client.client_list()
        for holder in holders:
            await holder.release()
        await asyncio.gather(*tasks)
        return found

    # Without asyncio's debug mode, which blocks the loop at each of a thousand tasks.
    mine = [found for found in asyncio.run(main(), debug=False) if found["id"] not in before]
    nodes = len(servers_of(client))
    assert sorted(int(found["sub"]) for found in mine) == [0] * nodes + [1] * nodes, (
        "one for commands, one that listens"
    )
    assert sorted(served) == list(range(1000))
    wait_until(lambda: {found["id"] for found in client.client_list()} <= before)
