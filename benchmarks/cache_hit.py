"""What does a hit cost? Each backend's get_or_set against its base class's, and python-redis-lock's."""

from __future__ import annotations

import random
import statistics
import time

import redis
from common import server, table

ROUNDS, CALLS = 1_500, 20
"""Short loops in a random order, so that neither a neighbour nor what else the machine does meets one of them only."""


def configure(url: str, default: str = "django-redis") -> None:
    from django.conf import settings

    backends = {
        "django-redis": "django_redis.cache.RedisCache",
        "django-redislock on django-redis": "django_redislock.cache.RedisCache",
        "python-redis-lock": "redis_lock.django_cache.RedisCache",
        "Django": "django.core.cache.backends.redis.RedisCache",
        "django-redislock on Django's": "django_redislock.cache.DjangoRedisCache",
    }
    caches = {name: {"BACKEND": backend, "LOCATION": url} for name, backend in backends.items()}
    settings.configure(CACHES=caches | {"default": caches[default]}, INSTALLED_APPS=[])

    import django

    django.setup()


def loop(call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        configure(url)
        from django.core.cache import caches

        def compute() -> str:
            return "never"

        calls = {}
        for name in ("django-redis", "django-redislock on django-redis", "Django", "django-redislock on Django's"):
            cache = caches[name]
            calls[name] = lambda cache=cache: cache.get_or_set("k" + cache.__module__, compute, 3600)
        locked = caches["python-redis-lock"]
        calls["python-redis-lock"] = lambda: locked.locked_get_or_set("kp", compute, timeout=3600)
        base_cache = caches["django-redis"]
        calls["django-redis get"] = lambda: base_cache.get("kdjango_redis.cache")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            loop(call, 200)
        names = list(calls)
        for _ in range(ROUNDS):
            for name in random.sample(names, len(names)):
                times[name].append(loop(calls[name], CALLS))
        bases = {"django-redislock on Django's": "Django", "Django": "Django"}
        rows = []
        for name in names:
            base = times[bases.get(name, "django-redis")]
            ratio = statistics.median(times[name]) / statistics.median(base)
            rows.append(
                [name, f"{statistics.median(times[name]):.1f}", f"{ratio:.3f}", bases.get(name, "django-redis")]
            )
        table("A hit", ["", "us a call", "to its base", "base"], rows)
        client.flushdb()


if __name__ == "__main__":
    main()
