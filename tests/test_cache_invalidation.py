"""What is computed is never stored over what happened meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from django.test import override_settings

from django_redislock.core import Lock, held_locks, reset_all
from tests.cache_programs import BACKENDS, cache_at, commands, followers
from tests.support import monitoring, wait_until


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def cache(redis_url, backend):
    return cache_at(redis_url, backend)


EVENTS = {
    "delete": (lambda cache, client: cache.delete("k"), None),
    "delete_many": (lambda cache, client: cache.delete_many(k for k in ["other", "k"]), None),
    "clear": (lambda cache, client: cache.clear(), None),
    "set": (lambda cache, client: cache.set("k", "newer", 60), "newer"),
    "set_many": (lambda cache, client: cache.set_many({"k": "newer", "l": 1}, 60), "newer"),
    "add": (lambda cache, client: cache.add("k", "newer", 60), "newer"),
    "set that deletes": (lambda cache, client: cache.set("k", "newer", 0), None),
    "set_many that deletes": (lambda cache, client: cache.set_many({"k": "newer"}, -1), None),
    "set, then delete": (lambda cache, client: (cache.set("k", "newer"), cache.delete("k")), None),
    "set by a plain client": (lambda cache, client: client.set(":1:k", "7"), 7),
    "flush by a plain client": (lambda cache, client: client.flushall(), None),
    "force-release": (lambda cache, client: reset_all(client), None),
}


@pytest.mark.parametrize("event", EVENTS)
def test_nothing_is_stored_over_what_happened_while_it_was_computed(cache, client, event):
    happen, after = EVENTS[event]

    def compute():
        happen(cache, client)
        return "stale"

    assert cache.get_or_set("k", compute, 60) == "stale", "the caller gets its own, and no exception"
    assert cache.get("k") == after
    assert not list(held_locks(client))
    assert cache.get_or_set("k", lambda: "fresh", 60) == after or "fresh"
    assert cache.get("k") == after or "fresh"


def test_a_value_set_by_a_plain_client_that_looks_the_same_is_kept_with_its_life(cache, client):
    def compute():
        client.set(":1:k", "7", px=5000)
        return 7

    assert cache.get_or_set("k", compute, 60) == 7
    assert client.pttl(":1:k") <= 5000


def test_other_keys_are_not_invalidated(cache, client):
    def compute():
        cache.delete("other")
        cache.delete("k", version=2)
        return "v"

    assert cache.get_or_set("k", compute, 60) == "v"
    assert cache.get("k") == "v"


def test_who_waits_while_the_value_is_deleted_gets_a_fresh_one(cache, client):
    """It may have come after the delete, and must not get what was computed from before it."""
    running, end, calls = threading.Event(), threading.Event(), []

    def compute():
        calls.append(1)
        if len(calls) == 1:
            running.set()
            assert end.wait(20)
            return "stale"
        return "fresh"

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(cache.get_or_set, "k", compute, 60)
        assert running.wait(10)
        cache.delete("k")
        others = [pool.submit(cache.get_or_set, "k", compute, 60) for _ in range(4)]
        wait_until(lambda: followers() == 4)
        end.set()
        assert first.result(20) == "stale"
        assert [other.result(20) for other in others] == ["fresh"] * 4
    assert len(calls) == 2
    assert cache.get("k") == "fresh"


def test_a_delete_costs_one_script_and_returns_what_the_base_class_returns(cache, client):
    cache.set("k", 1)
    cache.delete("warm")
    with monitoring(client) as sent:
        assert cache.delete("k") is True
    assert commands(sent) == ["EVALSHA", "DEL"]
    assert cache.delete("k") is False


def test_a_set_costs_nothing_more(cache, client):
    with monitoring(client) as sent:
        cache.set("k", 1, 60)
    assert commands(sent) == ["SET"]


def test_many_keys_are_deleted_with_few_scripts(cache, client):
    keys = [f"k{number}" for number in range(2500)]
    cache.set_many(dict.fromkeys(keys, 1))
    cache.delete("warm")
    with monitoring(client) as sent:
        cache.delete_many(iter(keys))
    assert commands(sent) == ["EVALSHA"] * 3 + ["DEL"]
    assert client.dbsize() == 0


def test_deleting_nothing(cache):
    cache.delete_many([])
    cache.delete_many(iter([]))
    cache.set_many({}, 0)


def test_a_users_own_lock_is_not_touched_by_a_delete(cache, client):
    with Lock(client, "k"), Lock(client, ":1:k"):
        cache.delete("k")
        assert {info.name for info in held_locks(client)} == {"k", ":1:k"}


def test_disabled_a_delete_is_the_base_classs(cache, client):
    with override_settings(DJANGO_REDISLOCK={"ENABLED": False}), monitoring(client) as sent:
        cache.delete("k")
    assert commands(sent) == ["DEL"]


def test_a_deletion_when_redis_is_down_fails_as_in_the_base_class(own_server, backend):
    cache = cache_at(own_server.url, backend)
    cache.set("k", 1)
    own_server.kill()
    with pytest.raises(redis.ConnectionError):
        cache.delete("k")


def test_a_deletion_when_redis_is_down_may_be_forgiven(own_server):
    cache = cache_at(own_server.url, OPTIONS={"IGNORE_EXCEPTIONS": True})
    cache.set("k", 1)
    own_server.kill()
    assert not cache.delete("k")
    cache.delete_many(["k"])
    cache.set("k", 1, 0)
