"""get_or_set_many when others compute some of the keys, in this process or in another one."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_redislock.cache.lease import single_flight
from django_redislock.core.driver.effects import ScriptBatch, ScriptCall
from django_redislock.exceptions import AcquireTimeout
from tests.support import cache_programs, wait_until
from tests.support.cache_programs import cache_at, lease_elsewhere, never, upper, waiters


@pytest.mark.parametrize("asynchronous", [False, True])
def test_overlapping_callers_in_opposite_orders_compute_each_key_once(redis_url, cache, asynchronous):
    computed, lock = [], threading.Lock()
    start = threading.Barrier(8)

    def compute(keys):
        with lock:
            computed.extend(keys)
        return upper(keys)

    def one(number):
        keys = [f"k{i}" for i in range(number, number + 5)]
        start.wait(10)
        keys = keys[:: 1 if number % 2 else -1]
        if asynchronous:
            return asyncio.run(cache.aget_or_set_many(keys, compute, 60))
        return cache.get_or_set_many(keys, compute, 60)

    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        for number, values in enumerate(pool.map(one, range(8))):
            assert values == {f"k{i}": f"K{i}" for i in range(number, number + 5)}
    assert time.monotonic() - began < 10, "far below the 30 s that a caller waits at most"
    assert sorted(computed) == sorted({f"k{i}" for i in range(12)})


def test_a_single_key_shares_with_many(cache):
    work = Held()
    with ThreadPoolExecutor(2) as pool:
        several = pool.submit(cache.get_or_set_many, ["a", "b"], work.then(upper), 60)
        assert work.running.wait(10)
        one = pool.submit(cache.get_or_set, "b", never, 60)
        wait_until(lambda: cache_programs.followers() == 1)
        work.end.set()
        assert several.result(20) == {"a": "A", "b": "B"}
        assert one.result(20) == "B"


def test_that_there_is_no_value_for_a_key_is_computed_once_too(cache):
    """Each of those who waited computed it again, one after another. A caller of one key has a function of its own."""
    work = Held()
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(cache.get_or_set_many, ["a"], work.then(lambda keys: {}), 60)
        assert work.running.wait(10)
        others = [pool.submit(cache.get_or_set_many, ["a"], never, 60) for _ in range(3)]
        one = pool.submit(cache.get_or_set, "a", lambda: "one", 60)
        wait_until(lambda: cache_programs.followers() == 4)
        work.end.set()
        assert [call.result(20) for call in (first, *others)] == [{}] * 4
        assert one.result(20) == "one"


def test_who_follows_a_caller_of_many_does_not_wait_while_that_one_computes_other_keys(cache, client):
    """Another process has the lease of "b", and stores "b" while this one computes "a" and "c"."""
    work = Held()
    with ThreadPoolExecutor(2) as pool, lease_elsewhere(client, "b"):
        several = pool.submit(cache.get_or_set_many, ["a", "b", "c"], work.then(upper), 60)
        assert work.running.wait(10)
        one = pool.submit(cache.get_or_set, "b", never, 60)
        wait_until(lambda: waiters(client, "b") or cache_programs.followers())
        cache.set("b", "theirs", 60)
        try:
            assert one.result(10) == "theirs"
        finally:
            work.end.set()
        assert several.result(20) == {"a": "A", "b": "theirs", "c": "C"}


def test_what_another_process_computes_is_waited_for_after_the_rest_is_computed(cache, client, many):
    """Another process's lease is a lock of that name."""
    calls = []

    def compute(keys):
        calls.append(keys)
        return upper(keys)

    with lease_elsewhere(client, "b"):
        with pytest.raises(AcquireTimeout, match="cache::1:b"):
            many(["a", "b", "c"], compute, wait=0.1, on_wait_timeout="raise")
        assert calls == [["a", "c"]]
        assert many(["b", "d"], compute, wait=0.1, on_wait_timeout={"mine": 1}) == {"b": {"mine": 1}, "d": "D"}
    assert many(["a", "b", "c"], compute) == {"a": "A", "b": "B", "c": "C"}
    assert calls == [["a", "c"], ["d"], ["b"]]


@pytest.fixture
def elsewhere(redis_url):
    """The cache as another process has it: what is computed there is waited for through Redis."""
    return cache_at(redis_url, "DjangoRedisCache", OPTIONS={"client_name": "elsewhere"})


class Held:
    """Lets a computation run until the test ends it."""

    def __init__(self):
        self.running, self.end = threading.Event(), threading.Event()

    def then(self, default):
        """Return the default, which begins when the test says so."""

        def compute(keys):
            self.running.set()
            assert self.end.wait(20)
            return default(keys)

        return compute


@pytest.mark.one_server("on a Cluster each node takes round trips of its own")
def test_who_waits_for_what_another_process_computes_asks_once_for_all_and_twice_for_each_at_most(
    elsewhere, many, client, effects
):
    keys = [f"k{number}" for number in range(20)]
    work, waiting = Held(), []
    many(["warm"], upper)

    def wait():
        waiting.append(threading.get_ident())
        return many(keys, never)

    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(elsewhere.get_or_set_many, keys, work.then(upper), 60)
        assert work.running.wait(10)
        waiter = pool.submit(wait)
        wait_until(lambda: waiters(client, keys[0]) == 1)
        work.end.set()
        assert waiter.result(20) == leader.result(20) == upper(keys)
    asked = [effect for thread, effect in effects if thread in waiting]
    assert [len(effect.calls) for effect in asked if isinstance(effect, ScriptBatch)] == [len(keys)]
    alone = [effect.keys[0] for effect in asked if isinstance(effect, ScriptCall)]
    assert len(alone) <= 2 * len(keys), "but for one look twice a second"
    assert not any(waiters(client, key) for key in keys)
    assert not single_flight._flights


def test_who_waits_for_one_key_is_told_of_its_failure_and_waits_for_no_other_one(elsewhere, client, many):
    work = Held()

    def fail(keys):
        raise ValueError("mine")

    with ThreadPoolExecutor(2) as pool, lease_elsewhere(client, "a"):
        leader = pool.submit(elsewhere.get_or_set_many, ["b"], work.then(fail))
        assert work.running.wait(10)
        waiter = pool.submit(many, ["b", "a"], never)
        wait_until(lambda: waiters(client, "b") == 1)
        work.end.set()
        with pytest.raises(ValueError, match="mine"):
            waiter.result(20)
        with pytest.raises(ValueError, match="mine"):
            leader.result(20)
        assert waiters(client, "a") == 0
    assert not single_flight._flights


def test_who_follows_in_the_same_process_has_a_value_while_another_one_is_waited_for(cache, client, many):
    work = Held()
    with ThreadPoolExecutor(2) as pool, lease_elsewhere(client, "b"):
        both = pool.submit(cache.get_or_set_many, ["a", "b"], work.then(upper))
        assert work.running.wait(10)
        one = pool.submit(many, ["a"], never)
        wait_until(lambda: cache_programs.followers() == 1)
        work.end.set()
        assert one.result(20) == {"a": "A"}
        assert not both.done()
    assert both.result(20) == {"a": "A", "b": "B"}


def test_cancelled_while_it_waits_for_many_it_leaves_no_place_in_a_queue(cache, client):
    keys = ["a", "b", "c"]

    async def main():
        task = asyncio.ensure_future(cache.aget_or_set_many(keys, never))
        while not waiters(client, "a"):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with lease_elsewhere(client, "a"), lease_elsewhere(client, "b"), lease_elsewhere(client, "c"):
        asyncio.run(main())
        wait_until(lambda: not any(waiters(client, key) for key in keys))
    assert not single_flight._flights


def test_many_that_were_waited_for_in_vain_are_computed_in_one_call(cache, client, many):
    calls = []
    for key in "abc":  # whose leases end when the values are stored
        lease_elsewhere(client, key, auto_renewal=False).acquire()
    assert many(["a", "b", "c"], lambda keys: calls.append(keys) or upper(keys), wait=0.1) == upper("abc")
    assert calls == [["a", "b", "c"]]
    assert not single_flight._flights
