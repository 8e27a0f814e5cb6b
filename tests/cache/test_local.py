"""The backends without Redis: the whole interface, and locks between threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from datetime import timedelta

import pytest
from django.core import checks
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from django_redislock.cache import ComputeOnceMixin, DjangoRedisCache, DummyCache, LocMemCache, cached, get_cache
from django_redislock.connections import connection_names
from django_redislock.core.options import LIFE
from django_redislock.exceptions import AcquireTimeout, AlreadyAcquired, LockLost, NotAcquired
from django_redislock.testing import assert_locked, unlocked
from tests.support import in_threads, wait_until_renewed
from tests.support.cache_programs import cache_at


@pytest.fixture(params=["LocMemCache", "DummyCache"])
def cache(request, settings):
    settings.CACHES = {
        "default": {
            "BACKEND": f"django_redislock.cache.{request.param}",
            "LOCATION": "tests",  # one for all, because each has a watchdog
            "OPTIONS": {"LOCK": {"EXPIRE": 5}},
        }
    }
    cache = caches["default"]
    yield cache
    cache.clear()
    cache.reset_all()


@pytest.fixture
def keeps(cache):
    """Whether the cache keeps what is stored."""
    return isinstance(cache, LocMemCache)


def test_every_public_method_of_the_redis_backend_is_there():
    public = {name for name, _ in inspect.getmembers(DjangoRedisCache, callable) if not name.startswith("_")}
    for backend in (LocMemCache, DummyCache):
        assert public <= set(dir(backend))
        assert issubclass(backend, ComputeOnceMixin)


def test_get_or_set_takes_every_option(cache, keeps):
    options = {"stale": 60, "refresh_before": 1, "wait": 1, "on_wait_timeout": "raise", "expire": 3, "jitter": 0.1}
    options |= {"auto_renewal": True, "max_hold": 9, "on_error": "stale", "refresh": "thread", "lock": True}
    calls = []
    for _ in range(2):
        assert cache.get_or_set("k", lambda: calls.append(1) or [1], 300, **options) == [1]
    assert len(calls) == (1 if keeps else 2)
    assert cache.locked_get_or_set("other", lambda: 5, expire=3) == 5
    with pytest.raises(TypeError, match="unexpected keyword argument 'tale'"):
        cache.get_or_set("k", lambda: 1, 300, tale=60)
    with pytest.raises(ValueError, match="refresh must be"):
        cache.get_or_set("k", lambda: 1, 300, refresh="later")
    with pytest.raises(ValueError, match="refresh_before must be less than the timeout of 10 s"):
        cache.get_or_set("k", lambda: 1, 10, refresh_before=20)
    cache.clear()
    assert cache.get("k") is None


def test_get_or_set_of_many_and_of_tasks(cache, keeps):
    async def load():
        return 7

    async def load_many(keys):
        return {key: key * 2 for key in [*keys, "unasked"]}

    assert cache.get_or_set_many(["a", "b"], lambda keys: dict.fromkeys([*keys, "more"], 1), 60) == {"a": 1, "b": 1}
    assert asyncio.run(cache.aget_or_set("k", load, 60, stale=60)) == 7
    assert asyncio.run(cache.aget_or_set_many(["a", "c"], load_many, 60)) == {"a": 1 if keeps else "aa", "c": "cc"}
    assert (cache.get("more"), cache.get("unasked")) == (None, None), "nobody asked for them"


def test_what_should_not_be_cached_is_not(cache, redis_url):
    options = {"should_cache": lambda value: value is not None}
    assert cache.get_or_set("k", lambda: None, 60, **options) is None
    assert asyncio.run(cache.aget_or_set("k", lambda: None, 60, **options)) is None
    assert cache.get_or_set_many(["k"], lambda keys: {"k": None}, 60, **options) == {"k": None}
    redis = cache_at(redis_url)
    with unlocked():
        redis.get_or_set("k", lambda: None, 60, **options)
    redis.get_or_set("k", lambda: None, 60, lock=False, **options)
    assert (cache.get("k", "nothing"), redis.get("k", "nothing")) == ("nothing", "nothing")


def test_cached_functions_take_their_options(cache, keeps):
    calls = []

    @cached(60, key="user:{user_id}", stale=60, refresh="thread", should_cache=lambda value: value > 0)
    def load(user_id):
        calls.append(user_id)
        return user_id

    assert [load(1), load(1), load(0), load(0)] == [1, 1, 0, 0]
    assert calls == ([1, 0, 0] if keeps else [1, 1, 0, 0])
    load.invalidate(1)
    assert load(1) == 1
    assert len(calls) == (4 if keeps else 5)


# The methods of django-redis that LocMemCache has, too: each test runs with both


@pytest.fixture(params=["LocMemCache", "RedisCache"])
def either(request, redis_url, settings):
    own = {"LOCATION": "either"} if request.param == "LocMemCache" else {"LOCATION": redis_url}
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{request.param}", "KEY_PREFIX": "a[b]*"} | own}
    yield caches["default"]
    caches["default"].clear()


def test_ttl_and_expire_are_those_of_django_redis(either):
    either.set("brief", 1, 50)
    either.set("lasting", 1, None)
    either.set("other", 1, 50, version=2)
    assert (either.ttl("brief"), either.ttl("lasting"), either.ttl("none")) == (50, None, 0)
    assert (either.ttl("other"), either.ttl("other", version=2)) == (0, 50)
    assert either.expire("brief", 500) is True
    assert either.expire("lasting", timedelta(minutes=1)) is True
    assert (either.ttl("brief"), either.ttl("lasting")) == (500, 60)
    assert either.expire("none", 5) is False
    assert either.expire("brief", 0) is True
    assert (either.get("brief"), either.ttl("brief")) == (None, 0)


def test_delete_pattern_is_that_of_django_redis(either):
    names = ["user:1", "user:2", "user:x", "users", "User:1", "page"]
    either.set_many(dict.fromkeys(names, 1), 50)
    either.set("user:1", 1, 50, version=2)
    assert either.delete_pattern("user:[^x]") == 2
    assert sorted(either.get_many(names)) == ["User:1", "page", "user:x", "users"]
    assert either.delete_pattern("user?", itersize=10) == 1
    assert either.delete_pattern("*:1", version=2) == 1
    assert either.delete_pattern("*", prefix="another") == 0
    assert either.delete_pattern("*") == 3


# Locks


def test_one_thread_at_a_time_holds_a_lock_of_the_cache(cache):
    inside, most, done = [], [], []

    def work(number):
        for _ in range(20):
            with caches["default"].lock("maintenance", expire=30):
                inside.append(1)
                time.sleep(0.001)  # for another one to come in, if it may
                most.append(len(inside))
                inside.pop()
        done.append(1)

    in_threads(4, work)
    assert (len(done), max(most)) == (4, 1)
    assert not cache.lock("maintenance").locked()


def test_who_waits_gets_the_lock_when_it_is_released(cache):
    held = cache.lock("a")
    held.acquire()
    got = []
    thread = threading.Thread(target=lambda: got.append(caches["default"].lock("a").acquire()))
    thread.start()
    assert cache.lock("b").acquire(blocking=False)
    thread.join(0.1)
    assert not got
    held.release()
    thread.join(60)
    assert got == [True]
    shared = cache.lock("c", thread_local=False)
    assert shared.acquire()
    thread = threading.Thread(target=shared.release)
    thread.start()
    thread.join(60)
    assert not cache.lock("c").locked(), "any thread may release it"


def test_a_holder_is_asked_for_its_lock_and_gives_it_back(cache):
    held = cache.lock("a")
    held.acquire()
    assert cache.lock("a").recall(by="anna")
    assert cache.lock("a").recall(by="otto")
    assert not cache.lock("a").acquire(blocking=False)
    with pytest.raises(LockLost, match="anna asked for it back"):
        held.extend(5)
    assert held.locked()
    with pytest.raises(LockLost):
        held.release()
    with cache.lock("a") as held:
        assert held.recall()


def test_the_former_holder_hears_who_force_released_its_lock(cache):
    held = cache.lock("a")
    held.acquire()
    assert cache.lock("a").reset(by="anna", reason="a deploy")
    with pytest.raises(LockLost) as lost:
        held.release()
    assert lost.value.record.code == "force_released"
    assert "anna" in lost.value.record.reason
    assert lost.value.record.reason.endswith("a deploy")


def test_the_former_holder_hears_that_its_lock_was_released_by_its_id(cache):
    held = cache.lock("a")
    held.acquire()
    cache.lock("a", id=held.id).release()
    with pytest.raises(LockLost) as lost:
        held.release()
    assert lost.value.record.code == "released"


def test_a_lock_that_is_taken_says_so_at_once_or_after_the_wait(cache):
    held = cache.lock("a", expire=60)
    with held:
        assert held.fence > 0
        assert held.owned()
        assert held.owner().id == held.id
        assert 50 < held.ttl() <= 60
        other = cache.lock("a", blocking_timeout=0.05)
        assert other.locked()
        assert not other.owned()
        with pytest.raises(AcquireTimeout), other:
            raise AssertionError("two holders")
        with pytest.raises(AcquireTimeout), cache.lock("a", blocking=False):
            raise AssertionError("two holders")
        with pytest.raises(NotAcquired):
            other.release()
        held.extend(90)
        assert held.ttl() > 60
    with pytest.raises(AlreadyAcquired), cache.lock("c"), cache.lock("c"):
        raise AssertionError("it would wait for itself for ever")


def test_a_lock_that_is_not_renewed_ends_and_the_next_one_has_a_larger_fence(cache):
    first = cache.lock("a", expire=0.05)
    first.acquire()
    fence = first.fence
    with cache.lock("a") as second:
        assert second.fence > fence
    with pytest.raises(LockLost):
        first.release()


def test_a_lock_that_is_renewed_lasts(cache):
    with cache.lock("a", expire=30, auto_renewal=True) as held:
        wait_until_renewed(held)
        held.raise_if_lost()
        assert held.owned()


def test_reset_all_and_reset_take_the_locks(cache):
    with pytest.raises(LockLost), cache.lock("a") as held:
        assert cache.lock("a").reset(held.fence + 1) is False
        assert cache.lock("a").reset(held.fence) is True
        assert cache.lock("a").reset() is False
    with pytest.raises(LockLost), cache.lock("a"):
        assert cache.reset_all() == 1


def test_what_testing_offers_works_with_them(cache):
    with assert_locked(":1:a"), cache.lock("a"):
        pass
    with unlocked(), cache.lock("a"), cache.lock("a"):
        assert cache.get_or_set("k", lambda: 5, stale=5) == 5


def test_they_are_no_connections_of_the_pages_and_the_command(cache, settings):
    settings.CACHES = settings.CACHES | {"other": settings.CACHES["default"]}
    assert connection_names() == ["default"]
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    assert connection_names() == ["url"]


@pytest.mark.parametrize(("named", "id"), [({}, "redislock.W005"), ({"CACHE_ALIAS": "default"}, "redislock.E004")])
def test_the_check_is_an_error_only_where_the_alias_is_named(cache, settings, named, id):
    settings.DJANGO_REDISLOCK = named
    assert [message.id for message in checks.run_checks(tags=["redislock"])] == [id]


# Types


def test_the_types_of_the_options_name_those_that_are_checked():
    from django_redislock.cache import options

    own = options.GetOrSetOptions.__optional_keys__ - set(LIFE)
    assert own == (options._validate.__kwdefaults__ or {}).keys()


def test_get_cache_returns_the_cache_and_refuses_one_of_another_package(cache, settings):
    assert get_cache() is caches["default"]
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    with pytest.raises(ImproperlyConfigured, match=r"'default' .*DummyCache.* has no methods of django-redislock"):
        get_cache()
