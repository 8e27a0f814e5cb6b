"""Values whose lease ended before they were computed: because the server evicted it, or because they took too long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from tests.cache.test_invalidation import EVENTS, REPLACED
from tests.support import wait_until
from tests.support.cache_programs import Work, cache_at, cache_elsewhere, getter, held

LEASE = "cache::1:k"


@pytest.fixture(params=[False, True], ids=["threads", "tasks"])
def get(request, cache):
    return getter(cache, request.param)


@pytest.fixture
def other(redis_url, backend):
    """The cache as another process has it."""
    return cache_elsewhere(redis_url, backend)


def keys(client, what):
    return list(client.scan_iter(f"{{redislock:*}}:{what}*", count=1000))


def evict_lease(client):
    """Do what a server does that needs room: it evicts what ends first."""
    assert client.delete(*keys(client, "lock:cache:")) == 1


def test_a_value_whose_lease_was_evicted_is_stored_and_the_eviction_is_counted_apart(get, cache, client, caplog):
    before = cache.stats()
    assert get("k", lambda: evict_lease(client) or "v", 60) == "v"
    assert cache.get("k") == "v"
    after = cache.stats()
    assert after.lease_evicted - before.lease_evicted == 1
    assert (after.lease_lost, after.fenced) == (before.lease_lost, before.fenced)
    assert "evicted the lease of" in caplog.text
    assert not keys(client, "witness:")


def test_a_large_value_whose_lease_was_evicted_is_stored(get, cache, client):
    large = "x" * 2_000_000
    assert get("k", lambda: evict_lease(client) or large, 60) == large
    assert cache.get("k") == large
    assert not keys(client, "ready:")


@pytest.mark.parametrize(
    "event",
    ["delete", "clear", "set", "add", "touch that deletes", "incr", "a set that ends", "flush by a plain client"],
)
@pytest.mark.parametrize("evicted_first", [True, False])
def test_nothing_is_stored_over_what_happened_when_the_lease_was_evicted_too(cache, client, event, evicted_first):
    happen, after = EVENTS[event]

    def compute():
        if evicted_first:
            evict_lease(client)
        happen(cache, client)
        if keys(client, "lock:cache:"):
            evict_lease(client)
        return "stale"

    assert cache.get_or_set("k", compute, 60) == "stale"
    assert cache.get("k") == after


@pytest.mark.parametrize("event", REPLACED)
def test_an_old_value_is_replaced_without_a_lease_only_when_nothing_happened_to_it(cache, client, event):
    happen, after = REPLACED[event]
    cache.set("k", "old", 50)

    def compute():
        evict_lease(client)
        happen(cache)
        return "computed"

    assert cache.get_or_set("k", compute, 60, refresh_before=55) == "computed"
    assert cache.get("k") == after


@pytest.mark.parametrize("gone", ["witness:", "era"])
def test_where_nobody_knows_whether_it_was_invalidated_nothing_is_stored(get, cache, client, gone):
    def compute():
        evict_lease(client)
        assert client.delete(*keys(client, gone))
        return "v"

    assert get("k", compute, 60) == "v"
    assert cache.get("k") is None


@pytest.mark.parametrize("gone", ["witness:", "era"])
def test_a_later_computation_says_nothing_of_an_earlier_one(cache, other, client, gone):
    """Its witness is younger: the earlier value may have been invalidated before."""
    later = Work("later")

    def compute():
        evict_lease(client)
        assert client.delete(*keys(client, gone))
        pool.submit(other.get_or_set, "k", later, 60)
        assert later.running.wait(10)
        return "earlier"

    with ThreadPoolExecutor(1) as pool:
        try:
            assert cache.get_or_set("k", compute, 60) == "earlier"
            assert cache.get("k") is None
        finally:
            later.end.set()
    assert cache.get("k") == "later"


def test_a_value_that_took_longer_than_max_hold_is_stored(get, cache, client, caplog):
    before = cache.stats().lease_lost
    assert get("k", lambda: wait_until(lambda: not held(client)) and "v", 60, expire=0.3, max_hold=0.3) == "v"
    assert cache.get("k") == "v"
    assert cache.stats().lease_lost - before == 1
    assert "took longer than its lease (expire, max_hold)" in caplog.text


def test_what_took_too_long_is_stored_while_another_one_computes_and_given_to_those_who_wait(cache, other, client):
    first, second = Work("first"), Work("second")
    with ThreadPoolExecutor(2) as pool:
        try:
            one = pool.submit(cache.get_or_set, "k", first, 60, expire=0.3, max_hold=0.3)
            assert first.running.wait(10)
            two = pool.submit(other.get_or_set, "k", second, 60)
            assert second.running.wait(10), "it takes over"
            first.end.set()
            assert one.result(20) == "first"
            assert cache.get("k") == "first"
        finally:
            first.end.set()
            second.end.set()
        assert two.result(20) == "second"
    assert cache.get("k") == "first"
    assert not held(client)


def test_a_later_computation_whose_lease_was_evicted_is_stored_while_an_earlier_one_goes_on(cache, other, client):
    first = Work("first")
    with ThreadPoolExecutor(1) as pool:
        try:
            one = pool.submit(cache.get_or_set, "k", first, 60, expire=0.3, max_hold=0.3)
            assert first.running.wait(10)
            assert other.get_or_set("k", lambda: evict_lease(client) or "second", 60) == "second"
            assert cache.get("k") == "second"
        finally:
            first.end.set()
        assert one.result(20) == "first"
    assert cache.get("k") == "second"


@pytest.mark.parametrize("how", ["delete", "reset"])
def test_what_took_too_long_and_was_invalidated_is_not_stored_whoever_computes_then(cache, other, client, how):
    first, second = Work("first"), Work("second")
    with ThreadPoolExecutor(2) as pool:
        try:
            one = pool.submit(cache.get_or_set, "k", first, 60, expire=0.3, max_hold=0.3)
            assert first.running.wait(10)
            two = pool.submit(other.get_or_set, "k", second, 60)
            assert second.running.wait(10)
            if how == "delete":
                cache.delete("k")
            else:
                assert cache.reset_all() == 1
            assert not held(client)
            for work in (first, second):
                work.end.set()
            assert (one.result(20), two.result(20)) == ("first", "second")
            assert cache.get("k") is None
        finally:
            for work in (first, second):
                work.end.set()


@pytest.mark.parametrize("end", ["fails", "is refused"])
def test_what_ends_without_a_value_and_without_a_lease_ends_no_other_computation_and_is_told_to_nobody(
    cache, other, client, end
):
    second, two = Work("second"), []

    def compute():
        evict_lease(client)
        two.append(pool.submit(other.get_or_set, "k", second, 60))
        assert second.running.wait(10)
        return 1 / (end == "is refused")

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ZeroDivisionError) if end == "fails" else nullcontext():
            assert cache.get_or_set("k", compute, 60, should_cache=lambda value: False) == 1
        assert held(client), "the other one goes on"
        second.end.set()
        assert two[0].result(20) == "second"
    assert cache.get("k") == "second"


def test_a_server_that_evicts_what_ends_first_stores_what_is_computed(backend, server_kind):
    with server_kind(maxmemory="6mb", maxmemory_policy="volatile-ttl") as server, server.client() as client:
        cache = cache_at(server.url, backend)
        cache.get_or_set("warm", lambda: 1, 3600)
        evicted = client.info("stats")["evicted_keys"]

        def compute():
            for start in range(0, 900, 50):  # what others store meanwhile
                with client.pipeline(transaction=False) as fillers:
                    for number in range(start, start + 50):
                        fillers.set(f"filler:{number}", "x" * 10_000, ex=3000 + number)
                    fillers.execute()
            return "v"

        before = cache.stats()
        for number in range(10):
            assert getter(cache, by_task=number % 2 > 0)(f"k{number}", compute, 7200) == "v"
            assert cache.get(f"k{number}") == "v"
        assert client.info("stats")["evicted_keys"] - evicted > 10
        assert cache.stats().lease_evicted > before.lease_evicted
