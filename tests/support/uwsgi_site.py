"""A site for uWSGI. Its import uses a lock and computes a value, in the master, before that forks the workers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable

import django
import redis
from django.conf import settings

URL = os.environ["SITE_URL"]
settings.configure(
    CACHES={"default": {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": URL}},
    INSTALLED_APPS=["django_redislock"],
)
django.setup()

from django.core.cache import cache  # noqa: E402

from django_redislock import lock  # noqa: E402

with lock("at the import"):
    cache.get_or_set("at the import", lambda: 1)
client = redis.Redis.from_url(URL)
MASTER = os.getpid()


def cycles(count: int) -> list[int]:
    """Enter the lock so many times; return how many others were inside each time."""
    others = []
    for number in range(count):
        with lock("a", timeout=30) as held:
            others.append(client.incr("inside") - 1)
            assert held.owner().pid == os.getpid()
            client.decr("inside")
        assert cache.get_or_set(f"{os.getpid()}-{number}", lambda number=number: number) == number
    return others


def renewed(expire: float) -> list[object]:
    """Hold a lock for three times its expiry; return whether it is held then, and the process of its record."""
    with lock(f"renewed {os.getpid()}", expire=expire) as held:
        time.sleep(3 * expire)
        owner = held.owner()
        return [owner.id == held.id, owner.pid == os.getpid()]


def application(environ: dict[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Call the function that the path names, with its argument."""
    _, name, argument = environ["PATH_INFO"].split("/")
    said = {"cycles": cycles, "renewed": renewed}[name](json.loads(argument))
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps([os.getpid(), os.getpid() != MASTER, said]).encode()]
