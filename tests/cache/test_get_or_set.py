"""get_or_set: what it returns, what it stores and what it sends, on both backends."""

from __future__ import annotations

import asyncio
import copy
import threading
from datetime import timedelta

import pytest
import redis
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from django.utils.asyncio import async_unsafe

from django_redislock.cache import DjangoRedisCache, cached
from django_redislock.cache.lease import single_flight
from django_redislock.core import held_locks
from tests.support import counting, monitoring
from tests.support.cache_programs import base_at, cache_at, commands, held, never


def test_a_hit_is_one_get_and_nothing_else_and_a_miss_takes_three_round_trips(cache, client):
    assert cache.get_or_set("k", lambda: {"a": 1}, 60) == {"a": 1}
    threads = threading.active_count()
    with monitoring(client) as sent:
        assert cache.get_or_set("k", never) == {"a": 1}
    assert sent == ["GET :1:k"]
    assert threading.active_count() <= threads  # one of an earlier test may end now
    with monitoring(client) as sent:
        cache.get_or_set("l", lambda: "v")
    assert commands(sent) == ["GET", "EVALSHA", "EVALSHA"]


def test_what_the_server_does_for_a_miss(cache, client):
    cache.get_or_set("k", lambda: "warm")
    cache.delete("k")
    with counting(client) as ran:
        cache.get_or_set("k", lambda: "v")
    assert ran["get"] == 2, "the value by the caller, and the lease when the value is stored"
    assert ran["set"] == 5, "the fence, the lease, its witness and era, and the value"
    assert ran["mget"] == ran["strlen"] == ran["zrange"] == 0, "what only other cases need"
    now_and_then = ("zrangebyscore", "zrem", "pexpire")  # the index of held locks is swept, or new
    assert sum(number for name, number in ran.items() if name not in now_and_then) == 14


VALUES = [None, True, False, 0, 7, -(10**30), 1.5, "", "ü", b"\0\xff", [], {"a": [1, (2,)]}]


def test_every_value_is_computed_once_and_stored_as_the_base_class_stores_it(cache, backend, redis_url, client):
    for number, value in enumerate(VALUES):
        key, calls = f"k{number}", []
        for _ in range(2):
            found = cache.get_or_set(key, lambda value=value, calls=calls: calls.append(1) or value, 60)
            assert found == value
            assert type(found) is type(value)
            assert found is not value or not isinstance(value, list | dict), "a copy, as a reader gets it"
        assert len(calls) == 1
        base_at(redis_url, backend).set("base", value, 60)
        assert client.get(f":1:{key}") == client.get(":1:base")
        assert 50_000 < client.pttl(f":1:{key}") <= 60_000


def test_timeouts_are_those_of_the_base_class(cache, backend, redis_url, client):
    cache.get_or_set("default", lambda: 1)
    assert 290_000 < client.pttl(":1:default") <= 300_000
    cache.get_or_set("forever", lambda: 1, None)
    cache_at(redis_url, backend, TIMEOUT=None).get_or_set("without", lambda: 1)
    assert client.pttl(":1:forever") == client.pttl(":1:without") == -1
    cache.get_or_set("minute", lambda: 1, timeout=60, version=3)
    assert 50_000 < client.pttl(":3:minute") <= 60_000


@pytest.mark.parametrize(
    ("default", "timeout", "options"),
    [("v", 60, {}), (None, 60, {}), (lambda: "v", 0, {}), (lambda: "v", -1, {}), (lambda: "v", 60, {"lock": False})],
)
def test_what_needs_no_lock_is_left_to_the_base_class(cache, backend, redis_url, client, default, timeout, options):
    base = base_at(redis_url, backend)
    expected = base.get_or_set("k", default, timeout)
    stored = client.get(":1:k"), client.exists(":1:k")
    client.flushdb()
    with monitoring(client) as sent:
        assert cache.get_or_set("k", default, timeout, **options) == expected
    assert "EVALSHA" not in commands(sent)
    assert (client.get(":1:k"), client.exists(":1:k")) == stored


def test_disabled_it_is_the_base_class(cache, client):
    with override_settings(DJANGO_REDISLOCK={"ENABLED": False}), monitoring(client) as sent:
        assert cache.get_or_set("k", lambda: "v") == "v"
        assert cache.delete("k")
        with cache.lock("l"):
            pass
    assert "EVALSHA" not in commands(sent)
    assert "EVAL" not in commands(sent)


class Unprintable(Exception):
    def __str__(self):
        return None  # as of a lazy translation that is wrong


@pytest.mark.parametrize(
    "error", [ValueError("mine"), StopIteration(), KeyboardInterrupt(), SystemExit(3), TimeoutError(), Unprintable()]
)
def test_the_callers_own_exception_comes_out_and_the_lease_is_free_at_once(cache, client, error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        cache.get_or_set("k", fail)
    assert caught.value is error
    assert not held(client)
    with monitoring(client) as sent:
        assert cache.get_or_set("k", lambda: "v") == "v"
    assert "SUBSCRIBE" not in commands(sent), "nothing to wait for"


def test_a_value_that_cannot_be_stored_raises_as_in_the_base_class(cache, backend, redis_url, client):
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever the serializer raises
        base_at(redis_url, backend).get_or_set("k", lambda: lambda: 1)
    with pytest.raises(expected.type):
        cache.get_or_set("k", lambda: lambda: 1)
    assert not held(client)


@pytest.mark.one_server("no list shows the leases of a server in cluster mode")
def test_while_it_is_computed_the_lease_is_a_lock_like_any_other(redis_url, backend, client):
    cache = cache_at(redis_url, backend, KEY_PREFIX="site", OPTIONS={"LOCK": {"EXPIRE": 7, "AUTO_RENEWAL": False}})

    def compute():
        (info,) = held_locks(client)
        assert (info.name, info.kind, info.expire, info.auto_renewal) == ("cache:site:2:k", "cache", 7, False)
        assert 6 < info.ttl <= 7
        if backend == "RedisCache":
            assert cache.keys("*", version=2) == []
        return 1

    cache.get_or_set("k", compute, version=2)
    cache.get_or_set("k2", lambda: len(list(held_locks(client))), expire=timedelta(seconds=9), auto_renewal=True)
    assert not held(client)


def test_no_key_is_left_but_the_value_and_what_its_bucket_has_once(cache, client):
    for number in range(20):
        cache.get_or_set(f"k{number}", lambda: 1, 60)
    cache.get_or_set_many([f"km{number}" for number in range(20)], lambda missing: dict.fromkeys(missing, 1), 60)
    left = {key for key in client.keys("*") if not key.startswith(b":1:k")}
    assert all(key.endswith((b":fence", b":era")) for key in left)
    assert all(client.pttl(key) > 0 for key in left)
    assert not single_flight._flights


def test_an_invalidation_is_no_warning(cache, caplog):
    with caplog.at_level("WARNING"):
        cache.get_or_set("k", lambda: cache.delete("k"), 60)
        cache.get_or_set("k", lambda: cache.set("k", 1), 60)
    assert not caplog.records


def test_odd_keys(cache):
    for key in ("k" * 240, "ü", "a{b}c", "with:colons"):
        assert cache.get_or_set(key, lambda: "v") == "v"
        assert cache.get_or_set(key, never) == "v"


@pytest.mark.filterwarnings("ignore::django.core.cache.CacheKeyWarning")
def test_keys_longer_than_a_locks_name(cache, client):
    long, longer = "k" * 3000, "k" * 3000 + "l"

    def compute():
        assert cache.get_or_set(longer, lambda: "longer") == "longer"
        assert len(held(client)) == 1
        return "long"

    assert cache.get_or_set(long, compute) == "long"
    assert cache.get(longer) == "longer"


BAD_VALUES = [{"wait": -1}, {"wait": float("nan")}, {"expire": 0}, {"expire": 0.0001}, {"max_hold": 0}]
BAD_VALUES += [{"on_wait_timeout": "hope"}, {"stale": -1}, {"refresh": "later"}, {"jitter": 1.5}]
BAD_TYPES = [{"wait": "5"}, {"wait": True}, {"expire": "10"}, {"max_hold": []}, {"auto_renewal": 1}]
BAD_TYPES += [{"refresh_before": "5"}, {"should_cache": True}, {"jitter": "1"}, {"lock": "yes"}, {"blocking": True}]


@pytest.mark.parametrize(("error", "cases"), [(ValueError, BAD_VALUES), (TypeError, BAD_TYPES)])
def test_bad_arguments_are_refused_at_once_hit_or_miss(redis_url, error, cases):
    cache = cache_at(redis_url)
    for _ in range(2):
        for options in cases:
            with pytest.raises(error, match=next(iter(options))):
                cache.get_or_set("k", never, 60, **options)
        cache.set("k", 1)


def test_wrong_options_are_refused_at_the_first_use_of_the_cache(redis_url, backend):
    """And not before: Django's checks make every cache, and ours are to report what is wrong, as a message."""
    bad_values = [{"EXPIRE": "10"}, {"EXPIRE": 0}, {"ON_WAIT_TIMEOUT": "hope"}, {"WAIT": -1}]
    for options in ({"EXPIRY": 1}, {"expire": 1}, 5, None, *bad_values):
        cache = cache_at(redis_url, backend, OPTIONS={"LOCK": options})
        with pytest.raises(ImproperlyConfigured, match=r"\['LOCK'\]"):
            cache.get_or_set("k", never)


def test_options_are_copied_out_and_never_taken_out_of_the_settings(redis_url, backend):
    params = {"LOCATION": redis_url, "OPTIONS": {"LOCK": {"EXPIRE": 3}, "socket_timeout": 4}}
    before = copy.deepcopy(params)
    for _ in range(2):
        cache = cache_at(redis_url, backend, **params)
        assert cache.get_or_set("k", lambda: 1) == 1
    assert params == before


def test_a_client_without_locks_makes_it_the_base_class(redis_url, client, caplog):
    class Odd(DjangoRedisCache):
        def _client_for(self, redis_key, write=True):
            return object()

    cache = Odd(redis_url, {})
    with monitoring(client) as sent:
        assert cache.get_or_set("k", lambda: "v") == "v"
        assert cache.delete("k")
    assert "EVALSHA" not in commands(sent)
    assert "without locks" in caplog.text


def test_a_value_that_is_no_string_fails_as_in_the_base_class(cache, backend, redis_url, client):
    client.rpush(":1:k", "x")
    for it in (cache, base_at(redis_url, backend)):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            it.get_or_set("k", lambda: 1)


WITHOUT_DJANGO_REDIS = """
import sys
import django_redislock.cache
sys.modules.update({"django_redis": None, "django_redis.cache": None})
del sys.modules["django_redislock.cache.backends.django_redis_backend"]  # which CACHES names
vars(django_redislock.cache).pop("RedisCache", None)
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
cache = import_string("django_redislock.cache.DjangoRedisCache")(args[0], {})
say(value=cache.get_or_set("k", lambda: 5))
try:
    import_string("django_redislock.cache.RedisCache")
except ImproperlyConfigured as error:
    say(error=str(error))
"""


@pytest.mark.processes
def test_without_django_redis_djangos_own_backend_works_and_the_other_says_what_is_missing(redis_url, run_python):
    process = run_python(WITHOUT_DJANGO_REDIS, redis_url, new=True)
    process.wait_for(value=5)
    assert "pip install django-redislock[cache]" in process.wait_for()["error"]


def test_a_coroutine_function_is_refused_by_get_or_set_which_names_the_other_method(cache):
    async def compute():
        raise AssertionError("is not called")

    with pytest.raises(TypeError, match=r"use aget_or_set\(\)"):
        cache.get_or_set("k", compute, 60)
    cache.set("k", "v")
    assert cache.get_or_set("k", compute, 60) == "v", "a hit costs no check"


def sometimes():
    """No coroutine function, but it may return a coroutine."""

    async def compute():
        raise AssertionError("is not awaited")

    return compute()


@pytest.mark.parametrize("lock", [True, False])
def test_a_default_that_returns_a_coroutine_is_refused_in_words(cache, client, lock):
    """The error was "cannot pickle 'coroutine' object"."""
    for number in range(2):
        with pytest.raises(TypeError, match=r"use aget_or_set\(\)"):
            cache.get_or_set(f"k{number}", sometimes, 60, lock=lock)
    with pytest.raises(TypeError, match=r"aget_or_set|dict"):
        cache.get_or_set_many(["a"], lambda keys: sometimes(), 60)
    assert not held(client)
    assert client.get(":1:k0") is None


@pytest.mark.parametrize("backend", ["DjangoRedisCache"])
def test_djangos_own_backend_takes_whole_seconds_as_its_base_class_does(cache, redis_url, backend):
    base = base_at(redis_url, backend)
    for each in (base, cache):
        assert each.get_or_set("k", lambda: 1, 0.9) == 1
        assert each.get("k") is None
        assert each.get_or_set("k", lambda: 1, 1.9) == 1
        assert 0 < each._cache.get_client("").pttl(":1:k") <= 1000
        each.delete("k")


@async_unsafe("the database is asked in the event loop")
def ask_database(value=None):
    return 60


class Lazy:
    """As a lazy QuerySet it asks the database when it is serialized."""

    def __reduce__(self):
        ask_database()
        return list, (["row"],)


async def get_lazy():
    return Lazy()


async def get_lazy_ones(keys):
    return {key: Lazy() for key in keys}


@pytest.mark.parametrize("how", ["sync", "async", "many", "cached", "timeout", "should_cache", "refresh"])
@pytest.mark.usefixtures("caches_in_settings")
def test_a_value_that_asks_the_database_when_it_is_stored_is_stored_in_the_thread_of_sync_to_async(how):
    cache = caches["default"]
    calls = {
        "sync": lambda: cache.aget_or_set("k", Lazy, 60),
        "async": lambda: cache.aget_or_set("k", get_lazy, 60),
        "many": lambda: cache.aget_or_set_many(["k", "l"], get_lazy_ones, 60),
        "cached": cached(60, key=lambda: "k")(get_lazy),
        "timeout": lambda: cache.aget_or_set("k", lambda: ["row"], ask_database),
        "should_cache": lambda: cache.aget_or_set("k", lambda: ["row"], 60, should_cache=ask_database),
        "refresh": lambda: cache.aget_or_set("k", get_lazy, 60, stale=30, refresh="thread"),
    }
    if how == "refresh":
        cache.set("k", "old", 25)

    async def main():
        value = await calls[how]()
        while how == "refresh" and await cache.aget("k") == "old":
            await asyncio.sleep(0.01)
        return value

    expected = {"many": {"k": ["row"], "l": ["row"]}, "refresh": "old"}
    assert asyncio.run(asyncio.wait_for(main(), 20)) == expected.get(how, ["row"])
    assert cache.get("k") == ["row"]
