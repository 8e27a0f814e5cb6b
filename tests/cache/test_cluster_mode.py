"""A server in cluster mode behind a plain client: where the base class works, so does ours."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_redislock.cache.lease import request
from django_redislock.core import keys
from django_redislock.core.driver import registry
from tests.support import OneNode, wait_until
from tests.support.cache_programs import Work, cache_at, cache_elsewhere, getter, waiters

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def clustered():
    with OneNode() as server:
        yield server


@pytest.fixture
def nodes(clustered):
    """A client of the server, whose data is gone, and which nobody knows to be in cluster mode."""
    for server in registry.living_servers():
        vars(server).pop("splits", None)
    with clustered.client() as client:
        client.flushall()
        yield client


@pytest.fixture(params=["RedisCache", "DjangoRedisCache"])
def backend(request):
    return request.param


@pytest.fixture
def cache(clustered, nodes, backend):
    return cache_at(clustered.url, backend)


@pytest.fixture
def elsewhere(clustered, nodes, backend):
    return cache_elsewhere(clustered.url, backend)


@pytest.fixture(params=[False, True], ids=["threads", "tasks"])
def get(request, cache):
    return getter(cache, request.param)


KEYS = ["k", "{a}b", "a{b}c", "{}x", "ü", "with spaces", "k" * 1200]


def ours(client):
    """Return the keys of ours; not the notes that first calls, which are refused, were given up: they end by
    themselves."""
    found = [key for key in client.keys("*redislock*") if not key.endswith((b":fence", b":era"))]
    return [key for key in found if b":undone:" not in key]


def test_a_slot_is_what_the_server_takes_it_for(nodes):
    for key in [*KEYS, "}{", "{x", "a}b{c}", "{{a}}"]:
        assert request.key_slot(key.encode()) == nodes.execute_command("CLUSTER KEYSLOT", key)
    for prefix in ("redislock", "an other"):
        for slot, number in list(request._numbers(prefix).items())[::1000]:
            assert number >= keys.BUCKETS
            assert nodes.execute_command("CLUSTER KEYSLOT", f"{{{prefix}:{number}}}:lock:x") == slot


@pytest.mark.filterwarnings("ignore::django.core.cache.CacheKeyWarning")
def test_a_cold_key_is_computed_and_stored(get, cache, nodes, caplog):
    for key in KEYS:
        assert get(key, lambda: "v", 60) == "v"
        assert cache.get(key) == "v"
        assert get(key, lambda: 1 / 0, 60) == "v"
    assert not ours(nodes)
    assert not [record for record in caplog.records if record.name == "django_redislock" and record.levelname != "INFO"]


def end_when_waited_for(pool, nodes, end):
    """Set the event when a process waits for the value of the key."""
    pool.submit(lambda: (wait_until(lambda: waiters(nodes, "k") == 1), end.set()))


@pytest.mark.parametrize("size", [5, 2_000_000])
def test_another_process_waits_for_the_value(get, elsewhere, nodes, size):
    work = Work("x" * size)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(elsewhere.get_or_set, "k", work, 60)
        assert work.running.wait(10)
        end_when_waited_for(pool, nodes, work.end)
        assert get("k", lambda: "computed twice", 60) == work.value
        assert first.result(20) == work.value
    assert work.calls == 1


def test_another_process_gets_the_failure_too(get, elsewhere, nodes):
    work = Work()

    def fail():
        raise ValueError(work())

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(elsewhere.get_or_set, "k", fail, 60)
        assert work.running.wait(10)
        end_when_waited_for(pool, nodes, work.end)
        with pytest.raises(ValueError, match="v"):
            get("k", lambda: "own", 60)
        with pytest.raises(ValueError, match="v"):
            first.result(20)


INVALIDATIONS = {
    "delete": lambda cache, key: cache.delete(key),
    "set that ends": lambda cache, key: (cache.set(key, "newer", 5), cache._clients_to_scan()[0].delete(f":1:{key}")),
    "clear": lambda cache, key: cache.clear(),
    "delete_pattern": lambda cache, key: getattr(cache, "delete_pattern", lambda pattern: cache.clear())("k*"),
}


@pytest.mark.parametrize("key", ["k", f"k{{redislock:{keys.BUCKETS}}}"], ids=["any slot", "slot of the first number"])
@pytest.mark.parametrize("how", INVALIDATIONS)
@pytest.mark.parametrize("evicted", [False, True])
def test_nothing_is_stored_over_what_another_process_did_meanwhile(cache, elsewhere, nodes, how, evicted, key):
    """That one learns of the cluster mode by its first delete."""

    def compute():
        if evicted:
            assert nodes.delete(*nodes.keys("*:lock:cache:*")) == 1
        INVALIDATIONS[how](elsewhere, key)
        return "stale"

    assert cache.get_or_set(key, compute, 60) == "stale"
    assert cache.get(key) is None
    assert cache.get_or_set(key, lambda: "fresh", 60) == "fresh"
    assert cache.get(key) == "fresh"


def test_what_ends_no_lease_lets_the_value_be_stored(clustered, nodes):
    cache = cache_at(clustered.url)
    assert cache.get_or_set("k", lambda: (cache.delete_pattern("x*") and None) or "v", 60) == "v"
    assert cache.get("k") == "v"
    assert cache.get_or_set("l", lambda: nodes.delete(*nodes.keys("*:lock:cache:*")) and "v", 60) == "v"
    assert cache.get("l") == "v", "its lease was evicted"


@pytest.mark.slow
def test_the_leases_of_one_process_are_renewed_whatever_their_slots(cache, nodes):
    works = [Work(number) for number in range(5)]
    before = cache.stats()
    with ThreadPoolExecutor(5) as pool:
        futures = [
            pool.submit(cache.get_or_set, f"k{number}", work, 60, expire=0.6) for number, work in enumerate(works)
        ]
        for work in works:
            assert work.running.wait(10)
        held = set(nodes.keys("*:lock:cache:*"))
        assert len(held) == 5
        fences = {key: nodes.get(key) for key in held}
        threading.Event().wait(1.5)  # lives of them
        assert {key: nodes.get(key) for key in held} == fences
        for work in works:
            work.end.set()
        assert [future.result(20) for future in futures] == list(range(5))
    assert cache.stats().lease_lost == before.lease_lost


def test_nested_keys_in_opposite_orders_wait_for_each_other_no_longer_than_their_wait(cache, elsewhere):
    both = threading.Barrier(2)

    def outer(of, key, inner):
        def compute():
            both.wait(20)
            return of.get_or_set(inner, lambda: inner, 60, wait=1)

        return of.get_or_set(key, compute, 60, wait=1)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(outer, cache, "a", "b"), pool.submit(outer, elsewhere, "b", "a")
        one.result(30)
        two.result(30)


def test_a_key_may_be_wanted_while_it_is_computed_and_an_old_value_is_refreshed(get, cache):
    assert get("k", lambda: cache.get_or_set("k", lambda: "inner", 60), 60) == "inner"
    cache.set("k", "old", 25)
    assert get("k", lambda: "new", 60, stale=30) == "new"
    assert cache.get("k") == "new"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_keys(cache, nodes, asynchronous):
    def many(names):
        def default(missing):
            return {key: f"v of {key}" for key in missing}

        if asynchronous:
            return asyncio.run(cache.aget_or_set_many(names, default, 60))
        return cache.get_or_set_many(names, default, 60)

    names = [f"k{number}" for number in range(20)]
    assert many(names) == {key: f"v of {key}" for key in names}
    assert many([*names, "one more"]) == {key: f"v of {key}" for key in [*names, "one more"]}
    assert not ours(nodes)


@pytest.mark.parametrize("ignores", [False, True], ids=["raises", "ignores-exceptions"])
def test_get_many_set_many_and_delete_many_of_keys_in_several_slots(clustered, nodes, backend, ignores):
    if ignores and backend == "DjangoRedisCache":
        pytest.skip("Django's own backend ignores no exceptions")
    cache = cache_at(clustered.url, backend, OPTIONS={"IGNORE_EXCEPTIONS": True} if ignores else {})
    values = {f"k{number}": number for number in range(20)}
    for method, result in (
        (cache.get_many, {}),
        (cache.set_many, None),
        (cache.delete_many, None),
        (cache.get_many, {}),
    ):
        for server in registry.living_servers():  # each is the first one that is refused
            vars(server).pop("splits", None)
        assert method(values) in (result, [], len(values))
    for timeout in (60, None):
        assert not cache.set_many(values, timeout)
        assert cache.get_many([*values, "missing"]) == values
        assert all((nodes.pttl(f":1:{key}") > 0) is bool(timeout) for key in values)
    assert cache.delete_many(["k0", "k1", "missing"]) in (2, None)
    assert cache.get_many(values).keys() == set(values) - {"k0", "k1"}
    cache.set_many(values, 0)
    assert cache.get_many(values) == {}


def test_what_is_many_keys_for_an_invalidation(cache):
    from django_redislock.cache.lease.store import invalidate
    from django_redislock.core.driver.registry import server_of

    server = server_of(cache._client_for(""))
    assert server.run(invalidate(server, "redislock", [f":1:k{number}" for number in range(300)])) == 0
