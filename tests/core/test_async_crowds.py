"""Many tasks, threads and processes that want locks at once."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from django_redislock import LockBackendError
from django_redislock.core import AsyncLock, Lock
from tests.support import BUSY, async_client_at, lock_programs, queued, servers_of, until, wait_until


async def test_tasks_threads_and_processes_are_served_first_come_first_served(aclient, client, redis_url, run_python):
    order, threads, tasks = [], [], []

    def thread(number):
        with Lock(client, "a", timeout=30):
            order.append(number)

    def process(number):
        waiter = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 30, {})
        waiter.wait_for(event="held")
        order.append(number)
        waiter.send()
        waiter.wait_for(event="released")

    async def task(number):
        async with AsyncLock(aclient, "a", timeout=30):
            order.append(number)

    async with AsyncLock(aclient, "a"):
        for number in range(9):
            if number % 3 == 0:
                tasks.append(asyncio.create_task(task(number)))
            else:
                threads.append(threading.Thread(target=(thread, process)[number % 3 - 1], args=(number,)))
                threads[-1].start()
            await until(lambda: queued(client, "a") == number + 1, timeout=30)  # noqa: B023
    await asyncio.gather(*tasks)
    for other in threads:
        await asyncio.to_thread(other.join, 30)
    assert order == list(range(9))


@pytest.mark.slow
def test_a_thousand_waiting_tasks_use_one_blocked_connection(aclient, client):
    names = [f"lock {i}" for i in range(10)]
    served = []
    before = {found["id"] for found in client.client_list()}

    async def wait(number):
        name = names[number % 10]
        async with AsyncLock(aclient, name, timeout=60):
            served.append(number)

    async def main():
        holders = [AsyncLock(aclient, name, expire=120) for name in names]
        for holder in holders:
            await holder.acquire()
        tasks = [asyncio.create_task(wait(number)) for number in range(1000)]
        await until(lambda: sum(queued(client, name) for name in names) == 1000, timeout=60)
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


async def test_a_crowd_that_finds_no_server_is_told_at_once(proxy):
    """All wait for the same attempt to connect, and not each for its own after the other's."""
    proxy.black_hole()
    client = async_client_at(proxy.url, client_name="any", socket_timeout=0.5)  # it has to say its name

    started = time.monotonic()
    tasks = [asyncio.create_task(AsyncLock(client, f"lock {i}").acquire()) for i in range(50)]
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - started < 1 + BUSY
    assert {type(result) for result in results[1:]} == {LockBackendError}
