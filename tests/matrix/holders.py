"""The rows: every way to hold, one entry each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from celery import Celery

from django_redislock import alock, alock_all, asemaphore, leader, lock, lock_all, locked, locked_atomic, semaphore
from django_redislock.cache import cached
from django_redislock.celery import single_instance
from django_redislock.core import AsyncQuorumLock, QuorumLock
from django_redislock.core.redis_py import AsyncRedisPyLock, RedisPyLock
from tests.support.cache_programs import cache_at

from .cell import Place


@dataclass(frozen=True)
class Holder:
    """One way to hold.

    `make` returns the object, of which there is one for each who holds. It is entered by ``with``, or by ``async with``
    for a row of asyncio; where there is no such block it is a function (a coroutine function) that calls the body it is
    given. `lacks` names what this way to hold has not, by the words of `LACKS`.
    """

    name: str
    make: Callable[[Place], Any]
    is_async: bool = False
    lacks: frozenset[str] = frozenset()
    limit: int = 1
    traits: frozenset[str] = frozenset()
    deployment: str = ""
    """Where the server is: one of `cell.DEPLOYMENTS`."""

    def once(self, made: Any, body: Callable[[Any], None]) -> None:
        """Hold once, in this thread, while the body runs; it is given what knows of a loss."""
        if "block" in self.lacks:
            made(body)
            return
        with made as held:
            body(made if held is None else held)

    async def aonce(self, made: Any, body: Any) -> None:
        if "block" in self.lacks:
            await made(body)
            return
        async with made as held:
            await body(made if held is None else held)

    def block(self, made: Any) -> Iterator[Any]:
        """Hold from one step of a generator to the next."""
        with made as held:
            yield held

    def lost(self, held: Any) -> Any:
        return held.lost


LACKS = {
    "belief": "no belief: its body is given nothing that knows of a loss",
    "block": "no block: it calls a function, so nobody else can leave it",
    "queue": "no queue: it tries again after a pause",
    "renewal": "no renewal: it has a given end",
    "settings": "no settings: it is made of a client",
    "fence": "no fence",
    "thread": "no threads: it is for tasks of asyncio",
    "task": "no tasks: it is for threads",
    "timeout": "no time limit: it waits until it holds",
    "exclusion": "no exclusion: who waits gets the value of the one who computes",
    "patience": "no patience: what Redis answers is raised at once, as the base class does",
    "fork": "no fork: the thread of asgiref that calls the site's functions does not survive it",
    "end": "no error at its end: what it has done stands",
}
"""Why a cell is left out: the whole list."""


def row(name: str, make: Callable[[Place], Any], *, lacks: str = "", limit: int = 1, traits: str = "") -> Holder:
    found = frozenset(traits.split())
    words = frozenset(lacks.split()) | {"thread" if "task" in found else "task"}
    assert words <= LACKS.keys(), words
    return Holder(name, make, "task" in found, words, limit, found)


def _locked(at: Place) -> Callable[[Any], None]:
    @locked("{name}", **at.options)
    def work(name: str, body: Any) -> None:
        body(None)

    return lambda body: work(at.name, body)


def _alocked(at: Place) -> Callable[[Any], Any]:
    @locked("{name}", **at.options)
    async def work(name: str, body: Any) -> None:
        await body(None)

    return lambda body: work(at.name, body)


class _Again:
    """A generator's block that is made anew at each entry."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._entered = make, []

    def __enter__(self) -> Any:
        block = self._make()
        held = block.__enter__()
        self._entered.append(block)
        return held

    def __exit__(self, *error: Any) -> Any:
        return self._entered.pop().__exit__(*error)


VALUE = "belief block exclusion fence end patience"


def _not_kept(value: Any) -> int:
    """The timeout of a value that is given to those who wait, and computed anew by the next one."""
    return 0


def _lease(at: Place) -> dict[str, Any]:
    return {"timeout": _not_kept, "expire": at.expire, "wait": at.timeout, "on_wait_timeout": "raise"}


def _cache(at: Place, backend: str = "") -> Any:
    if "+cluster" in at.url:  # known by its nodes, not by the URL
        return cache_at(at.location, "ClusterCache", OPTIONS={"socket_timeout": 4.9} if at.number % 2 else {})
    return cache_at(at.elsewhere, backend or "RedisCache")


def _value(at: Place, backend: str = "") -> Callable[[Any], Any]:
    cache = _cache(at, backend)
    return lambda body: cache.get_or_set(at.name, lambda: body(None) or 1, **_lease(at))


def _avalue(at: Place) -> Callable[[Any], Any]:
    cache = _cache(at)

    async def get(body: Any) -> None:
        async def compute() -> int:
            await body(None)
            return 1

        await cache.aget_or_set(at.name, compute, **_lease(at))

    return get


def _values(at: Place) -> Callable[[Any], Any]:
    cache = _cache(at)

    def compute(keys: Any) -> dict[Any, int]:
        while bodies:  # it may be called for each key by itself
            bodies.pop()(None)
        return dict.fromkeys(keys, 1)

    bodies: list[Any] = []

    def get(body: Any) -> None:
        bodies[:] = [body]
        cache.get_or_set_many(_two(at), compute, **_lease(at))

    return get


def _avalues(at: Place) -> Callable[[Any], Any]:
    cache = _cache(at)

    async def get(body: Any) -> None:
        bodies = [body]

        async def compute(keys: Any) -> dict[Any, int]:
            while bodies:  # it may be called for each key by itself
                await bodies.pop()(None)
            return dict.fromkeys(keys, 1)

        await cache.aget_or_set_many(_two(at), compute, **_lease(at))

    return get


def _acached(at: Place) -> Callable[[Any], Any]:
    options = _lease(at)
    timeout = options.pop("timeout")

    @cached(timeout, key=lambda body: at.name, using="elsewhere" if at.number % 2 else "default", **options)
    async def work(body: Any) -> int:
        await body(None)
        return 1

    return work


def _cached(at: Place) -> Callable[[Any], Any]:
    options = _lease(at)
    timeout = options.pop("timeout")

    using = "elsewhere" if at.number % 2 else "default"

    @cached(timeout, key=lambda body: at.name, using=using, **options)
    def work(body: Any) -> int:
        body(None)
        return 1

    return work


_bodies: dict[str, Any] = {}
"""What each thread's task does, because a task's arguments are data."""


def _task(at: Place, **options: Any) -> Callable[[Any], Any]:
    @single_instance(key="{name}", expire=at.expire, on_conflict="wait", wait=at.timeout, **options)
    def work(self: Any, name: str, number: int) -> None:
        _bodies[f"{name} {number}"](self.single_instance)

    app = Celery("matrix", set_as_current=False, broker="memory://", backend="cache+memory://")
    made = app.task(name="matrix", bind=True, shared=False, lazy=False)(work)

    def run(body: Any) -> None:
        _bodies[f"{at.name} {at.number}"] = body
        made.apply((at.name, at.number), throw=True).get()

    return run


QUORUM = "settings queue fence"


def _two(at: Place) -> list[str]:
    return [f"{at.name}-1", f"{at.name}-2"]


def _words(at: Place) -> dict[str, Any]:
    """Return the options as redis-py calls them."""
    return {"expire": at.expire, "auto_renewal": True, "blocking_timeout": at.timeout}


HOLDERS = [
    row("lock", lambda at: lock(at.name, **at.options)),
    row("alock", lambda at: alock(at.name, **at.options), traits="task"),
    row("lock(reentrant)", lambda at: lock(at.name, reentrant=True, **at.options), traits="reentrant"),
    row("alock(reentrant)", lambda at: alock(at.name, reentrant=True, **at.options), traits="task reentrant"),
    row("semaphore", lambda at: semaphore(at.name, 2, **at.options), limit=2),
    row("asemaphore", lambda at: asemaphore(at.name, 2, **at.options), limit=2, traits="task"),
    row("lock_all", lambda at: lock_all(_two(at), **at.options)),
    row("alock_all", lambda at: alock_all(_two(at), **at.options), traits="task"),
    row("locked", _locked, lacks="belief block"),
    row("locked(async)", _alocked, lacks="belief block", traits="task"),
    row("locked_atomic", lambda at: _Again(lambda: locked_atomic(at.name, **at.options)), traits="transaction"),
    row("cache.lock", lambda at: cache_at(at.url).lock(at.name, **_words(at))),
    row("cache.lock(django-redis)", lambda at: cache_at(at.url, "DjangoRedisCache").lock(at.name, **_words(at))),
    row("RedisPyLock", lambda at: RedisPyLock(at.client, at.name, **_words(at)), lacks="settings"),
    row(
        "AsyncRedisPyLock",
        lambda at: AsyncRedisPyLock(at.client, at.name, **_words(at)),
        lacks="settings",
        traits="task",
    ),
    row("leader", lambda at: leader(at.name, expire=at.expire), lacks="timeout"),
    row("leader(async)", lambda at: leader(at.name, expire=at.expire), lacks="timeout", traits="task"),
    row("get_or_set", _value, lacks=VALUE, traits="value"),
    row("get_or_set(django-redis)", lambda at: _value(at, "DjangoRedisCache"), lacks=VALUE, traits="value"),
    row("aget_or_set", _avalue, lacks=f"{VALUE} fork", traits="task value"),
    row("get_or_set_many", _values, lacks=VALUE, traits="value"),
    row("aget_or_set_many", _avalues, lacks=f"{VALUE} fork", traits="task value"),
    row("cached", _cached, lacks=VALUE, traits="value"),
    row("cached(async)", _acached, lacks=f"{VALUE} fork", traits="task value"),
    row("task", _task, lacks="block end", traits="asked"),
    row("task(limit)", lambda at: _task(at, limit=2), lacks="block end", limit=2, traits="asked"),
    row("task(group)", lambda at: _task(at, limit=2, group="several"), lacks="block end", limit=2, traits="asked"),
    row("task(queued+run)", lambda at: _task(at, scope="queued+run"), lacks="block end", traits="asked"),
    row("task(job)", lambda at: _task(at, scope="job"), lacks="block end", traits="asked"),
    row("QuorumLock", lambda at: QuorumLock(at.clients, at.name, **at.options), lacks=QUORUM, traits="quorum"),
    row(
        "AsyncQuorumLock",
        lambda at: AsyncQuorumLock(at.clients, at.name, **at.options),
        lacks=QUORUM,
        traits="task quorum",
    ),
]

ELSEWHERE = {
    "Cluster": "lock alock semaphore lock_all alock_all get_or_set aget_or_set task(queued+run)",
    "Sentinel": "lock alock",
    "replicas": "lock alock semaphore",
}
"""The rows that are tried in other deployments, too: each way in which the package speaks with a server."""

HOLDERS += [
    replace(each, name=f"{each.name} [{deployment}]", deployment=deployment)
    for deployment, names in ELSEWHERE.items()
    for each in HOLDERS
    if each.name in names.split()
]
