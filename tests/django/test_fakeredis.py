"""fakeredis in place of a server: the cache works as its base class does, and locks say what to do."""

from __future__ import annotations

import fakeredis
import pytest
from django.core import checks
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from django_redislock import held_locks, lock
from django_redislock.core import Lock

SAID = "fakeredis.* have no socket.*'ENABLED': False"


@pytest.fixture(params=["RedisCache", "DjangoRedisCache"])
def cache(request, settings):
    """fakeredis as each backend can be given it."""
    options = {"connection_class": fakeredis.FakeRedisConnection}
    if request.param == "RedisCache":
        options = {"CONNECTION_POOL_KWARGS": options}
    settings.CACHES = {
        "default": {
            "BACKEND": f"django_redislock.cache.{request.param}",
            "LOCATION": "redis://fake.example:6379/0",
            "OPTIONS": options,
        }
    }
    return caches["default"]


def test_the_cache_works_as_its_base_class_does(cache):
    assert cache.get_or_set("k", lambda: 5, 60) == 5
    assert cache.get_or_set("k", lambda: 6, 60, stale=60) == 5
    assert cache.get_or_set_many(["k", "l"], lambda keys: dict.fromkeys(keys, 7), 60) == {"k": 5, "l": 7}
    assert cache.delete("k")
    cache.set("k", 1, 0)
    cache.delete_many(["k", "l"])
    assert cache.get_or_set("k", lambda: 8, 60) == 8
    cache.clear()
    assert cache.get("k") is None


def test_locks_say_in_one_sentence_what_to_do(cache):
    with pytest.raises(TypeError, match=SAID):
        Lock(fakeredis.FakeRedis(), "a")
    with pytest.raises(TypeError, match=SAID):
        cache.lock("a")
    for ask in (lambda: lock("a"), lambda: list(held_locks())):
        with pytest.raises(ImproperlyConfigured, match=f"the cache 'default' cannot hold locks: .*{SAID}"):
            ask()


def test_with_the_locks_off_everything_works(cache, settings):
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    with lock("a"), cache.lock("a"):
        assert cache.get_or_set("k", lambda: 5, 60) == 5
        cache.clear()


def test_the_check_names_it(cache, settings):
    settings.DJANGO_REDISLOCK = {"CACHE_ALIAS": "default"}
    (message,) = checks.run_checks(tags=["redislock"])
    assert message.id == "redislock.E004"
    assert "have no socket" in message.msg
