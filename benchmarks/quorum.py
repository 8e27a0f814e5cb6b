"""How long does a cycle of a lock on five independent servers take: near them, 5 ms away, with one of them frozen?"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import redis
import redis.asyncio
from common import LIFE, Pair, table

SERVERS, ROUNDS, AWAY = 5, 100, 0.005


def ours(urls: list[str], name: str) -> Pair:
    from django_redislock.core import QuorumLock

    lock = QuorumLock([redis.Redis.from_url(url) for url in urls], name, expire=LIFE)
    return Pair(lock.acquire, lock.release)


def pottery(urls: list[str], name: str) -> Pair:
    from pottery import Redlock

    masters = {redis.Redis.from_url(url, socket_timeout=5) for url in urls}
    lock = Redlock(key=name, masters=masters, auto_release_time=LIFE)
    return Pair(lock.acquire, lock.release)


def cycles(pair: Pair, rounds: int) -> list[float]:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        pair.acquire()
        pair.release()
        taken.append(time.perf_counter() - started)
    return taken


async def async_cycles(urls: list[str], rounds: int) -> list[float]:
    from django_redislock.core import AsyncQuorumLock

    lock = AsyncQuorumLock([redis.asyncio.from_url(url) for url in urls], "tasks", expire=LIFE)
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        await lock.acquire()
        await lock.release()
        taken.append(time.perf_counter() - started)
    return taken


def row(what: str, where: str, measure: Callable[[int], list[float]], rounds: int) -> list[Any]:
    try:
        taken = measure(rounds + 1)[1:]  # the first one connects
    except Exception as error:
        return [what, where, type(error).__name__, ""]
    return [what, where, f"{statistics.median(taken) * 1000:.2f}", f"{max(taken) * 1000:.1f}"]


def main() -> None:
    from tests.support import Proxy, RedisServer

    makers = {"QuorumLock": ours, "pottery Redlock": pottery}
    rows = []
    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer()) for _ in range(SERVERS)]
        near = [server.url for server in servers]
        proxies = [stack.enter_context(Proxy(url)) for url in near]
        for proxy in proxies:
            proxy.delay_replies(AWAY)
        far = [proxy.url for proxy in proxies]
        for where, urls in (("near", near), ("5 ms away", far)):
            for what, make in makers.items():
                rows.append(row(what, where, lambda n, make=make, urls=urls: cycles(make(urls, "threads"), n), ROUNDS))
            rows.append(row("AsyncQuorumLock", where, lambda n, urls=urls: asyncio.run(async_cycles(urls, n)), ROUNDS))
        for what, make in makers.items():
            pair = make(near, "frozen")
            cycles(pair, 1)
            servers[0].pause()
            rows.append(row(what, "near, one frozen", lambda n, pair=pair: cycles(pair, n), 5))
            servers[0].resume()
    table(f"A cycle of a lock on {SERVERS} servers", ["", "servers", "median ms", "longest ms"], rows)


if __name__ == "__main__":
    main()
