"""Caches for the tests, and what the processes of the cache tests do."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import redis
from django.utils.module_loading import import_string

from django_redislock.cache import DjangoRedisCache, refreshable
from django_redislock.cache.lease import single_flight
from django_redislock.cache.lease.request import lease_keys
from django_redislock.cache.lease.store import digest
from django_redislock.core import Lock
from django_redislock.core.driver import wakeups_tasks, wakeups_threads
from django_redislock.core.driver.registry import server_of
from tests.support import say, wait_until


def cache_at(location: Any, backend: str = "RedisCache", **params: Any) -> Any:
    """Return a new cache backend, as Django makes one for every thread."""
    return import_string(f"django_redislock.cache.{backend}")(location, params)


def cache_elsewhere(url: str, backend: str = "RedisCache") -> Any:
    """Return a cache that shares no flight and no knowledge with the one at this URL, as that of another process."""
    if backend == "ClusterCache":
        return cache_at(url, backend, OPTIONS={"client_name": "elsewhere"})
    return cache_at(url.replace("127.0.0.1", "localhost"), backend)


def getter(cache: Any, by_task: bool) -> Callable[..., Any]:
    """Return ``get(key, default, …)``, called in a thread, or in a task with a default that runs in a thread."""

    def get(*args: Any, **options: Any) -> Any:
        if by_task:
            return asyncio.run(cache.aget_or_set(*args, **options))
        return cache.get_or_set(*args, **options)

    return get


def base_at(location: Any, backend: str = "RedisCache", **params: Any) -> Any:
    """Return the backend that ours is made from."""
    if backend == "ClusterCache":
        base = import_string("django_redis.cache.RedisCache")(location, params)
        base._client_cls = import_string("django_redislock.cache.backends.cluster_backend.NodesClient")
        return base
    bases = {"RedisCache": "django_redis.cache", "DjangoRedisCache": "django.core.cache.backends.redis"}
    return import_string(f"{bases[backend]}.RedisCache")(location, params)


def commands(sent: Iterable[str]) -> list[str]:
    """Return the names of the commands that were sent, without those that a new connection begins with."""
    names = [line.split()[0] for line in sent]
    return [name for name in names if name not in ("HELLO", "CLIENT", "SELECT", "CLUSTER", "COMMAND")]


def followers() -> int:
    """Return how many threads of this process wait for another one's flight."""
    return sum(len(flight.followers) for flight in list(single_flight._flights.values()))


def order(client: redis.Redis, **changes: Any) -> dict[str, Any]:
    """Return what a worker is sent to compute "k" anew."""
    usual: dict[str, Any] = {
        "key": "k",
        "version": None,
        "redis_key": ":1:k",
        "tenant": None,
        "timeout": 60,
        "args": ["worker"],
        "kwargs": {"year": 2026},
        "options": {},
        "stale": 30.0,
        "timeout_for": None,
        "should_cache": None,
        "old": digest(client.get(":1:k")).decode(),
        "id": "an-id",
        "default": "tests.support.cache_programs.celebrate",
    }
    return usual | changes


class Work:
    """A default that runs until the test lets it end."""

    def __init__(self, value: Any = "v") -> None:
        self.value = value
        self.calls = 0
        self.running = threading.Event()
        self.end = threading.Event()

    def __call__(self) -> Any:
        self.calls += 1
        self.running.set()
        assert self.end.wait(30)
        return self.value

    async def async_(self) -> Any:
        self.calls += 1
        self.running.set()
        while not self.end.is_set():
            await asyncio.sleep(0.01)
        return self.value


def never(*args: Any) -> Any:
    raise AssertionError(f"computed although nobody should, for {args}")


@refreshable
def refreshable_never() -> Any:
    raise AssertionError("not called here")


def upper(keys: Iterable[str]) -> dict[str, str]:
    return {key: key.upper() for key in keys}


def ask(
    url: str,
    backend: str,
    key: str,
    answer: Any,
    options: dict[str, Any],
    lock: dict[str, Any] | None = None,
    by_task: bool = False,
) -> None:
    """At each line that comes, ask for the value; say so when it is to be computed here, and wait for another line."""
    cache = cache_at(url, backend, OPTIONS={"LOCK": lock or {}})
    get = getter(cache, by_task)
    get(f"warm {os.getpid()}", lambda: 1)  # connections and scripts are there

    def compute() -> Any:
        say(event="computing", at=time.time())
        line = input()
        match line:
            case "raise":
                raise ValueError(f"computed by {os.getpid()}")
            case "raise unsendable":
                raise type("Unsendable", (Exception,), {})("never mind")
            case "be interrupted":
                raise type("SoftTimeLimitExceeded", (Exception,), {})
        return line or answer

    say(event="ready")
    while input() == "ask":
        try:
            say(event="got", value=get(key, compute, 60, **options), at=time.time())
        except Exception as error:
            say(event="failed", error=f"{type(error).__name__}: {error}")


def crowd(url: str, backend: str, key: str, size: int, tasks: bool = False) -> None:
    """At a line, ask in many threads or tasks at once, and say so when all have asked.

    Who computes says so, too, and awaits another line ("raise" fails).
    """
    cache = cache_at(url, backend)
    counter: Any = (redis.RedisCluster if backend == "ClusterCache" else redis.Redis).from_url(url)
    outcomes: list[Any] = []
    start = threading.Barrier(size + 1)

    def compute() -> Any:
        at_once = counter.incr("computing now")
        counter.incr("computed")
        say(event="computing", at_once=at_once)
        line = input()
        counter.decr("computing now")
        if line == "raise":
            raise ValueError("no value")
        return {"by": "one"}

    def one() -> None:
        start.wait()
        try:
            outcomes.append(cache.get_or_set(key, compute, 60))
        except ValueError as error:
            outcomes.append(_told(error))

    async def all_at_once() -> None:
        calls = [asyncio.ensure_future(cache.aget_or_set(key, compute, 60)) for _ in range(size)]
        while followers() < size - 1:
            await asyncio.sleep(0.01)
        say(event="asked")
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            outcomes.append(_told(outcome) if isinstance(outcome, Exception) else outcome)

    if tasks:
        say(event="ready")
        input()
        asyncio.run(all_at_once())
        say(event="done", outcomes=outcomes)
        return
    threads = [threading.Thread(target=one) for _ in range(size)]
    for thread in threads:
        thread.start()
    say(event="ready")
    input()
    start.wait()
    wait_until(lambda: followers() == size - 1)
    say(event="asked")
    for thread in threads:
        thread.join()
    say(event="done", outcomes=outcomes)


def _told(error: Exception) -> Any:
    return [type(error).__name__, str(error), getattr(error, "__notes__", [])]


def fork_inside(url: str, backend: str) -> None:
    """Fork while computing; the child comes back first, with a value of its own."""
    cache = cache_at(url, backend)
    children = []

    def compute() -> str:
        child = os.fork()
        if child == 0:
            return "child's"
        children.append(child)
        os.waitpid(child, 0)
        say(event="after the child", stored=cache.get("k"), lease=cache_is_computing(cache, "k"))
        return "parent's"

    value = cache.get_or_set("k", compute, 60)
    if not children:
        os.write(1, b'{"event": "child", "value": "%s"}\n' % value.encode())
        os._exit(0)
    say(event="parent", value=value, stored=cache.get("k"))


def cache_is_computing(cache: Any, key: str) -> bool:
    """Return whether anybody computes the value of the key now."""
    (client,) = cache._clients_to_scan()
    return f"cache:{cache._redis_key(key, None)}" in held(client)


def held(client: Any) -> list[str]:
    """Return the names of all locks and leases held now, also of the leases on a Cluster, which no index contains."""
    return [key.decode().partition("}:lock:")[2] for key in client.scan_iter("{redislock:*}:lock:*", count=1000)]


def waiters(client: Any, key: str = "*") -> int:
    """Return how many processes wait for the value of this key of the default cache, or for any value."""
    return sum(client.zcard(queue) for queue in client.scan_iter(f"{{redislock:*}}:queue:cache::1:{key}", count=1000))


def lease_elsewhere(client: Any, key: str, **options: Any) -> Lock:
    """Return the lease of this key of the default cache as a lock, for a test that computes as another process does."""
    lock = Lock(client, f"cache::1:{key}", **options)
    lock._keys = lease_keys(server_of(client), "redislock", lock.name, f":1:{key}")
    return lock


class SiteCache(DjangoRedisCache):
    """A backend of a site, which its settings name through another module."""


def make_site_cache(location: Any, params: dict[str, Any]) -> SiteCache:
    return SiteCache(location, params)


@refreshable
def celebrate(whom: str, year: int) -> dict[str, Any]:
    """Compute a value in whatever process it is."""
    return {"greeting": f"{whom} {year}", "pid": os.getpid()}


@refreshable
async def acelebrate(whom: str, year: int) -> dict[str, Any]:
    return celebrate(whom, year)


def compute_many_keys(url: str, count: int, tasks: bool) -> None:
    """At a line, want so many keys at once, each computed in 10 ms; say how many this process computed."""
    # A loop that is busy with a thousand tasks takes its time to notice that it is connected.
    patience = {"SOCKET_TIMEOUT": 60, "SOCKET_CONNECT_TIMEOUT": 60}
    cache = cache_at(url, OPTIONS={"LOCK": {"WAIT": 60, "ON_WAIT_TIMEOUT": "raise"}, **patience})
    cache.get_or_set(f"warm {os.getpid()}", lambda: 1)
    computed = []

    def compute(key: str) -> str:
        computed.append(key)
        time.sleep(0.01)  # the work
        return f"value of {key}"

    async def acompute(key: str) -> str:
        computed.append(key)
        await asyncio.sleep(0.01)  # the work
        return f"value of {key}"

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*[cache.aget_or_set(key, partial(acompute, key), 60) for key in keys])

    keys = [f"k{number}" for number in range(count)]
    random.shuffle(keys)
    say(event="ready")
    input()
    if tasks:
        values = asyncio.run(all_at_once())
    else:
        with ThreadPoolExecutor(50) as pool:
            values = list(pool.map(lambda key: cache.get_or_set(key, partial(compute, key), 60), keys))
    assert values == [f"value of {key}" for key in keys]
    assert not single_flight._flights
    say(event="done", computed=len(computed), threads=threading.active_count())


def wait_for_values(url: str, tasks: bool) -> None:
    """At each line, want the key that it names, which somebody else computes; wake-ups alone end the wait."""
    for room in (wakeups_threads, wakeups_tasks):
        assert room.POLL_INTERVAL < 60
        room.POLL_INTERVAL = 60.0
    cache = cache_at(url)
    with asyncio.Runner() as runner:

        def get(key: str, default: Any) -> Any:
            if tasks:
                return runner.run(_awaited(cache.aget_or_set(key, default, 60)))
            return cache.get_or_set(key, default, 60)

        get(f"warm {os.getpid()}", lambda: 1)  # connections and scripts are there
        say(event="ready")
        while key := input():
            say(event="got", value=get(key, lambda: "not computed here"))


async def _awaited(coroutine: Any) -> Any:
    return await coroutine
