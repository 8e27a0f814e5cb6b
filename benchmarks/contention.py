"""Many processes want one lock: how many cycles a second, how long do the unlucky wait, and is it fair?"""

from __future__ import annotations

import multiprocessing
import statistics
import time

import redis
from common import NAMES, commands, jain, ours, percentile, pottery, python_redis_lock, redis_py, server, table

SECONDS, ROUNDS = 4.0, 3
MAKERS = (ours, python_redis_lock, redis_py, pottery)
FORK = multiprocessing.get_context("fork")


def worker(make, url, mutex, inside, outside, ready, go, results) -> None:
    if make is None:
        acquire, release = mutex.acquire, mutex.release
    else:
        pair = make(redis.Redis.from_url(url), "contended")
        acquire, release = pair.acquire, pair.release
    waits = []
    ready.release()
    go.wait()
    end = time.monotonic() + SECONDS
    while (before := time.monotonic()) < end:
        acquire()
        now = time.monotonic()
        if now < end:
            waits.append(now - before)
        time.sleep(inside)
        release()
        if outside:
            time.sleep(outside)
    results.put(waits)


def run(make, url: str, processes: int, inside: float, outside: float, slots: int = 1) -> list[list[float]]:
    mutex, ready, go, results = FORK.Semaphore(slots), FORK.Semaphore(0), FORK.Event(), FORK.SimpleQueue()
    args = (make, url, mutex, inside, outside, ready, go, results)
    workers = [FORK.Process(target=worker, args=args) for _ in range(processes)]
    for process in workers:
        process.start()
    for _ in workers:
        ready.acquire()
    go.set()
    waits = [results.get() for _ in workers]
    for process in workers:
        process.join()
    return waits


def measure(
    url: str, processes: int, inside: float, outside: float, of=MAKERS, peer=python_redis_lock, slots: int = 1
) -> None:
    """Print the table: of the machine's own semaphore, and of what the makers make, beside one of these."""
    makers = (None, *of)
    speed: dict = {make: [] for make in makers}
    waited: dict = {make: [] for make in makers}
    fair: dict = {make: [] for make in makers}
    sent: dict = {}
    with redis.Redis.from_url(url) as client:
        for _ in range(ROUNDS):
            for make in makers:
                client.flushdb()
                waits = run(make, url, processes, inside, outside, slots)
                speed[make].append(sum(map(len, waits)) / SECONDS)
                waited[make].append(percentile([wait for each in waits for wait in each], 0.99) * 1000)
                fair[make].append(jain([len(each) for each in waits]))
        for make in of:
            client.flushdb()

            def work(make=make) -> int:
                return sum(map(len, run(make, url, processes, inside, outside)))

            sent[make] = commands(client, work)
    rows = []
    for make in makers:
        rows.append(
            [
                NAMES[make] if make else "multiprocessing",
                f"{statistics.median(speed[make]):.0f}",
                f"{statistics.median(a / b for a, b in zip(speed[make], speed[peer], strict=True)):.2f}",
                f"{statistics.median(waited[make]):.1f}",
                f"{statistics.median(a / b for a, b in zip(waited[make], waited[peer], strict=True)):.2f}",
                f"{statistics.median(fair[make]):.2f}",
                f"{sent[make]:.1f}" if make in sent else "",
            ]
        )
    table(
        f"{processes} processes, {inside * 1000:g} ms inside, {outside * 1000:g} ms outside"
        + (f", {slots} at a time" if slots > 1 else ""),
        ["", "cycles/s", f"to {NAMES[peer]}", "p99 wait ms", f"to {NAMES[peer]}", "Jain", "commands/cycle"],
        rows,
    )


def main() -> None:
    with server() as url:
        measure(url, 8, 0.001, 0.002)
        measure(url, 32, 0.001, 0)


if __name__ == "__main__":
    main()
