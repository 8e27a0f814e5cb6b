"""A subclass that overrides `get`, `set` or `add`, or their asynchronous twins: our methods go through it."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.test import RequestFactory, override_settings
from django.utils.module_loading import import_string

from django_redislock.cache import DjangoRedisCache, RedisCache
from django_redislock.cache.backends.overridden import overridden_by
from tests.support import monitoring
from tests.support.cache_programs import cache_elsewhere, commands, held
from tests.support.pages import counted_page

BASES = {
    "RedisCache": "django_redis.cache.RedisCache",
    "ClusterCache": "django_redis.cache.RedisCache",
    "DjangoRedisCache": "django.core.cache.backends.redis.RedisCache",
}


class ErrorsAreMisses:
    """The pattern of awx: an error of Redis is a miss, or a value that is not stored."""

    def get(self, key, default=None, version=None):
        try:
            return super().get(key, default, version)
        except (redis.ConnectionError, redis.ResponseError):
            return default

    def add(self, key, value, timeout=DEFAULT_TIMEOUT, version=None):
        try:
            return super().add(key, value, timeout, version)
        except (redis.ConnectionError, redis.ResponseError):
            return None

    def set(self, key, value, timeout=DEFAULT_TIMEOUT, version=None):
        try:
            return super().set(key, value, timeout, version)
        except (redis.ConnectionError, redis.ResponseError):
            return None


class OwnError(Exception):
    pass


class OwnErrors:
    def get(self, key, default=None, version=None):
        try:
            return super().get(key, default, version)
        except redis.RedisError as error:
            raise OwnError from error


class Wrapping:
    """Stores each value in a dict, for half of the time, and refuses what is no such dict."""

    def get(self, key, default=None, version=None):
        found = super().get(key, None, version)
        return default if found is None else found["wrapped"]

    def add(self, key, value, timeout=DEFAULT_TIMEOUT, version=None):
        return super().add(key, {"wrapped": value}, timeout and timeout / 2, version)

    def set(self, key, value, timeout=DEFAULT_TIMEOUT, version=None):
        return super().set(key, {"wrapped": value}, timeout and timeout / 2, version)


class WrappingForTasks:
    """The same, in the asynchronous methods alone."""

    async def aget(self, key, default=None, version=None):
        found = await super().aget(key, None, version)
        return default if found is None else found["wrapped"]

    async def aadd(self, key, value, timeout=DEFAULT_TIMEOUT, version=None):
        return await super().aadd(key, {"wrapped": value}, timeout and timeout / 2, version)

    async def aset(self, key, value, timeout=DEFAULT_TIMEOUT, version=None):
        return await super().aset(key, {"wrapped": value}, timeout and timeout / 2, version)


def made_of(mixin, url, backend, ours=True):
    """Return a cache of the class that has the mixin left of our backend, or of its base class."""
    base = import_string(f"django_redislock.cache.{backend}" if ours else BASES[backend])
    cache = type("Own", (mixin, base), {"__module__": __name__})(url, {})
    if not ours and backend == "ClusterCache":
        cache._client_cls = import_string("django_redislock.cache.backends.cluster_backend.NodesClient")
    return cache


@pytest.fixture(params=["thread", "task"])
def getting(request):
    """``getting(cache, key, default, …)`` calls get_or_set or its asynchronous twin."""

    def get(cache, *args, **options):
        if request.param == "task":
            return asyncio.run(cache.aget_or_set(*args, **options))
        return cache.get_or_set(*args, **options)

    return get


def test_errors_are_misses_where_the_subclass_says_so(own_server, backend, getting):
    caches = [made_of(ErrorsAreMisses, own_server.url, backend, ours) for ours in (False, True)]
    for cache in caches:
        assert getting(cache, "warm", lambda: 1, 60) == 1
    own_server.kill()
    for cache in caches:
        assert getting(cache, "warm", lambda: 2, 60) == 2
        assert getting(cache, "k", lambda: "v", 60) == "v"
    assert getting(caches[1], "k", lambda: "v", 60, stale=60) == "v"


def test_a_value_that_cannot_be_stored_is_returned_where_the_subclass_says_so(own_server, backend, getting):
    caches = [made_of(ErrorsAreMisses, own_server.url, backend, ours) for ours in (False, True)]
    for cache in caches:
        getting(cache, "warm", lambda: 1, 60)

        def compute():
            own_server.kill()
            return "v"

        assert getting(cache, "k", compute, 60) == "v"
        own_server.start()


def test_with_a_server_that_refuses_writes_errors_are_misses(own_server, backend, getting):
    cache = made_of(ErrorsAreMisses, own_server.url, backend)
    getting(cache, "warm", lambda: 1, 60)
    with own_server.client() as client:
        client.config_set("min-replicas-to-write", 1)
    assert getting(cache, "warm", lambda: 2, 60) == 1
    assert getting(cache, "k", lambda: "v", 60) == "v"


def test_many_values_and_pages_go_on_without_redis_too(own_server, backend):
    cache = made_of(ErrorsAreMisses, own_server.url, backend)
    cache.get_or_set("warm", lambda: 1)
    settings = {"BACKEND": f"{__name__}.{backend}OfErrors", "LOCATION": own_server.url}
    globals()[f"{backend}OfErrors"] = type(cache)
    with override_settings(CACHES={"default": settings}):
        view, calls = counted_page()
        view(RequestFactory().get("/warm"))
        own_server.kill()
        assert cache.get_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1), 60) == {"a": 1, "b": 1}
        many = cache.aget_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1), 60)
        assert asyncio.run(many) == {"a": 1, "b": 1}
        assert view(RequestFactory().get("/")).content == b"page"
        assert len(calls) == 2


def test_the_subclass_s_own_error_comes_out(own_server, backend, getting):
    caches = [made_of(OwnErrors, own_server.url, backend, ours) for ours in (False, True)]
    for cache in caches:
        getting(cache, "warm", lambda: 1, 60)
    own_server.kill()
    for cache in caches:
        with pytest.raises(OwnError):
            getting(cache, "k", lambda: "v", 60)
    with pytest.raises(OwnError):
        getting(caches[1], "k", lambda: "v", 60, stale=60)


KINDS = [(Wrapping, "thread"), (Wrapping, "task"), (WrappingForTasks, "task")]


@pytest.mark.parametrize(("kind", "getting"), KINDS, indirect=["getting"])
def test_values_are_stored_and_read_as_the_subclass_does(kind, getting, redis_url, backend, client):
    base, ours = (made_of(kind, redis_url, backend, each) for each in (False, True))
    assert getting(base, "base", lambda: "v", 60) == getting(ours, "ours", lambda: "v", 60) == "v"
    assert client.get(":1:base") == client.get(":1:ours")
    assert 25_000 < client.pttl(":1:base") <= 30_000
    assert 25_000 < client.pttl(":1:ours") <= 30_000
    for cache in (base, ours):
        for key in ("base", "ours"):
            assert getting(cache, key, lambda: "never", 60) == "v"
    assert not held(client)


@pytest.mark.parametrize(("kind", "getting"), KINDS, indirect=["getting"])
def test_a_value_that_is_not_stored_and_one_of_another_process_are_read_so_too(
    kind, getting, redis_url, backend, client
):
    ours = made_of(kind, redis_url, backend)
    assert getting(ours, "k", lambda: "v", 60, should_cache=lambda value: False) == "v"
    assert client.get(":1:k") is None
    other = made_of(kind, cache_elsewhere(redis_url, backend)._constructor_args[0], backend)
    begun, end = threading.Event(), threading.Event()

    def compute():
        begun.set()
        assert end.wait(30)
        return "v"

    found = []
    threads = [threading.Thread(target=lambda: found.append(getting(other, "k", compute, 60)))]
    threads[0].start()
    assert begun.wait(30)
    threads += [threading.Thread(target=lambda: found.append(getting(ours, "k", compute, 60))) for _ in range(3)]
    for thread in threads[1:]:
        thread.start()
    end.set()
    for thread in threads:
        thread.join(30)
    assert found == ["v"] * 4


@pytest.mark.parametrize(("kind", "getting"), KINDS, indirect=["getting"])
def test_a_stale_value_is_read_and_replaced_so_and_deleted_ones_are_not_stored(
    kind, getting, redis_url, backend, client
):
    ours = made_of(kind, redis_url, backend)
    assert getting(ours, "k", lambda: "old", 60, stale=600) == "old"
    client.pexpire(":1:k", 500_000)
    assert getting(ours, "k", lambda: "new", 60, stale=600) == "new"
    client.pexpire(":1:k", 500_000)
    with_error = {"stale": 600, "on_error": "stale"}
    assert getting(ours, "k", lambda: 1 / 0, 60, **with_error) == "new"
    client.delete(":1:l")

    def compute():
        thread = threading.Thread(target=made_of(kind, redis_url, backend).delete, args=("l",))
        thread.start()
        thread.join(30)
        return "too old"

    assert getting(ours, "l", compute, 60) == "too old"
    assert client.get(":1:l") is None


@pytest.mark.parametrize(("kind", "by_task"), [(Wrapping, False), (Wrapping, True), (WrappingForTasks, True)])
def test_many_values_are_stored_and_read_so(kind, by_task, redis_url, backend, client):
    ours = made_of(kind, redis_url, backend)

    def many(*args):
        return asyncio.run(ours.aget_or_set_many(*args)) if by_task else ours.get_or_set_many(*args)

    for _ in range(2):
        assert many(["a", "b"], lambda keys: {key: key * 2 for key in keys}, 60) == {"a": "aa", "b": "bb"}
    assert ours._loads(":1:a", client.get(":1:a")) == {"wrapped": "aa"}
    get = (lambda key: asyncio.run(ours.aget(key))) if by_task else ours.get
    assert get("b") == "bb"


def test_it_is_decided_once_a_class_and_a_plain_backend_sends_the_same_commands(redis_url, client, backend):
    class Plain(import_string(f"django_redislock.cache.{backend}")):
        def incr(self, key, delta=1, version=None):
            return super().incr(key, delta, version)

    assert Plain._overridden == RedisCache._overridden == DjangoRedisCache._overridden == frozenset()
    assert type(made_of(Wrapping, redis_url, backend))._overridden == {"get", "set", "add"}
    assert overridden_by(type("Both", (Wrapping, WrappingForTasks, RedisCache), {})) >= {"get", "aget"}
    plain, wrapping = Plain(redis_url, {}), made_of(Wrapping, redis_url, backend)
    for key, cache in (("p", plain), ("w", wrapping)):  # the scripts are known from here on
        cache.get_or_set(key, lambda: 1, 60)
    sent = []
    for cache in (plain, wrapping):
        for key in ("k", "k"):
            with monitoring(client) as seen:
                cache.get_or_set(f"{key}:{len(sent) // 2}", lambda: 1, 60)
            sent.append(commands(seen))
    assert sent[:2] == sent[2:], "a miss, and a hit"
