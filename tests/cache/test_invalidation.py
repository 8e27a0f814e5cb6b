"""What is computed is never stored over what happened meanwhile."""

from __future__ import annotations

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from django_redislock.cache.lease.store import glob_to_regex
from django_redislock.core import Lock, held_locks, reset_all
from tests.support import monitoring, wait_until
from tests.support.cache_programs import Work, cache_at, commands, held


def in_a_loop(awaitable):
    """Await it in a loop of a thread's own, as if somewhere else."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, awaitable).result(20)


def base_of(cache, method):
    """Return the class of Django or of django-redis that has the method."""
    return next(kind for kind in type(cache).__mro__ if method in vars(kind) and "redislock" not in kind.__module__)


def ended(client):
    """Let the value come to its end."""
    client.pexpire(":1:k", 1)
    wait_until(lambda: client.get(":1:k") is None)


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
    "set, then touch": (lambda cache, client: (cache.set("k", "newer"), cache.touch("k", 90)), "newer"),
    "set, then touch that deletes": (lambda cache, client: (cache.set("k", "newer"), cache.touch("k", 0)), None),
    "touch that deletes": (lambda cache, client: cache.touch("k", -1), None),
    "incr": (lambda cache, client: (cache.set("k", 7), cache.incr("k")), 8),
    "decr": (lambda cache, client: (cache.set("k", 7), cache.decr("k", 2)), 5),
    "incr_version": (lambda cache, client: (cache.set("k", "newer"), cache.incr_version("k")), None),
    "decr_version": (lambda cache, client: (cache.set("k", "newer"), cache.decr_version("k")), None),
    "incr_version to it": (
        lambda cache, client: (cache.set("k", "newer", version=0), cache.incr_version("k", version=0)),
        "newer",
    ),
    "get_or_set without a lock": (lambda cache, client: cache.get_or_set("k", lambda: "newer", lock=False), "newer"),
    "adelete": (lambda cache, client: in_a_loop(cache.adelete("k")), None),
    "aset": (lambda cache, client: in_a_loop(cache.aset("k", "newer")), "newer"),
    "adelete_many": (lambda cache, client: in_a_loop(cache.adelete_many(["k"])), None),
    "atouch": (lambda cache, client: in_a_loop(cache.atouch("k", 0)), None),
    "aclear": (lambda cache, client: in_a_loop(cache.aclear()), None),
    "a set that ends": (lambda cache, client: (cache.set("k", "newer", 5), ended(client)), None),
    "a set_many that ends": (lambda cache, client: (cache.set_many({"k": "newer"}, 5), ended(client)), None),
    "an add that ends": (lambda cache, client: (cache.add("k", "newer", 5), ended(client)), None),
    "an aset that ends": (lambda cache, client: (in_a_loop(cache.aset("k", "newer", 5)), ended(client)), None),
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
    assert not held(client)
    assert cache.get_or_set("k", lambda: "fresh", 60) == after or "fresh"
    assert cache.get("k") == after or "fresh"


def test_a_value_set_by_a_plain_client_that_looks_the_same_is_kept_with_its_life(cache, client):
    def compute():
        client.set(":1:k", "7", px=5000)
        return 7

    assert cache.get_or_set("k", compute, 60) == 7
    assert client.pttl(":1:k") <= 5000


def test_other_keys_and_a_users_own_locks_are_not_touched(cache, client):
    def compute():
        cache.delete("other")
        cache.delete("k", version=2)
        return "v"

    assert cache.get_or_set("k", compute, 60) == "v"
    assert cache.get("k") == "v"
    with Lock(client, "k"), Lock(client, ":1:k"):
        cache.delete("k")
        assert {info.name for info in held_locks(client)} == {"k", ":1:k"}


def test_who_waits_while_the_value_is_deleted_gets_a_fresh_one(cache):
    """It may have come after the delete, and must not get what was computed from before it."""
    stale, fresh = Work("stale"), []
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(cache.get_or_set, "k", stale, 60)
        assert stale.running.wait(10)
        cache.delete("k")
        others = [pool.submit(cache.get_or_set, "k", lambda: fresh.append(1) or "fresh", 60) for _ in range(4)]
        try:
            assert [other.result(20) for other in others] == ["fresh"] * 4, "none waits for the earlier computation"
        finally:
            stale.end.set()
        assert first.result(20) == "stale"
    assert (stale.calls, len(fresh)) == (1, 1)
    assert cache.get("k") == "fresh"


@pytest.mark.parametrize(("method", "keys"), [("delete", "k"), ("delete_many", ["k"])])
def test_a_computation_is_not_stored_when_a_delete_removes_what_was_set_after_it_began(
    cache, monkeypatch, method, keys
):
    """The set comes between the steps of the delete, whose caller knows nothing of it."""
    older, computed = Work("older"), []
    base = base_of(cache, method)
    deletes = getattr(base, method)

    with ThreadPoolExecutor(1) as pool:

        def delete(*args, **kwargs):
            computed.append(pool.submit(cache.get_or_set, "k", older, 60))
            assert older.running.wait(10)
            cache.set("k", "newer", 60)
            return deletes(*args, **kwargs)

        monkeypatch.setattr(base, method, delete)
        getattr(cache, method)(keys)
        older.end.set()
        assert computed[0].result(20) == "older"
    assert cache.get("k") is None


def test_what_was_computed_between_the_steps_of_a_delete_is_deleted_too(cache, monkeypatch):
    """It may have begun before the delete."""
    base = base_of(cache, "delete")
    deletes = base.delete

    def delete(*args, **kwargs):
        deleted = deletes(*args, **kwargs)
        assert cache.get_or_set("k", lambda: "older", 60) == "older"
        return deleted

    monkeypatch.setattr(base, "delete", delete)
    assert not cache.delete("k")
    assert cache.get("k") is None


@pytest.mark.slow
@pytest.mark.parametrize("write", ["set", "add", "set_many"])
def test_what_was_computed_before_a_brief_value_and_stored_after_it_is_deleted(cache, monkeypatch, write):
    """The process that wrote the value paused before it ended the leases."""
    base = base_of(cache, write)
    writes = getattr(base, write)

    def write_and_pause(*args, **kwargs):
        written = writes(*args, **kwargs)
        wait_until(lambda: cache.get("k") is None)
        assert cache.get_or_set("k", lambda: "older", 60) == "older"
        return written

    monkeypatch.setattr(base, write, write_and_pause)
    getattr(cache, write)(*(({"k": "new"},) if write == "set_many" else ("k", "new")), 1)
    assert cache.get("k") is None


def test_a_delete_costs_one_script_and_returns_what_the_base_class_returns_and_a_set_costs_nothing_more(cache, client):
    cache.delete("k")  # the node of the key gets the script
    with monitoring(client) as sent:
        cache.set("k", 1, 60)
        assert cache.delete("k") is True
    assert commands(sent) == ["SET", "DEL", "EVALSHA"]
    assert cache.delete("k") is False


@pytest.mark.one_server("on a Cluster a script is about one slot")
def test_many_keys_are_deleted_with_few_scripts(cache, client):
    keys = [f"k{number}" for number in range(2500)]
    cache.set_many(dict.fromkeys(keys, 1))
    cache.delete("warm")
    with monitoring(client) as sent:
        cache.delete_many(iter(keys))
    assert commands(sent) == ["DEL"] + ["EVALSHA"] * 10
    assert client.dbsize() == 0


def test_deleting_nothing(cache):
    cache.delete_many([])
    cache.delete_many(iter([]))
    cache.set_many({}, 0)


@pytest.mark.one_server("tests/cache/test_cluster_cache.py has it for a Cluster")
def test_a_deletion_when_redis_is_down_fails_as_in_the_base_class_or_is_forgiven(own_server, backend):
    strict, cache = cache_at(own_server.url, backend), cache_at(own_server.url, OPTIONS={"IGNORE_EXCEPTIONS": True})
    cache.set("k", 1)
    strict.get("k")
    own_server.kill()
    with pytest.raises(redis.ConnectionError):
        strict.delete("k")
    assert not cache.delete("k")
    cache.delete_many(["k"])
    cache.set("k", 1, 0)
    cache.set_many({"k": 1}, 0)
    assert not cache.touch("k", 0)
    assert not cache.incr_version("k")
    assert not cache.clear()
    own_server.start()
    assert cache.get("k") is None, "it was not saved to disk"
    cache.set("k", 1)
    assert cache.clear()
    assert cache.get("k") is None


ONLY_DJANGO_REDIS = {
    "delete_pattern": lambda cache: cache.delete_pattern("k*"),
    "delete_pattern of a class": lambda cache: cache.delete_pattern("[a-k]"),
    "delete_pattern, prefix": lambda cache: cache.delete_pattern("*", prefix=""),
    "expire": lambda cache: cache.expire("k", 0),
    "pexpire": lambda cache: cache.pexpire("k", -1),
    "expire_at": lambda cache: cache.expire_at("k", 1),
    "pexpire_at": lambda cache: cache.pexpire_at("k", int(time.time() * 1000) - 5),
}


@pytest.mark.parametrize("event", ONLY_DJANGO_REDIS)
@pytest.mark.parametrize("evicted", [False, True])
def test_what_django_redis_deletes_by(redis_url, client, event, evicted):
    def compute():
        if evicted:
            assert client.delete(*client.keys("*:lock:cache:*")) == 1
        ONLY_DJANGO_REDIS[event](cache)
        return "stale"

    cache = cache_at(redis_url)
    assert cache.get_or_set("k", compute, 60) == "stale"
    assert cache.get("k") is None
    assert not held(client)


@pytest.mark.parametrize("event", ["expire", "pexpire", "expire_at", "pexpire_at"])
def test_what_deletes_tries_a_server_that_is_down_once_when_errors_are_ignored(own_server, event, monkeypatch):
    cache = cache_at(own_server.url, OPTIONS={"IGNORE_EXCEPTIONS": True})
    cache.set("k", 1)
    own_server.kill()
    asked = []
    monkeypatch.setattr(cache.client, event, lambda *args, **kwargs: asked.append(args))
    assert ONLY_DJANGO_REDIS[event](cache) is None
    assert not asked


def test_a_pattern_that_does_not_match_ends_nothing(redis_url):
    cache = cache_at(redis_url)
    for pattern in ("x*", "k?", "K", r"\*", r"\?", "[a-k]k"):
        assert cache.get_or_set("k", lambda pattern=pattern: cache.delete_pattern(pattern) or "v", 60) == "v"
        assert cache.get("k") == "v"
        cache.delete("k")
    assert cache.get_or_set("k", lambda: cache.delete_pattern("*", version=2) or "v", 60) == "v"
    assert cache.get("k") == "v"


PATTERNS = ["*", "a?c", "a[b]c", "[ab]*", "[^b]*", "a[a-c]c", r"a\*c", r"\a*", "a.c"]
PATTERNS += ["[", "a[", "a[^b]c", "[a", "]", "[]a]", "[c-a]*", r"a[\]]"]


def test_patterns_match_as_those_of_redis(client):
    names = ["abc", "a*c", "a.c", "bbc", "a", "[", "]", "a[", "a]", "^"]
    client.mset(dict.fromkeys(names, 1))
    for pattern in PATTERNS:
        matches = re.compile(glob_to_regex(pattern), re.DOTALL).fullmatch
        missed = {name for name in map(bytes.decode, client.keys(pattern)) if not matches(name)}
        assert not missed, f"{pattern}: more may match, but never less"


@pytest.mark.filterwarnings("ignore::django.core.cache.CacheKeyWarning")
@pytest.mark.parametrize("long", [f"{'k' * 3000}z", *(f"{'k' * count}{'🔒' * 500}z" for count in (1, 2, 3, 4))])
def test_a_pattern_and_a_key_too_long_for_a_name(redis_url, long):
    cache = cache_at(redis_url)
    assert cache.get_or_set(long, lambda: (cache.delete_pattern("k*z") and None) or "v", 60) == "v"
    assert cache.get(long) is None


# While an old value is replaced, there is one in the cache

REPLACED = {
    "set of the same": (lambda cache: cache.set("k", "old", 500), "old"),
    "touch": (lambda cache: cache.touch("k", 500), "old"),
    "delete": (lambda cache: cache.delete("k"), None),
    "set": (lambda cache: cache.set("k", "newer", 500), "newer"),
    "touch that deletes": (lambda cache: cache.touch("k", 0), None),
    "incr_version": (lambda cache: cache.incr_version("k"), None),
    "clear": (lambda cache: cache.clear(), None),
    "nothing": (lambda cache: None, "computed"),
}


@pytest.mark.parametrize("event", REPLACED)
def test_nothing_is_stored_over_what_happened_while_an_old_value_was_replaced(cache, client, event):
    happen, after = REPLACED[event]
    cache.set("k", "old", 50)

    def compute():
        happen(cache)
        return "computed"

    assert cache.get_or_set("k", compute, 60, refresh_before=55) == "computed"
    assert cache.get("k") == after
    assert not held(client)


RAW = {"KEY_FUNCTION": f"{__name__}.raw", "REVERSE_KEY_FUNCTION": f"{__name__}.raw"}
EVERYTHING = {
    "clear": ("RedisCache", lambda cache: cache.clear()),
    "Django's clear": ("DjangoRedisCache", lambda cache: cache.clear()),
    "aclear": ("RedisCache", lambda cache: in_a_loop(cache.aclear())),
    "delete_pattern": ("RedisCache", lambda cache: cache.delete_pattern("*")),
}


def raw(key, prefix="", version=""):
    return key


@pytest.mark.parametrize("how", EVERYTHING)
def test_what_deletes_everything_leaves_locks(redis_url, client, how):
    backend, delete = EVERYTHING[how]
    cache = cache_at(redis_url, backend, **(RAW if how == "delete_pattern" else {}))
    cache.set_many({f"k{number}": number for number in range(2500)})
    client.set("somebody else's", "v")
    with Lock(client, "mine") as lock:
        delete(cache)
        lock.extend()
        left = client.keys("*")
    assert left
    assert all(key.startswith(b"{redislock") for key in left)
