"""One process holds, one waits: how long from the release until the waiter has the lock?"""

from __future__ import annotations

import multiprocessing
import time

import redis
from common import NAMES, ours, percentile, pottery, python_redis_lock, redis_py, server, table

ROUNDS, BATCH = 10, 30
MAKERS = (ours, python_redis_lock, redis_py, pottery)
FORK = multiprocessing.get_context("fork")


def waiter(url, pipe) -> None:
    pairs = {make: make(redis.Redis.from_url(url), make.__name__) for make in MAKERS}
    while (number := pipe.recv()) is not None:
        pair = pairs[MAKERS[number]]
        pipe.send("about to wait")
        pair.acquire()
        acquired = time.monotonic()
        pair.release()
        pipe.send(acquired)


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        here, there = FORK.Pipe()
        process = FORK.Process(target=waiter, args=(url, there))
        process.start()
        pairs = {make: make(client, make.__name__) for make in MAKERS}
        times: dict = {make: [] for make in MAKERS}
        for _ in range(ROUNDS):
            for number, make in enumerate(MAKERS):
                for _ in range(BATCH if make in (ours, python_redis_lock) else 5):
                    pairs[make].acquire()
                    here.send(number)
                    here.recv()
                    time.sleep(0.01)  # until it waits
                    released = time.monotonic()
                    pairs[make].release()
                    times[make].append((here.recv() - released) * 1000)
        here.send(None)
        process.join()
        rows = []
        for make in MAKERS:
            p50, p99 = percentile(times[make], 0.5), percentile(times[make], 0.99)
            ratio = p50 / percentile(times[python_redis_lock], 0.5)
            rows.append([NAMES[make], f"{p50:.2f}", f"{p99:.2f}", f"{ratio:.2f}"])
        table("Release to acquire, one waiter", ["", "p50 ms", "p99 ms", "p50 to python-redis-lock"], rows)


if __name__ == "__main__":
    main()
