"""A thousand held locks of 3 s are renewed for 15 s: threads, commands, CPU, memory, and how many are lost."""

from __future__ import annotations

import multiprocessing
import resource
import threading
import time
from pathlib import Path

import redis
from common import NAMES, ours, python_redis_lock_renewed, server, table

LOCKS, LIFE, SECONDS = 1000, 3, 15
MAKERS = (ours, python_redis_lock_renewed)
FORK = multiprocessing.get_context("fork")


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def holder(make, url, pipe) -> None:
    client = redis.Redis.from_url(url, max_connections=2000)
    if make is ours:
        from django_redislock.core import Lock

        def new(name):
            return Lock(client, name, expire=LIFE)
    else:
        import redis_lock

        def new(name):
            return redis_lock.Lock(client, name, expire=LIFE, auto_renewal=True)

    warm = new("warm")
    warm.acquire()
    warm.release()
    locks = [new(f"lock {number}") for number in range(LOCKS)]
    before, threads = memory(), threading.active_count()
    for lock in locks:
        lock.acquire()
    pipe.send(None)
    cpu = time.process_time()
    pipe.recv()
    pipe.send(
        {
            "threads": threading.active_count() - threads + (make is ours),
            "cpu": time.process_time() - cpu,
            "memory": memory() - before,
        }
    )
    pipe.recv()


def main() -> None:
    rows = []
    with server() as url, redis.Redis.from_url(url) as client:
        for make in MAKERS:
            client.flushdb()
            here, there = FORK.Pipe()
            process = FORK.Process(target=holder, args=(make, url, there))
            process.start()
            here.recv()
            before = client.info("commandstats")
            time.sleep(SECONDS)
            after = client.info("commandstats")
            sent = sum(
                after.get(f"cmdstat_{name}", {"calls": 0})["calls"]
                - before.get(f"cmdstat_{name}", {"calls": 0})["calls"]
                for name in ("evalsha", "eval")
            )
            pattern = "*:lock:lock *" if make is ours else "lock:lock *"
            held = sum(1 for _ in client.scan_iter(pattern, count=1000))
            here.send(None)
            said = here.recv()
            here.send(None)
            process.kill()
            process.join()
            rows.append(
                [
                    NAMES[make],
                    said["threads"],
                    f"{sent / SECONDS:.1f}",
                    f"{said['cpu']:.2f}",
                    f"{said['memory'] / 1e6:.1f}",
                    LOCKS - held,
                ]
            )
    table(
        f"{LOCKS} locks of {LIFE} s renewed for {SECONDS} s",
        ["", "threads", "commands/s", "CPU s", "memory MB", "lost"],
        rows,
    )


if __name__ == "__main__":
    main()
