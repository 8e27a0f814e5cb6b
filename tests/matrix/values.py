"""How values of the cache are computed: a call with its body in place of the computation."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import redis
from asgiref.sync import SyncToAsync
from celery import Celery, _state
from django.core.cache import caches
from django.http import HttpResponse
from django.test import RequestFactory
from django_redis.exceptions import ConnectionInterrupted

from django_redislock.cache import cache_page, cached, refreshable
from django_redislock.cache.lease import single_flight
from tests.celery.deliveries import deliver, take
from tests.support.cache_programs import cache_at

from .cell import Place
from .rounds import Round

LACKS = "belief block exclusion fence end patience"


def two(at: Place) -> list[str]:
    return [f"{at.name}-1", f"{at.name}-2"]


def _alias(at: Place) -> str:
    """The same cache, as another process knows it."""
    return "elsewhere" if at.number % 2 else "default"


_pid = os.getpid()


def _with_a_thread() -> None:
    """Give a forked child a thread for `sync_to_async`: that of its parent, for which asgiref waits, is not there."""
    global _pid
    if os.getpid() != _pid:
        _pid = os.getpid()
        SyncToAsync.single_thread_executor = ThreadPoolExecutor(1)


def _not_kept(value: Any) -> int:
    """The timeout of a value that is given to those who wait, and computed anew by the next one."""
    return 0


def _lease(at: Place) -> dict[str, Any]:
    return {"timeout": _not_kept, "expire": at.expire, "wait": at.timeout, "on_wait_timeout": "raise"}


def _cache(at: Place, backend: str = "RedisCache") -> Any:
    if "+cluster" in at.url:  # known by its nodes, not by the URL
        return cache_at(at.location, "ClusterCache", OPTIONS={"socket_timeout": 4.9} if at.number % 2 else {})
    return cache_at(at.elsewhere, backend)


def one(at: Place, backend: str = "RedisCache") -> Callable[[Any], Any]:
    cache = _cache(at, backend)
    return lambda body: cache.get_or_set(at.name, lambda: body(None) or 1, **_lease(at))


def aone(at: Place) -> Callable[[Any], Any]:
    cache = _cache(at)

    async def get(body: Any) -> None:
        _with_a_thread()

        async def compute() -> int:
            await body(None)
            return 1

        await cache.aget_or_set(at.name, compute, **_lease(at))

    return get


def many(at: Place) -> Callable[[Any], Any]:
    cache = _cache(at)

    def compute(keys: Any) -> dict[Any, int]:
        while bodies:  # it may be called for each key by itself
            bodies.pop()(None)
        return dict.fromkeys(keys, 1)

    bodies: list[Any] = []

    def get(body: Any) -> None:
        bodies[:] = [body]
        cache.get_or_set_many(two(at), compute, **_lease(at))

    return get


def amany(at: Place) -> Callable[[Any], Any]:
    cache = _cache(at)

    async def get(body: Any) -> None:
        _with_a_thread()
        bodies = [body]

        async def compute(keys: Any) -> dict[Any, int]:
            while bodies:  # it may be called for each key by itself
                await bodies.pop()(None)
            return dict.fromkeys(keys, 1)

        await cache.aget_or_set_many(two(at), compute, **_lease(at))

    return get


def acached_one(at: Place) -> Callable[[Any], Any]:
    options = _lease(at)
    timeout = options.pop("timeout")

    @cached(timeout, key=lambda body: at.name, using=_alias(at), **options)
    async def work(body: Any) -> int:
        await body(None)
        return 1

    async def get(body: Any) -> None:
        _with_a_thread()
        await work(body)

    return get


def cached_one(at: Place) -> Callable[[Any], Any]:
    options = _lease(at)
    timeout = options.pop("timeout")

    using = _alias(at)

    @cached(timeout, key=lambda body: at.name, using=using, **options)
    def work(body: Any) -> int:
        body(None)
        return 1

    return work


_pages: dict[str, int] = {}
"""How many pages there are under each name: each round asks for another page, because a page is kept."""


def _view(at: Place, view: Callable[..., Any]) -> Callable[..., Any]:
    return cache_page(60, cache=_alias(at), key_prefix=at.name, wait=at.timeout, expire=at.expire)(view)


def page(at: Place) -> Callable[[Any], Any]:
    def render(request: Any, body: Any) -> HttpResponse:
        body(None)
        return HttpResponse("rendered")

    view = _view(at, render)

    def get(body: Any) -> None:
        number = _pages.get(at.name, 0)
        assert view(RequestFactory().get(f"/{number}"), body).content == b"rendered"
        _pages[at.name] = number + 1

    return get


def apage(at: Place) -> Callable[[Any], Any]:
    async def render(request: Any, body: Any) -> HttpResponse:
        await body(None)
        return HttpResponse("rendered")

    view = _view(at, render)

    async def get(body: Any) -> None:
        _with_a_thread()
        number = _pages.get(at.name, 0)
        assert (await view(RequestFactory().get(f"/{number}"), body)).content == b"rendered"
        _pages[at.name] = number + 1

    return get


AWAY = redis.ConnectionError, ConnectionInterrupted
"""What a visitor gets while the server is away; he comes again."""
FIRST = "the first"
EARLY = {"timeout": 60, "refresh_before": 59.999}
"""A value that is due a millisecond after it was stored. A stale one: the other way round."""
STALE = {"timeout": 0.001, "stale": 60}


def refreshed(at: Place, **options: Any) -> Callable[[Any], Any]:
    """Ask for a value that is due until it is another one, as visitors do who get the old value at once."""
    cache = _cache(at)

    def get(body: Any) -> None:
        mine = Round(at.timeout, body)
        cache.add(at.name, FIRST, 60)
        before = cache.get(at.name)
        while not mine.is_over():
            with suppress(*AWAY):
                if cache.get(at.name) != before:
                    break
                if not mine.begun:
                    cache.get_or_set(at.name, mine.body, expire=at.expire, **options)
            time.sleep(mine.pause)
        mine.end()

    return get


def arefreshed(at: Place, **options: Any) -> Callable[[Any], Any]:
    cache = _cache(at)

    async def get(body: Any) -> None:
        _with_a_thread()
        mine = Round(at.timeout, body)
        await cache.aadd(at.name, FIRST, 60)
        before = await cache.aget(at.name)
        while not mine.is_over():
            with suppress(*AWAY):
                if await cache.aget(at.name) != before:
                    break
                if not mine.begun:
                    await cache.aget_or_set(at.name, mine.abody, expire=at.expire, **options)
            await asyncio.sleep(mine.pause)
        mine.end()

    return get


_rounds: dict[str, Round] = {}


@refreshable
def compute_elsewhere(name: str, number: int) -> str:
    """What a worker calls: the message says whose round it is."""
    return _rounds[f"{name} {number}"].body()


def refreshed_by_celery(at: Place, **options: Any) -> Callable[[Any], Any]:
    """Do as `refreshed`, and as the worker does that gets the message, if there is one."""
    app = Celery("matrix", set_as_current=False, broker="memory://")
    app.close()  # as in tasks.py
    app.conf.task_default_queue = f"{at.name}-{at.number}"
    compute = partial(compute_elsewhere, at.name, at.number)

    def get(body: Any) -> None:
        cache = caches[_alias(at)]
        mine = _rounds[f"{at.name} {at.number}"] = Round(at.timeout, body)
        cache.add(at.name, FIRST, 60)
        before = cache.get(at.name)
        with _current(app):
            while not mine.is_over():
                single_flight._paused.clear()  # a second later a process may send another message
                with suppress(*AWAY):
                    if cache.get(at.name) != before:
                        break
                    cache.get_or_set(at.name, compute, expire=at.expire, refresh="celery", **options)
                for message in take(app):
                    deliver(app, message)
                time.sleep(mine.pause)
        mine.end()

    return get


@contextmanager
def _current(app: Celery) -> Iterator[None]:
    """Let Celery's shared tasks be those of this app in this thread."""
    before = _state._tls.current_app
    app.set_current()
    try:
        yield
    finally:
        _state._set_current_app(before)
