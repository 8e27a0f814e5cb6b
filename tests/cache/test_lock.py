"""cache.lock() in the words of django-redis and of python-redis-lock, locked_get_or_set() and reset_all()."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_redislock.core import Lock, held_locks
from tests.support import wait_until
from tests.support.cache_programs import cache_at, cache_is_computing, held


def test_it_is_a_lock_of_this_caches_prefix_and_version(redis_url, backend, client):
    cache = cache_at(redis_url, backend, KEY_PREFIX="site", VERSION=3)
    with cache.lock("a"), cache.lock("a", version=4), cache_at(redis_url, backend).lock("a"), Lock(client, "a"):
        assert {info.name for info in held_locks(client)} == {"site:3:a", "site:4:a", ":1:a", "a"}
        assert not cache.lock("a").acquire(blocking=False)
    assert not held(client)


def test_a_life_given_in_either_word_is_its_life_and_not_renewed_and_without_one_the_holder_renews_it(cache, client):
    for life in ({"timeout": 5}, {"expire": 5}):
        with cache.lock("a", **life):
            (info,) = held_locks(client)
            assert (info.expire, info.auto_renewal) == (5, False)
        with cache.lock("a", **life, auto_renewal=True):
            assert [info.auto_renewal for info in held_locks(client)] == [True]
    with override_settings(DJANGO_REDISLOCK={"EXPIRE": 11}), cache.lock("a"):
        (info,) = held_locks(client)
        assert (info.expire, info.auto_renewal) == (11, True)


BAD_VALUES = [{"expire": 0}, {"timeout": -1}, {"blocking_timeout": -1}, {"id": ""}]
BAD_TYPES = [{"timeout": "5"}, {"expire": 5, "timeout": 5}, {"id": 5}, {"auto_renewal": "yes"}, {"strict": True}]


@pytest.mark.parametrize(("error", "cases"), [(ValueError, BAD_VALUES), (TypeError, BAD_TYPES)])
def test_bad_arguments(redis_url, error, cases):
    for options in cases:
        with pytest.raises(error):
            cache_at(redis_url).lock("a", **options)


def test_another_client_may_be_given(cache, server):
    with redis.Redis.from_url(server.url_of_db(9)) as elsewhere, cache.lock("a", client=elsewhere):
        assert [info.name for info in held_locks(elsewhere)] == [":1:a"]
        assert not cache.lock("a").locked()


# locked_get_or_set


def test_locked_get_or_set_creates_once(cache, client):
    assert cache.locked_get_or_set("k", lambda: [1], version=2, expire=5, timeout=60) == [1]
    assert cache.locked_get_or_set("k", lambda: 1 / 0, version=2) == [1]
    assert 50_000 < client.pttl(":2:k") <= 60_000


@pytest.mark.parametrize("options", [{}, {"lock_key": "l"}, {"id": "mine"}])
def test_none_is_no_value_there_only(cache, client, options):
    with pytest.raises(ValueError, match="must return a value"):
        cache.locked_get_or_set("k", lambda: None, **options)
    assert not held(client)
    assert cache.get_or_set("k", lambda: None) is None
    assert cache.locked_get_or_set("k", lambda: 5, **options) == 5, "one that is stored counts as missing"
    assert cache.get("k") == 5


def test_calls_with_one_lock_key_exclude_each_other_and_who_waits_gets_the_value(cache, client):
    def create():
        (info,) = held_locks(client)
        assert (info.name, info.id) == (":1:one for both", "mine")
        waiting.append(pool.submit(cache.locked_get_or_set, "k", lambda: 1 / 0, lock_key="one for both"))
        wait_until(lambda: [info.waiting for info in held_locks(client)] == [1])
        return 5

    waiting: list = []
    with ThreadPoolExecutor(1) as pool:
        assert cache.locked_get_or_set("k", create, lock_key="one for both", id="mine") == 5
        assert waiting[0].result(20) == 5


# reset_all


def test_reset_all_touches_the_locks_of_this_cache_only(redis_url, backend, client):
    cache = cache_at(redis_url, backend, KEY_PREFIX="site")
    others = [
        Lock(client, "a"),
        Lock(client, "site"),
        Lock(client, "site:a"),
        Lock(client, "cache:site:1:a"),
        Lock(client, "site:1:a", prefix="elsewhere"),
        cache_at(redis_url, backend, KEY_PREFIX="site2").lock("a"),
        cache_at(redis_url, backend, KEY_PREFIX="site:b").lock("a"),
        cache_at(redis_url, backend).lock("a"),
    ]
    mine = [cache.lock("a"), cache.lock("line\nbreak"), cache.lock("b", version=12), cache.lock("c:d")]
    for lock in others + mine:
        lock.acquire()
    client.set("lock:door", "somebody else's")
    cache.set("k", "v")

    def compute():
        assert cache_is_computing(cache, "computed")
        assert cache.reset_all() == len(mine) + 1
        assert not cache_is_computing(cache, "computed")
        return 1

    assert cache.get_or_set("computed", compute) == 1
    assert [lock.locked() for lock in others] == [True] * len(others)
    assert [lock.locked() for lock in mine] == [False] * len(mine)
    assert cache.get("k") == "v"
    assert client.get("lock:door") == b"somebody else's"
    for lock in others:
        lock.release()


@pytest.mark.one_server("no index contains the leases of a server in cluster mode")
def test_reset_all_does_not_go_through_the_keys(cache, client):
    client.config_resetstat()
    cache.set_many({f"k{number}": 1 for number in range(5000)})
    lock = cache.lock("a")
    assert lock.acquire()
    assert cache.reset_all() == 1
    assert not lock.locked()
    assert not {"cmdstat_keys", "cmdstat_scan"} & client.info("commandstats").keys()


def test_the_bodys_own_exception_comes_out_however_many_locks_were_lost(cache):
    with pytest.raises(ZeroDivisionError), cache.lock("a"), cache.lock("b"), cache.lock("c"):
        assert cache.reset_all() == 3
        1 / 0  # noqa: B018


def shouting(key, prefix, version):
    return f"{key}!{prefix}!{version}"


def hashing(key, prefix, version):
    return f"{prefix}-{hash(key)}"


def test_reset_all_with_a_key_function_of_ones_own(redis_url, backend, client):
    cache = cache_at(redis_url, backend, KEY_FUNCTION=shouting, KEY_PREFIX="p")
    locks = [cache.lock("a"), cache.lock("b", version=5), Lock(client, "a!q!1")]
    for lock in locks:
        assert lock.acquire()
    assert cache.reset_all() == 2
    assert [lock.locked() for lock in locks] == [False, False, True]
    with pytest.raises(ImproperlyConfigured, match="KEY_FUNCTION"):
        cache_at(redis_url, backend, KEY_FUNCTION=hashing).reset_all()
    locks[2].release()
