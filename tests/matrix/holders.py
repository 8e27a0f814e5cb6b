"""The rows: every way to hold, one entry each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from django_redislock import (
    AcquireTimeout,
    alock,
    alock_all,
    asemaphore,
    leader,
    lock,
    lock_all,
    locked,
    locked_atomic,
    semaphore,
)
from django_redislock.core import AsyncQuorumLock, QuorumLock
from django_redislock.core.redis_py import AsyncRedisPyLock, RedisPyLock
from tests.support.cache_programs import cache_at

from . import commands, tasks, values
from .cell import Place
from .values import two


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
    """Where the server is: one of `arenas.DEPLOYMENTS`."""

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
    "fork": "no fork: it is a process of its own, and tests/run_once/test_run*.py stop and kill it",
    "worker": "not in a worker: Celery opens files, its threads hold locks, its messages come again after a pause",
    "here": "not here: it is a process of its own, whose lines and settings are not those of the test",
    "quick": "not each error, nor sixteen who wait: each round starts a process, which waits and leaves as a lock does",
    "text": "no text: what the cache stores is in pickle, which a client that decodes cannot read",
    "clock": "no clock of the server: the step ends the old value, for which nobody waits",
    "alone": "not again: what the proxy answers, and what Python does in a fork, is the same in each deployment",
    "off": "no refresh without locks: an old value stays until it expires",
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


class _Attempted:
    """The block of a lock's `attempt()`, which tells that it was not free; here that is an error again."""

    def __init__(self, made: Any) -> None:
        self._made, self._entered = made, []

    def _noted(self, attempt: Any, held: Any) -> Any:
        if held is None:
            raise AcquireTimeout(self._made.name, 0.0)
        self._entered.append(attempt)
        return held

    def __enter__(self) -> Any:
        attempt = self._made.attempt()
        return self._noted(attempt, attempt.__enter__())

    def __exit__(self, *error: Any) -> Any:
        return self._entered.pop().__exit__(*error)

    async def __aenter__(self) -> Any:
        attempt = self._made.attempt()
        return self._noted(attempt, await attempt.__aenter__())

    async def __aexit__(self, *error: Any) -> Any:
        return await self._entered.pop().__aexit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


QUORUM = "settings queue fence"


REFRESH = f"{values.LACKS} off text"


def _words(at: Place) -> dict[str, Any]:
    """Return the options as redis-py calls them."""
    return {"expire": at.expire, "auto_renewal": True, "blocking_timeout": at.timeout}


HOLDERS = [
    row("lock", lambda at: lock(at.name, **at.options)),
    row("alock", lambda at: alock(at.name, **at.options), traits="task"),
    row("lock.attempt", lambda at: _Attempted(lock(at.name, **at.options)), traits="long"),
    row("alock.attempt", lambda at: _Attempted(alock(at.name, **at.options)), traits="task long"),
    row("lock(reentrant)", lambda at: lock(at.name, reentrant=True, **at.options), traits="reentrant"),
    row("alock(reentrant)", lambda at: alock(at.name, reentrant=True, **at.options), traits="task reentrant"),
    row("semaphore", lambda at: semaphore(at.name, 2, **at.options), limit=2),
    row("asemaphore", lambda at: asemaphore(at.name, 2, **at.options), limit=2, traits="task"),
    row("lock_all", lambda at: lock_all(two(at), **at.options)),
    row("alock_all", lambda at: alock_all(two(at), **at.options), traits="task"),
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
    row("get_or_set", values.one, lacks=values.LACKS, traits="value"),
    row(
        "get_or_set(django-redis)",
        lambda at: values.one(at, "DjangoRedisCache"),
        lacks=values.LACKS,
        traits="value long",
    ),
    row("aget_or_set", values.aone, lacks=values.LACKS, traits="task value"),
    row("get_or_set_many", values.many, lacks=values.LACKS, traits="value long"),
    row("aget_or_set_many", values.amany, lacks=values.LACKS, traits="task value"),
    row("cached", values.cached_one, lacks=values.LACKS, traits="value long"),
    row("cached(async)", values.acached_one, lacks=values.LACKS, traits="task value"),
    row("cache_page", values.page, lacks=f"{values.LACKS} text", traits="value long"),
    row("cache_page(async)", values.apage, lacks=f"{values.LACKS} text", traits="task value"),
    row(
        "stale(inline)",
        lambda at: values.refreshed(at, **values.STALE, wait=at.timeout, on_wait_timeout="stale"),
        lacks=REFRESH,
        traits="value stands long",
    ),
    row(
        "stale(inline, async)",
        lambda at: values.arefreshed(at, **values.STALE, wait=at.timeout, on_wait_timeout="stale"),
        lacks=REFRESH,
        traits="task value stands",
    ),
    row(
        "stale(thread)",
        lambda at: values.refreshed(at, **values.STALE, refresh="thread"),
        lacks=f"{REFRESH} queue",
        traits="value stands long",
    ),
    row(
        "stale(task)",
        lambda at: values.arefreshed(at, **values.STALE, refresh="thread"),
        lacks=f"{REFRESH} queue clock",
        traits="task value stands",
    ),
    row(
        "stale(Celery)",
        lambda at: values.refreshed_by_celery(at, **values.STALE),
        lacks=f"{REFRESH} queue",
        traits="value stands long",
    ),
    row(
        "refresh_before",
        lambda at: values.refreshed(at, **values.EARLY, wait=at.timeout, on_wait_timeout="stale"),
        lacks=REFRESH,
        traits="value stands long",
    ),
    row("task", tasks.task, lacks="block end", traits="asked"),
    row("task(limit)", lambda at: tasks.task(at, limit=2), lacks="block end", limit=2, traits="asked long"),
    row(
        "task(group)",
        lambda at: tasks.task(at, limit=2, group="several"),
        lacks="block end",
        limit=2,
        traits="asked long",
    ),
    row("task(queued+run)", lambda at: tasks.task(at, scope="queued+run"), lacks="block end", traits="asked long"),
    row("task(job)", lambda at: tasks.task(at, scope="job"), lacks="block end", traits="asked long"),
    row("task(keep_for)", lambda at: tasks.task(at, keep_for=0.02), lacks="block end", traits="asked kept long"),
    row("message", tasks.message, lacks="block worker end", traits="asked long"),
    row("message(late)", lambda at: tasks.message(at, acks_late=True), lacks="block worker end", traits="asked long"),
    row(
        "message(rescheduled)",
        lambda at: tasks.message(
            at,
            on_conflict="reschedule",
            on_backend_error="reschedule",
            reschedule_delay=0.05,
            reschedule_limit=at.timeout,
            acks_late=True,
        ),
        lacks="block worker end queue",
        traits="asked long",
    ),
    row("message(queued)", tasks.queued, lacks="belief block worker end queue renewal", traits="asked long"),
    row(
        "message(queued+run)",
        lambda at: tasks.message(at, scope="queued+run"),
        lacks="block worker end queue",
        traits="asked long",
    ),
    row(
        "message(replace)",
        lambda at: tasks.message(at, scope="queued+run", on_duplicate="replace"),
        lacks="block worker end queue",
        traits="asked long",
    ),
    row(
        "message(job, retried)",
        lambda at: tasks.message(at, scope="job", retries=True),
        lacks="block worker end queue",
        traits="asked long",
    ),
    row("redislock run", commands.command, lacks="block fork here quick"),
    row("beat", commands.beat, lacks="block worker end timeout", traits="asked long"),
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
    replace(
        each,
        name=f"{each.name} [{deployment}]",
        deployment=deployment,
        lacks=each.lacks | {"alone"},
        traits=each.traits | {"long"},
    )
    for deployment, names in ELSEWHERE.items()
    for each in HOLDERS
    if each.name in names.split()
]
