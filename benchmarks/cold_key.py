"""Many processes want one key that is not in the cache: how often is it computed, and when has the last one its value?

First on loopback, 100 processes and 0.2 s of work; then 50 processes behind a round trip of 5 ms, from when the value
is ready.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis
from cache_hit import configure
from common import server, table

WORK, ROUNDS, CROWDS = 0.2, 3, 5
FORK = multiprocessing.get_context("fork")


def unprotected(key, compute):
    from django.core.cache import caches

    return caches["django-redis"].get_or_set(key, compute, 60)


def ours(key, compute):
    from django.core.cache import caches

    return caches["django-redislock on django-redis"].get_or_set(key, compute, 60)


def python_redis_lock(key, compute):
    from django.core.cache import caches

    return caches["python-redis-lock"].locked_get_or_set(key, compute, timeout=60)


def dogpile(key, compute):
    return _region().get_or_create(key, compute, expiration_time=60)


def _region(regions: list = []):  # noqa: B006  one for each process
    if not regions:
        from django.core.cache import caches
        from dogpile.cache import make_region

        url = caches["django-redis"]._server
        regions.append(
            make_region().configure(
                "dogpile.cache.redis", arguments={"url": url, "distributed_lock": True, "thread_local_lock": False}
            )
        )
    return regions[0]


NAMES = {
    unprotected: "django-redis get_or_set, unprotected",
    ours: "django-redislock",
    python_redis_lock: "python-redis-lock",
    dogpile: "dogpile.cache",
}

ALIASES = {ours: "django-redislock on django-redis", python_redis_lock: "python-redis-lock"}


def process(url: str, get, rounds: int, ready, go, ended) -> None:
    configure(url)
    from django.core.cache import caches

    caches[ALIASES.get(get, "django-redis")].get(
        "warm"
    )  # imported, connected, as by the page's other keys, and none of them has waited before
    for number in range(rounds):
        computed = []

        def compute(computed=computed) -> str:
            time.sleep(WORK)
            computed.append(time.monotonic())
            return "value"

        ready.release()
        go[number].wait()
        assert get(f"k{number}", compute) == "value"
        ended.put((time.monotonic(), computed))


def run(url: str, get, processes: int, rounds: int = ROUNDS) -> tuple[list[int], list[float], list[float]]:
    """Return for each round how often it was computed, and when the last had its value.

    The first times count since the start, the second ones since the value was ready.
    """
    rounds += 1  # the last one does not count: those who are done end their processes then
    ready, go, ended = FORK.Semaphore(0), [FORK.Event() for _ in range(rounds)], FORK.SimpleQueue()
    children = [FORK.Process(target=process, args=(url, get, rounds, ready, go, ended)) for _ in range(processes)]
    for child in children:
        child.start()
    counts, whole, after = [], [], []
    for number in range(rounds):
        for _ in children:
            ready.acquire()
        time.sleep(0.2)  # until all wait for the event
        began = time.monotonic()
        go[number].set()
        results = [ended.get() for _ in children]
        last = max(at for at, _ in results)
        computed = [at for _, times in results for at in times]
        counts.append(len(computed))
        whole.append(last - began)
        after.append(last - min(computed))
    for child in children:
        child.join()
    return counts[:-1], whole[:-1], after[:-1]


def first_crowds(url: str, client: redis.Redis, get) -> tuple[float, str, float]:
    """Return the milliseconds beyond the work that a first crowd takes, as the median of several, because they differ
    a lot; the least and the most of them; and how many commands each process sends."""
    found, sent = [], []
    for _ in range(CROWDS):
        client.flushdb()
        before = client.info("stats")["total_commands_processed"]
        found.append((run(url, get, 100, 1)[1][0] - WORK) * 1000)
        sent.append((client.info("stats")["total_commands_processed"] - before) / 200)  # of two rounds
    return statistics.median(found), f"{min(found):.0f} to {max(found):.0f}", statistics.median(sent)


async def relay(port: int, target: int, delay: float) -> None:
    loop = asyncio.get_running_loop()

    async def pipe(reader, writer) -> None:
        while data := await reader.read(1 << 16):
            loop.call_later(delay, writer.write, data)
        loop.call_later(delay, writer.close)

    async def accept(reader, writer) -> None:
        there = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pipe(reader, there[1]), pipe(there[0], writer), return_exceptions=True)

    async with await asyncio.start_server(accept, "127.0.0.1", port, backlog=500) as listening:
        await listening.serve_forever()


@contextmanager
def delayed(url: str, round_trip: float) -> Iterator[str]:
    """Give a URL at which the server is so far away."""
    from tests.support import free_port

    port = free_port()
    target = urlsplit(url).port
    child = FORK.Process(target=lambda: asyncio.run(relay(port, target, round_trip / 2)))
    child.start()
    try:
        with redis.Redis(port=port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 100)) as client:
            client.ping()
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        child.terminate()
        child.join()


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        whole: dict = {}
        firsts: dict = {}
        rows = []
        for get in NAMES:
            client.flushdb()
            counts, whole[get], _ = run(url, get, 100, ROUNDS + 1)
            later = [(seconds - WORK) * 1000 for seconds in whole[get][1:]]
            later_base = [(seconds - WORK) * 1000 for seconds in whole[unprotected][1:]]
            beyond, beyond_base = statistics.median(later), statistics.median(later_base)
            firsts[get], spread, sent = first_crowds(url, client, get)
            first, first_base = firsts[get], firsts[unprotected]
            ratio = (beyond + WORK * 1000) / (beyond_base + WORK * 1000)
            rows.append(
                [
                    *(NAMES[get], max(counts), f"{first:.0f}", f"{first / first_base:.2f}", spread, f"{sent:.1f}"),
                    *(f"{beyond:.0f}", f"{beyond / beyond_base:.2f}", f"{ratio:.2f}"),
                ]
            )
        head = [
            "",
            "computations",
            "first crowd: ms beyond the work",
            "to unprotected",
            "least to most",
            "commands of a process",
            "later",
            "to unprotected",
            "with the work",
        ]
        table(f"100 processes, one cold key, {WORK:g} s of work", head, rows)

        after: dict = {}
        rows = []
        with delayed(url, 0.005) as far:
            for get in (python_redis_lock, ours, dogpile):
                client.flushdb()
                counts, _, after[get] = run(far, get, 50)
                milliseconds = statistics.median(after[get]) * 1000
                ratio = milliseconds / (statistics.median(after[python_redis_lock]) * 1000)
                rows.append([NAMES[get], max(counts), f"{milliseconds:.0f}", f"{ratio:.3f}"])
        head = ["", "computations", "ms to the last, from when it is ready", "to python-redis-lock"]
        table("50 processes, a round trip of 5 ms", head, rows)


if __name__ == "__main__":
    main()
