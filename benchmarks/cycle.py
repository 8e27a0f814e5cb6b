"""How fast is an uncontended acquire and release, how many commands does it send, and what does the server pay?"""

from __future__ import annotations

import statistics
import time

import redis
from cache_hit import configure
from common import (
    NAMES,
    Pair,
    commands,
    floor,
    ours,
    pottery,
    python_redis_lock,
    python_redis_lock_renewed,
    redis_py,
    server,
    table,
)

ROUNDS, SECONDS = 100, 0.05  # many and short ones: what else the machine does meets all alike


# As users take them: a new lock each time.


def with_lock(client: redis.Redis, name: str) -> Pair:
    from django_redislock import lock

    return _entered(lambda: lock(name))


def with_cache_lock(client: redis.Redis, name: str) -> Pair:
    from django.core.cache import cache

    return _entered(lambda: cache.lock(name))


def with_redis_py(client: redis.Redis, name: str) -> Pair:
    return _entered(lambda: client.lock(name, timeout=30))


def _entered(make) -> Pair:
    def cycle() -> None:
        with make():
            pass

    return Pair(cycle, lambda: None)


NAMES |= {
    with_lock: 'with lock("a"), renewed',
    with_cache_lock: 'with cache.lock("a"), renewed',
    with_redis_py: "redis-py, with client.lock()",
}
MAKERS = (
    floor,
    ours,
    with_lock,
    with_cache_lock,
    redis_py,
    with_redis_py,
    python_redis_lock,
    python_redis_lock_renewed,
    pottery,
)


def cycles(pair, seconds: float) -> int:
    done, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        pair.acquire()
        pair.release()
        done += 1
    return done


def server_cpu(client: redis.Redis) -> float:
    """Return the seconds of CPU that the server has used."""
    used = client.info("cpu")
    return used["used_cpu_user"] + used["used_cpu_sys"]


def measure(client: redis.Redis, title: str, of=MAKERS, base=floor, other: str = "the floor") -> None:
    """Print the table of what the makers make, beside one of these."""
    pairs = {make: make(client, make.__name__) for make in of}
    speed: dict = {make: [] for make in of}
    paid: dict = {make: [] for make in of}
    for make in of:
        cycles(pairs[make], 0.1)
    for number in range(ROUNDS):
        order = of[number % len(of) :] + of[: number % len(of)]
        for make in order:
            before = server_cpu(client)
            done = cycles(pairs[make], SECONDS)
            speed[make].append(done / SECONDS)
            paid[make].append((server_cpu(client) - before) / done)
    rows = []
    for make in of:
        ratio, server_ratio = (
            statistics.median(a / b for a, b in zip(figures[make], figures[base], strict=True))
            for figures in (speed, paid)
        )

        def twenty(pair=pairs[make]) -> int:
            for _ in range(20):
                pair.acquire()
                pair.release()
            return 20

        rows.append(
            [
                NAMES[make],
                f"{statistics.median(speed[make]):.0f}",
                f"{ratio:.2f}",
                f"{commands(client, twenty):.1f}",
                f"{server_ratio:.2f}",
            ]
        )
    table(title, ["", "cycles/s", f"to {other}", "commands/cycle", f"server CPU to {other}"], rows)


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        configure(url, default="django-redislock on django-redis")
        measure(client, "Uncontended cycle")


if __name__ == "__main__":
    main()
