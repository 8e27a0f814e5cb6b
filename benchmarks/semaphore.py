"""What does a semaphore cost beside a lock, and how do 32 processes share four slots, beside a counter by hand?"""

from __future__ import annotations

import time

import redis
from cache_hit import configure
from common import LIFE, NAMES, Pair, ours, server
from contention import measure as measure_contention
from cycle import measure as measure_cycle, with_lock

SLOTS = 4
POLL = 0.01


def of_four(client: redis.Redis, name: str) -> Pair:
    return _of(client, name, SLOTS)


def of_twenty(client: redis.Redis, name: str) -> Pair:
    return _of(client, name, 20)


def of_a_hundred(client: redis.Redis, name: str) -> Pair:
    return _of(client, name, 100)


def _of(client: redis.Redis, name: str, limit: int) -> Pair:
    from django_redislock.core import Semaphore

    held = Semaphore(client, name, limit, expire=LIFE)
    return Pair(held.acquire, held.release)


def with_semaphore(client: redis.Redis, name: str) -> Pair:
    from django_redislock import semaphore

    def cycle() -> None:
        with semaphore(name, SLOTS):
            pass

    return Pair(cycle, lambda: None)


def counter(client: redis.Redis, name: str) -> Pair:
    """What teams write by hand: a number that is polled. The slot of a killed process is never free again."""
    script = client.register_script(
        f"if tonumber(redis.call('get', KEYS[1]) or 0) < {SLOTS} then return redis.call('incr', KEYS[1]) end"
    )

    def acquire() -> None:
        while not script(keys=[name]):
            time.sleep(POLL)

    return Pair(acquire, lambda: client.decr(name))


NAMES |= {
    of_four: "Semaphore, limit 4",
    of_twenty: "Semaphore, limit 20",
    of_a_hundred: "Semaphore, limit 100",
    with_semaphore: 'with semaphore("a", 4)',
    counter: "a counter by hand",
}


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        configure(url, default="django-redislock on django-redis")
        makers = (ours, of_four, of_twenty, of_a_hundred, with_lock, with_semaphore, counter)
        measure_cycle(client, "Uncontended cycle of a semaphore", makers, ours, "the lock")
        client.flushdb()
        measure_contention(url, 32, 0.001, 0, (of_four, counter), counter, SLOTS)
        measure_contention(url, 32, 0.01, 0, (of_four, counter), counter, SLOTS)


if __name__ == "__main__":
    main()
