"""Every option of a lock arrives wherever a lock can be made, or is refused there by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from celery import Celery
from django.core.cache import cache, caches
from django.http import HttpResponse
from django.test import RequestFactory

from django_redislock import alock, alock_all, asemaphore, lock, lock_all, locked, locked_atomic, rlock, semaphore
from django_redislock.cache import cache_page, cached
from django_redislock.celery import SingleInstanceTask, single_instance
from django_redislock.core import AsyncLock, AsyncQuorumLock, Lock, QuorumLock, held_locks, options
from django_redislock.core.lease import Lease
from django_redislock.core.redis_py import AsyncRedisPyLock, RedisPyLock
from django_redislock.core.semaphore import AsyncSemaphore, Semaphore
from django_redislock.core.watchdog import watchdog
from django_redislock.exceptions import LockBackendError
from tests.support import RedisServer, async_client_at

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("locks_by_url", "transactional_db")]
Look = Callable[[], None]

GIVEN: dict[str, Any] = {
    "expire": 7.0,
    "auto_renewal": False,
    "max_hold": 77.0,
    "renewal_jitter": 0.7,
    "min_replicas": 1,
    "id": "someone",
    "label": "monthly",
    "on_lost": lambda lock: None,
    "kind": "invoice",
    "prefix": "shop",
    "reentrant": True,
}
"""A value of each option that is not its default."""


# Each way to hold: a function that calls `look` while it holds.


def block(make: Callable[..., Any], *before: Any) -> Callable[..., None]:
    def hold(look: Look, **given: Any) -> None:
        with make(*before, **given):
            look()

    return hold


def async_block(make: Callable[..., Any], *before: Any) -> Callable[..., None]:
    def hold(look: Look, **given: Any) -> None:
        async def body() -> None:
            async with make(*before, **given):
                look()

        asyncio.run(body())

    return hold


def decorated(look: Look, **given: Any) -> None:
    locked("a", **given)(look)()


def async_decorated(look: Look, **given: Any) -> None:
    async def body() -> None:
        look()

    asyncio.run(locked("a", **given)(body)())


def task(scope: str) -> Callable[..., None]:
    def hold(look: Look, **given: Any) -> None:
        def body() -> None:
            look()

        app = Celery(set_as_current=False, task_cls=SingleInstanceTask)
        declared = single_instance(key=[], scope=scope, lock_direct_calls=True, **given)
        app.task(declared(body), name=f"t-{scope}", shared=False)()

    return hold


def value(look: Look, **given: Any) -> None:
    cache.get_or_set("k", look, 60, **given)


def async_value(look: Look, **given: Any) -> None:
    asyncio.run(cache.aget_or_set("k", look, 60, **given))


def values(look: Look, **given: Any) -> None:
    cache.get_or_set_many(["k"], lambda missing: {"k": look()}, 60, **given)


def cached_value(look: Look, **given: Any) -> None:
    cached(60, key="k", **given)(look)()


def page(look: Look, **given: Any) -> None:
    def view(request: object) -> HttpResponse:
        look()
        return HttpResponse()

    cache_page(60, **given)(view)(RequestFactory().get("/"))


@pytest.fixture
def ways(redis_url: str, client: Any, two_more: list[Any]) -> dict[str, Callable[..., None]]:
    aclient = async_client_at(redis_url)
    return {
        "lock": block(lock, "a"),
        "rlock": block(rlock, "a"),
        "alock": async_block(alock, "a"),
        "semaphore": block(semaphore, "a", 3),
        "asemaphore": async_block(asemaphore, "a", 3),
        "lock_all": block(lock_all, ["a", "b"]),
        "alock_all": async_block(alock_all, ["a", "b"]),
        "locked": decorated,
        "locked, async": async_decorated,
        "locked_atomic": block(locked_atomic, "a"),
        "cache.lock": block(cache.lock, "a"),
        "cache.lock of DjangoRedisCache": block(caches["django"].lock, "a"),
        "Lock": block(Lock, client, "a"),
        "AsyncLock": async_block(AsyncLock, aclient, "a"),
        "Semaphore": block(Semaphore, client, "a", 3),
        "AsyncSemaphore": async_block(AsyncSemaphore, aclient, "a", 3),
        "RedisPyLock": block(RedisPyLock, client, "a"),
        "AsyncRedisPyLock": async_block(AsyncRedisPyLock, aclient, "a"),
        "QuorumLock": block(QuorumLock, [client, *two_more], "a"),
        "AsyncQuorumLock": async_block(AsyncQuorumLock, [client, *two_more], "a"),
        "task, run": task("run"),
        "get_or_set": value,
        "aget_or_set": async_value,
        "get_or_set_many": values,
        "cached": cached_value,
        "cache_page": page,
    }


@pytest.fixture(scope="module")
def two_more() -> Iterator[list[Any]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stack.enter_context(RedisServer()).client()) for _ in range(2)]


@pytest.fixture(autouse=True)
def _second_backend(settings: Any, redis_url: str) -> None:
    backend = {"BACKEND": "django_redislock.cache.DjangoRedisCache", "LOCATION": redis_url}
    settings.CACHES = {**settings.CACHES, "django": backend}


LIFE = {"expire", "auto_renewal", "max_hold", "renewal_jitter"}
VALUES = {"get_or_set", "aget_or_set", "get_or_set_many", "cached", "cache_page"}
WITHOUT = {
    "prefix": {
        *("lock", "alock", "rlock", "semaphore", "asemaphore", "lock_all", "alock_all", "locked", "locked, async"),
        *("locked_atomic", "cache.lock", "cache.lock of DjangoRedisCache"),
    },
    "reentrant": {
        *("rlock", "semaphore", "asemaphore", "Semaphore", "AsyncSemaphore", "QuorumLock", "AsyncQuorumLock"),
        *("cache.lock", "cache.lock of DjangoRedisCache"),
    },
    "id": {"QuorumLock", "AsyncQuorumLock"},
    "min_replicas": {"QuorumLock", "AsyncQuorumLock"},
}
"""The options that a way to hold does not have, and refuses."""


def arrived(option: str, client: Any, leases: list[Lease]) -> object:
    """Return the value of the option, as what is held now has it."""
    assert leases
    if option == "auto_renewal":
        return any(lease.renewing for lease in leases)
    if option in LIFE:
        return getattr(leases[0].renewal, option)
    if option == "on_lost":
        held_by = leases[0].lock_ref()
        return getattr(held_by, "lock_ref", lambda: held_by)().on_lost  # a part of a quorum knows the whole
    if option == "reentrant":
        return leases[0].reentrant
    prefix = GIVEN["prefix"] if option == "prefix" else "redislock"
    (info, *_) = held_locks(client, prefix)
    return prefix if option == "prefix" else getattr(info, option)


def test_each_option_has_a_value_above():
    assert GIVEN.keys() == {field.name for field in fields(options.Options)}
    assert GIVEN.keys() == get_type_hints(options.CoreOptions).keys()
    assert all(getattr(options.DEFAULTS, name) != value for name, value in GIVEN.items())


@pytest.mark.parametrize("option", GIVEN)
def test_an_option_arrives_in_each_way_to_hold_or_is_refused_by_name(option, ways, client):
    given = {option: GIVEN[option]}
    for way, hold in ways.items():
        if way in WITHOUT.get(option, ()) or (option not in LIFE and way in {*VALUES, "task, run"}):
            with pytest.raises(TypeError, match=rf"\b{option}\b"):
                hold(lambda: pytest.fail("it holds"), **given)
        else:
            hold_and_look(option, way, hold, client, **given)
        client.flushdb()


@pytest.mark.parametrize("option", [field.name for field in fields(options.LockDefaults)])
def test_an_option_of_the_settings_arrives_in_each_way_that_follows_them(option, ways, client, settings):
    given = {option.upper(): GIVEN[option]}
    for way, hold in ways.items():
        section = "CACHE" if way in VALUES else "CELERY" if way == "task, run" else ""
        if way[0].isupper() or (option == "min_replicas" and section):  # it is given its client
            continue
        changed = {section: given} if section else given
        settings.DJANGO_REDISLOCK = {"URL": settings.DJANGO_REDISLOCK["URL"], **changed}
        hold_and_look(option, way, hold, client)
        client.flushdb()


def hold_and_look(option: str, way: str, hold: Callable[..., None], client: Any, **given: Any) -> None:
    seen: list[object] = []

    def look() -> None:
        leases = [ref() for each in list(watchdog.of_servers) for ref in list(each._leases.values())]
        seen.append(arrived(option, client, [lease for lease in leases if lease is not None]))

    if option == "min_replicas":  # the server of this test has no replica
        with pytest.raises(LockBackendError, match="0 of 1 replicas"):
            hold(look, **given)
    else:
        hold(look, **given)
        assert seen == [GIVEN[option]], way
