"""Where are the walls? What one lock, waiter and connection cost here, and what 1,000 hosts would need by that."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import platform
import sys
import threading
import time
from collections.abc import Callable

import redis
from common import server, table

FORK = multiprocessing.get_context("fork")
HOSTS, PROCESSES, HELD, CYCLES = 1_000, 20, 1_000_000, 100_000
BURST = 12
LOCKS, WAITERS, CONNECTIONS, LISTED, WAITING, REPEATS = 20_000, 5_000, 500, 100_000, (16, 64), 5
EXPIRE = 30.0
"""The default: a lock is renewed after every third of it."""


def used(client: redis.Redis) -> tuple[int, float, float]:
    """Return the memory of the server, and the CPU seconds of the server and of this process."""
    info = client.info()
    return info["used_memory"], info["used_cpu_user"] + info["used_cpu_sys"], time.process_time()


def per(count: int, before: tuple[int, float, float], after: tuple[int, float, float]) -> tuple[float, float, float]:
    """Return the bytes, the server's microseconds and this process's microseconds for one of so many."""
    memory, theirs, own = (b - a for a, b in zip(before, after, strict=True))
    return memory / count, theirs / count * 1e6, own / count * 1e6


def held(client: redis.Redis) -> tuple[float, float, float]:
    """Return the bytes of a held lock, and the microseconds of its renewal for the server and for the process."""
    from django_redislock.core import Lock
    from django_redislock.core.driver.registry import server_of
    from django_redislock.core.operations import renew_call
    from django_redislock.core.watchdog import BATCH

    locks = [Lock(client, f"invoice:{number}", expire=3600, auto_renewal=False) for number in range(LOCKS)]
    locks[0].acquire()
    before = used(client)
    for lock in locks[1:]:
        lock.acquire()
    size, _, _ = per(LOCKS - 1, before, used(client))
    leases = [lock._visible_lease() for lock in locks]
    before = used(client)
    for start in range(0, LOCKS, BATCH):
        server_of(client).renew(renew_call(leases[start : start + BATCH]), 5.0)
    _, theirs, own = per(LOCKS, before, used(client))
    return size, theirs, own


async def waiting(url: str, client: redis.Redis) -> float:
    """Return the bytes of a waiter."""
    from django_redislock.core import AsyncLock, Lock

    Lock(client, "crowded", auto_renewal=False).acquire()
    aclient = redis.asyncio.from_url(url)
    before, _, _ = used(client)
    tasks = [asyncio.create_task(AsyncLock(aclient, "crowded").acquire()) for _ in range(WAITERS)]
    queue = Lock(client, "crowded")._keys.queue
    while client.zcard(queue) < WAITERS:
        await asyncio.sleep(0.1)
    after, _, _ = used(client)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return (after - before) / WAITERS


def connection(url: str, client: redis.Redis) -> float:
    """Return the bytes of a connection that has run a script."""
    before, _, _ = used(client)
    others = [redis.Redis.from_url(url) for _ in range(CONNECTIONS)]
    for other in others:
        other.eval("return 1", 0)
    after, _, _ = used(client)
    for other in others:
        other.close()
    return (after - before) / CONNECTIONS


def connections(url: str, client: redis.Redis) -> list[int]:
    """Return the connections of a process after a burst of threads, with one waiter, and at rest."""

    def process(reached: multiprocessing.synchronize.Semaphore, go_on: multiprocessing.synchronize.Semaphore) -> None:
        from django_redislock.core import Lock
        from django_redislock.core.driver.registry import server_of

        def burst(number: int) -> None:
            start.wait()
            for _ in range(100):
                with Lock(own, f"burst:{number}"):
                    pass

        own, start = redis.Redis.from_url(url, max_connections=50), threading.Barrier(BURST)
        mine = Lock(own, "own")
        mine.acquire()
        threads = [threading.Thread(target=burst, args=(number,)) for number in range(BURST)]
        waiter = threading.Thread(target=lambda: Lock(own, "own").acquire(timeout=60))
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        reached.release()
        go_on.acquire()
        server_of(own).close_idle(math.inf)  # as a minute later
        waiter.start()
        time.sleep(1)
        reached.release()
        go_on.acquire()
        mine.release()
        waiter.join()
        server_of(own).close_idle(math.inf)
        reached.release()
        go_on.acquire()

    before, counts = len(client.client_list()), []
    reached, go_on = FORK.Semaphore(0), FORK.Semaphore(0)
    child = FORK.Process(target=process, args=(reached, go_on))
    child.start()
    for _ in range(3):
        reached.acquire()
        time.sleep(0.5)
        counts.append(len(client.client_list()) - before)
        go_on.release()
    child.join()
    return counts


def cycle(client: redis.Redis) -> tuple[float, float]:
    """Return the microseconds of the server for an acquire and a release: of the scripts, and of all."""
    from django_redislock.core import Lock

    lock = Lock(client, "one")
    lock.acquire()
    lock.release()
    client.config_resetstat()
    before = used(client)
    for _ in range(LOCKS):
        lock.acquire()
        lock.release()
    _, theirs, _ = per(LOCKS, before, used(client))
    return client.info("commandstats")["cmdstat_evalsha"]["usec"] / LOCKS, theirs


def longest(url: str, client: redis.Redis, work: Callable[[redis.Redis], object]) -> float:
    """Return the milliseconds of the longest script of this work, by the server's own count.

    The work is done several times, and the shortest time of each call counts, because another process may interrupt the
    server during a command.
    """
    from django_redislock.core.driver.registry import server_of

    def spent() -> int:
        return client.info("commandstats").get("cmdstat_evalsha", {}).get("usec", 0)

    with redis.Redis.from_url(url) as other:
        server, times = server_of(other), []
        call = server.call

        def measured(each: object) -> object:
            before = spent()
            reply = call(each)
            times.append(spent() - before)
            return reply

        work(other)  # the scripts are loaded
        server.call = measured
        rounds = []
        for _ in range(REPEATS):
            times.clear()
            work(other)
            rounds.append(list(times))
        del server.call
    return max(map(min, zip(*rounds, strict=True))) / 1000


def lists(url: str, client: redis.Redis) -> tuple[float, float]:
    """Return the milliseconds of the longest script of a list, and of a count."""
    from listing import hold

    from django_redislock.core import held_locks, operations
    from django_redislock.core.driver.registry import server_of

    client.flushall()
    for start in range(0, LISTED, 10_000):
        hold(client, 10_000, start)

    def count(other: redis.Redis) -> None:
        server = server_of(other)
        server.run(operations.count(server, "redislock"))

    return longest(url, client, lambda other: sum(1 for _ in held_locks(other))), longest(url, client, count)


def looks(url: str, client: redis.Redis, processes: int) -> float:
    """Return the tries a second of so many processes with one waiter each."""

    def wait() -> None:
        from django_redislock.core import Lock

        Lock(redis.Redis.from_url(url), "crowded").acquire(timeout=120)

    from django_redislock.core import Lock

    client.flushall()
    lock = Lock(client, "crowded", expire=600, auto_renewal=False)
    lock.acquire()
    children = [FORK.Process(target=wait) for _ in range(processes)]
    for child in children:
        child.start()
    while client.zcard(lock._keys.queue) < processes:
        time.sleep(0.1)
    time.sleep(5)  # the first looks of those that came early are for a shorter queue
    client.config_resetstat()
    time.sleep(8)
    calls = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    for child in children:
        child.kill()
        child.join()
    return float(calls) / 8


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        lock_bytes, renewal, client_renewal = held(client)
        waiter_bytes = asyncio.run(waiting(url, client))
        connection_bytes = connection(url, client)
        burst, waiter, resting = connections(url, client)
        script, whole = cycle(client)
        list_ms, count_ms = lists(url, client)
        tries = {number: looks(url, client, number) for number in WAITING}
    from django_redislock.core.driver.wakeups import MAX_POLL_INTERVAL, POLL_INTERVAL, POLLERS

    processes, renewals = HOSTS * PROCESSES, HELD / (EXPIRE / 3)
    all_looks = max(POLLERS / POLL_INTERVAL, processes / MAX_POLL_INTERVAL)
    rows = [
        ["a held lock", f"{lock_bytes:.0f} bytes", f"{HELD * lock_bytes / 1e6:,.0f} MB"],
        ["a waiter", f"{waiter_bytes:.0f} bytes", f"{processes * waiter_bytes / 1e6:,.0f} MB, one in each process"],
        [
            "a connection",
            f"{connection_bytes / 1000:.1f} kB",
            f"{processes * resting * connection_bytes / 1e6:,.0f} MB",
        ],
        ["connections of a process with a waiter", waiter, f"{processes * waiter:,} of maxclients"],
        [f"connections after a burst of {BURST} threads", burst, f"{processes * burst:,}, if all have one in a minute"],
        ["connections of a process at rest", resting, f"{processes * resting:,} of maxclients"],
        ["the renewal of a lock, server", f"{renewal:.1f} us", f"{renewals * renewal / 1e6:.1f} cores"],
        [
            "the renewal of a lock, process",
            f"{client_renewal:.1f} us",
            f"{renewals * client_renewal / 1e6 / HOSTS:.4f} cores a host",
        ],
        ["an acquisition and its release, their scripts", f"{script:.0f} us", f"{CYCLES * script / 1e6:.1f} cores"],
        ["an acquisition and its release, all of the server", f"{whole:.0f} us", f"{CYCLES * whole / 1e6:.1f} cores"],
        [f"longest script of a list of {LISTED:,}", f"{list_ms:.1f} ms", "the same: a list is paged"],
        [f"longest script of a count of {LISTED:,}", f"{count_ms:.2f} ms", "about the same"],
        *[[f"looks of {number} waiting processes", f"{found:.0f}/s", ""] for number, found in tries.items()],
        [f"looks of {processes:,} waiting processes", "", f"{all_looks:,.0f}/s, {all_looks * script / 2e6:.2f} cores"],
    ]
    title = (
        f"The walls: {HOSTS:,} hosts of {PROCESSES} processes, {HELD:,} locks held, {CYCLES:,} acquisitions a second"
    )
    table(title, ["what", "measured", "in all, by these figures"], rows)
    print(
        f"\n{os.cpu_count()} cores ({platform.machine()}, {platform.system()}), load average {os.getloadavg()[0]:.1f}"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
