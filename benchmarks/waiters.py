"""Very many waiters on one lock: how busy is the server meanwhile, and what does a hand-over take of it, and in all?"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time

import redis
from common import NAMES, ours, python_redis_lock, server, table

FORK = multiprocessing.get_context("fork")
WATCH = 2.0
"""Seconds for which the server is watched while all wait."""


def waiters(make, url, count, ready, done) -> None:
    client = redis.Redis.from_url(
        url, max_connections=count + 10, socket_timeout=60
    )  # python-redis-lock waits no longer
    threading.stack_size(256 * 1024)

    def wait() -> None:
        pair = make(client, "crowded")
        ready.release()
        pair.acquire()
        pair.release()
        done.release()

    threads = [threading.Thread(target=wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(make, url: str, processes: int, each: int) -> list[object]:
    ready, done = FORK.Semaphore(0), FORK.Semaphore(0)
    with redis.Redis.from_url(url, socket_timeout=60) as client:
        client.flushdb()
        pair = make(client, "crowded")
        pair.acquire()
        children = [FORK.Process(target=waiters, args=(make, url, each, ready, done)) for _ in range(processes)]
        for child in children:
            child.start()
        for _ in range(processes * each):
            ready.acquire()
        settled = -1
        while True:  # until nobody is still on the way into the queue
            time.sleep(2)
            calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            if make is not ours or calls - settled <= 4 * processes + 4:
                break
            settled = calls
        cpu = server_seconds(client)
        time.sleep(WATCH)
        waiting = (server_seconds(client) - cpu) / WATCH
        cpu, started = server_seconds(client), time.monotonic()
        pair.release()
        for _ in range(processes * each):
            done.acquire()
        seconds = time.monotonic() - started
        used = server_seconds(client) - cpu
        for child in children:
            child.join()
    count = processes * each
    return [
        NAMES[make],
        count,
        f"{waiting * 100:.1f}",
        f"{seconds / count * 1000:.3f}",
        f"{used / count * 1000:.3f}",
        f"{used / seconds * 100:.0f}",
    ]


def server_seconds(client: redis.Redis) -> float:
    """Return the CPU time that the server has used."""
    used = client.info("cpu")
    return used["used_cpu_user"] + used["used_cpu_sys"]


def main() -> None:
    counts = [int(arg) for arg in sys.argv[1:]] or [1000, 10000]
    rows = []
    with server() as url:
        for count in counts:
            rows.append(measure(ours, url, 20, count // 20))
            if count <= 2000:
                rows.append(measure(python_redis_lock, url, 20, count // 20))
    columns = [
        "",
        "waiters",
        "CPU % of the server while all wait",
        "ms per hand-over",
        "ms of it the server's CPU",
        "%",
    ]
    table("Waiters on one lock", columns, rows)


if __name__ == "__main__":
    main()
