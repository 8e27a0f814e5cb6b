"""What a cell stands on: a server behind a proxy, somebody who holds by one row, and an independent witness."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import redis
from django.test import override_settings

from tests.support import BUSY, Proxy, RedisServer, client_at, drop_connections, wait_until

from .arenas import DATABASES, Arena

SOON = 1.0
"""Seconds within which the pages say that a waiter has a free lock, and that nothing is left of what was given up."""


@dataclass
class Place:
    """Where a holder holds, and the options that every way to hold has."""

    name: str
    url: str
    location: str
    """The URL as a cache has it."""
    expire: float = 30.0
    timeout: float | None = 10.0
    number: int = 0
    """Which of those of a cell he is: values are computed once in a process, so he may pretend to be in another one."""

    @property
    def elsewhere(self) -> str:
        """The same server, as another process knows it."""
        return _elsewhere(self.location) if self.number % 2 else self.location

    @property
    def options(self) -> dict[str, Any]:
        return {"expire": self.expire, "timeout": self.timeout}

    @cached_property
    def client(self) -> redis.Redis:
        return client_at(self.url)  # type: ignore[return-value]

    @property
    def clients(self) -> list[redis.Redis]:
        """Clients of what a quorum lock takes for three servers."""
        url = urlsplit(self.url)
        return [client_at(urlunsplit(url._replace(path=f"/{number}"))) for number in DATABASES]  # type: ignore[misc]


def _elsewhere(location: str) -> str:
    return location.replace("127.0.0.1", "localhost")


LEAVE = object()


class Actor:
    """Somebody who holds by one row, again and again with the same object, in a thread or a task."""

    def __init__(self, cell: Cell, place: Place) -> None:
        self.cell, self.place, self.row = cell, place, cell.row
        self.made = self.row.make(place)
        self.held: Any = None
        self._thread = ThreadPoolExecutor(1, "actor")
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.inside = threading.Event()
        self.round: Future[None] | None = None

    # What the thread does

    def _body(self, held: Any) -> None:
        with self._inside(held):
            while True:
                function, answer = self._questions.get()
                if function is LEAVE:
                    return
                with _answering(answer):
                    answer.set_result(function(held))

    async def _abody(self, held: Any) -> None:
        with self._inside(held):
            while True:
                try:
                    function, answer = self._questions.get_nowait()
                except queue.Empty:
                    await asyncio.sleep(0.002)
                    continue
                if function is LEAVE:
                    return
                with _answering(answer):
                    value = function(held)
                    answer.set_result(await value if asyncio.iscoroutine(value) else value)

    @contextmanager
    def _inside(self, held: Any) -> Iterator[None]:
        self.held = held
        self.cell.comes_in(self)
        self.inside.set()
        try:
            yield
        finally:
            self.inside.clear()
            self.cell.goes_out(self)

    # What the cell has him do

    def once_here(self, act: Callable[[Any], Any] | None = None) -> None:
        """Hold, do something and leave in the calling thread, with a loop of its own: a forked child has no other."""
        self._questions = queue.SimpleQueue()
        if act is not None:
            self._questions.put((act, Future()))
        self._questions.put((LEAVE, None))
        if self.row.is_async:
            asyncio.run(self.row.aonce(self.made, self._abody))
        else:
            self.row.once(self.made, self._body)

    def start(self) -> None:
        """Let him begin to enter."""
        self._questions = queue.SimpleQueue()
        if self.row.is_async:
            self.round = self.cell.arena.in_the_loop(self.row.aonce(self.made, self._abody))
        else:
            self.round = self._thread.submit(self.row.once, self.made, self._body)

    def enter(self, within: float = 20.0) -> None:
        """Let him enter; raise what entering raises."""
        self.start()
        self.gets_in(within)

    def gets_in(self, within: float) -> None:
        assert self.round is not None
        wait_until(lambda: self.inside.is_set() or self.round.done(), within + BUSY, "he is inside")  # type: ignore[union-attr]
        if self.round.done():
            self.round.result()

    def ask(self, function: Callable[[Any], Any]) -> Any:
        """Ask in his thread or task."""
        answer: Future[Any] = Future()
        self._questions.put((function, answer))
        return answer.result(20)

    def begin_to_leave(self) -> Future[None]:
        assert self.round is not None
        self._questions.put((LEAVE, None))
        return self.round

    def leave(self, within: float = 20.0) -> None:
        """Let him leave; raise what leaving raises."""
        self.begin_to_leave().result(within + BUSY)

    @property
    def ended(self) -> bool:
        """Whether his last round is over."""
        return self.round is not None and self.round.done()

    def round_trip(self) -> None:
        self.enter()
        self.leave()

    @property
    def told(self) -> bool:
        """Whether he can know that he holds nothing any more: asked without a command."""
        if "asked" in self.row.traits:  # what it is given answers in its own thread only
            return self.ended or self.ask(self.row.lost) is not None
        return self.row.lost(self.held) is not None

    def close(self) -> None:
        if self.round is not None and not self.round.done():
            self._questions.put((LEAVE, None))
            with suppress(Exception):
                self.round.result(20)
        self._thread.submit(drop_connections)
        self._thread.shutdown(wait=False)


@contextmanager
def _answering(answer: Future[Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        answer.set_exception(error)
        raise


@dataclass
class Cell:
    """One row under one column."""

    row: Any
    arena: Arena
    name: str
    actors: list[Actor] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Violations that a body saw."""
    may_overlap: bool = False
    """Whether more may be inside than the limit: nobody is kept out."""
    _inside: list[Actor] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.url = self.arena.url

    @property
    def server(self) -> RedisServer:
        return self.arena.server

    @property
    def proxy(self) -> Proxy:
        return self.arena.proxy

    @property
    def raw(self) -> redis.Redis:
        return self.arena.raw

    def actor(self, name: str | None = None, **options: Any) -> Actor:
        location = self.arena.location_of(self.url)
        actor = Actor(self, Place(name or self.name, self.url, location, number=len(self.actors), **options))
        self.actors.append(actor)
        return actor

    def holder(self, **options: Any) -> Actor:
        """Return one who holds, beside as many others as the limit allows."""
        actors = [self.actor(**options) for _ in range(self.row.limit)]
        for actor in actors:
            actor.enter()
        return actors[0]

    def waiter(self, **options: Any) -> Actor:
        """Return one who waits: in the queue, where the row has one."""
        before = self.queued()
        actor = self.actor(**options)
        actor.start()
        if "queue" in self.row.lacks:
            time.sleep(0.1)
        else:
            wait_until(lambda: self.queued() > before, 10, "he waits in the queue")
        return actor

    # What bodies see

    def comes_in(self, actor: Actor) -> None:
        with self._lock:
            others = [each for each in self._inside if each.place.name == actor.place.name]
            self._inside.append(actor)
        if len(others) >= self.row.limit and not self.may_overlap:
            believers = 1 + sum("belief" in self.row.lacks or not each.told for each in others)
            if believers > self.row.limit:
                self.wrong.append(f"{believers} believe to hold it, and {self.row.limit} may")

    def goes_out(self, actor: Actor) -> None:
        with self._lock:
            self._inside.remove(actor)

    # The witness: raw commands, and nothing of the package

    def keys(self, kind: str, name: str | None = None) -> list[tuple[redis.Redis, bytes]]:
        """Return the keys of this kind ("lock", "queue", "released") that have the name in them, on all servers."""
        found = []
        for raw in self.arena.raws if "quorum" in self.row.traits else [self.raw]:
            found += [(raw, key) for key in raw.keys(f"*:{kind}:*{name or self.name}*")]
        return found

    def owners(self, name: str | None = None) -> list[bytes]:
        """Return the ids of those who hold it by what stands in Redis; a reservation has the fence 0."""
        return [parts[0] for parts in self._held(name)]

    def pids(self, name: str | None = None) -> set[int]:
        """Return the processes of those who hold it, by their records."""
        return {json.loads(parts[3])["pid"] for parts in self._held(name)}

    def _held(self, name: str | None = None) -> list[list[bytes]]:
        values = [raw.get(key) or b"\n0" for raw, key in self.keys("lock", name)]
        return [parts for parts in (value.split(b"\n", 3) for value in values) if parts[1] != b"0"]

    def delete(self, kind: str) -> None:
        for raw, key in self.keys(kind):
            raw.delete(key)

    def queued(self) -> int:
        return max((raw.zcard(key) for raw, key in self.keys("queue")), default=0)

    def leave_all(self) -> None:
        """Let all leave who are inside."""
        for actor in self.actors:
            if actor.inside.is_set():
                actor.leave()

    @contextmanager
    def configured(self, **options: Any) -> Iterator[None]:
        """Change the settings."""
        location, lock = self.arena.location_of(self.url), {"ON_WAIT_TIMEOUT": "raise"}  # as cache_page has no option
        name = f"django_redislock.cache.{self.arena.backend}"
        backend = {"BACKEND": name, "LOCATION": location, "OPTIONS": {"LOCK": lock}}
        elsewhere = backend | {"LOCATION": _elsewhere(location)}
        caches = {"default": backend, "elsewhere": elsewhere}
        with override_settings(DJANGO_REDISLOCK={"URL": self.url, **self.arena.settings, **options}, CACHES=caches):
            yield

    @contextmanager
    def own_connections(self, **options: object) -> Iterator[None]:
        """Let those who come now share no connections with other cells, nor what the process knows of the server."""
        self.url = f"{self.arena.url}?{urlencode({'client_name': self.name, **options})}"
        with self.configured():
            yield

    def close(self) -> None:
        for actor in self.actors:
            actor.close()
