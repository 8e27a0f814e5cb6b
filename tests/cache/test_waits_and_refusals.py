"""What comes when the wait is over, values that are not to be stored, and how long values live."""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery.exceptions import Ignore, Retry
from django.core.cache import caches

from django_redislock.cache import cached
from django_redislock.cache.compute_once import dump_failure, load_failure
from django_redislock.exceptions import AcquireTimeout, ComputationFailed
from tests.support import counting, lived, wait_until
from tests.support.cache_programs import (
    Work,
    cache_at,
    cache_elsewhere,
    followers,
    held,
    lease_elsewhere,
    never,
    waiters,
)

# When the wait is over


def test_who_prefers_a_new_value_waits_for_it_and_then_takes_the_old_one(cache, client):
    cache.set("k", "old", 25)
    work = Work("new")
    options = {"stale": 30, "on_wait_timeout": "stale"}
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(cache.get_or_set, "k", work, 60, **options)
        assert work.running.wait(10)
        assert cache.get_or_set("k", never, 60, wait=0.1, **options) == "old"
        patient = pool.submit(cache.get_or_set, "k", never, 60, wait=20, **options)
        wait_until(lambda: waiters(client) == 1)
        work.end.set()
        assert first.result(20) == "new"
        assert patient.result(20) == "new"


def test_without_an_old_value_stale_is_to_compute(cache, client, get):
    assert lease_elsewhere(client, "k").acquire()
    assert get("k", lambda: "own", 60, wait=0.1, on_wait_timeout="stale") == "own"
    assert cache.get("k") == "own"


def test_any_value_may_be_the_answer_when_the_wait_is_over(client, get):
    answers = [({"a": 1}, {"a": 1}), (0, 0), (False, False), (lambda: "text", "text"), (lambda: None, None)]
    with lease_elsewhere(client, "k"):
        for answer, expected in answers:
            assert get("k", never, 60, wait=0.1, on_wait_timeout=answer) == expected
        with pytest.raises(AcquireTimeout):
            get("k", never, 60, wait=0, on_wait_timeout="raise")


class Table:
    """A value like those of pandas and numpy: a comparison has no truth value."""

    __hash__ = None

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("the truth value of a table is ambiguous")


def test_the_answer_when_the_wait_is_over_is_never_compared(client, get, cache, many):
    table = Table()
    with lease_elsewhere(client, "k"):
        assert get("k", never, 60, wait=0.1, on_wait_timeout=table) is table
        assert many(["k"], never, 60, wait=0.1, on_wait_timeout=table)["k"] is table
    cache.set("k", "old", 25)
    assert get("k", lambda: "new", 60, stale=30, on_wait_timeout=table) == "new"


MANY_PROCESSES = 64


@pytest.mark.slow
def test_many_processes_that_wait_for_a_value_share_their_looks(redis_url, client):
    caches = [
        cache_at(f"{redis_url}?socket_timeout={5 + number / 100}") for number in range(MANY_PROCESSES)
    ]  # as if in processes
    with ThreadPoolExecutor(MANY_PROCESSES) as pool, lease_elsewhere(client, "k"):
        answers = [pool.submit(cache.get_or_set, "k", never, 60, wait=300, on_wait_timeout=None) for cache in caches]
        wait_until(lambda: waiters(client) == MANY_PROCESSES, timeout=120)
        lived(2.5)  # the first looks of those that came early are for a shorter queue
        began = time.monotonic()
        with counting(client) as counts:
            lived(3)
        seconds = time.monotonic() - began
        assert counts["evalsha"] <= seconds * 32 * 1.5, "and not 128 a second"
        client.set(":1:k", 7)  # nobody is told of it
        assert [answer.result(30) for answer in answers] == [7] * MANY_PROCESSES, "each looks every 4 s at least"


# Values that are not to be stored


@pytest.mark.parametrize("value", [None, "no"])
def test_a_refused_value_is_returned_and_not_stored(get, cache, client, value):
    assert get("k", lambda: value, 60, should_cache=lambda found: found == "yes") == value
    assert not cache.has_key("k")
    assert not held(client)
    assert get("k", lambda: "yes", 60, should_cache=lambda found: found == "yes") == "yes"
    assert cache.get("k") == "yes"


def test_a_refused_value_goes_to_all_who_wait_for_it(redis_url, cache, client, backend):
    """In this process and in others: they do not compute one after another what nobody stores."""
    work, other = Work("refused"), cache_elsewhere(redis_url, backend)
    with ThreadPoolExecutor(7) as pool:
        futures = [pool.submit(cache.get_or_set, "k", work, 60, should_cache=lambda value: False) for _ in range(6)]
        assert work.running.wait(10)
        futures.append(pool.submit(other.get_or_set, "k", never, 60))
        wait_until(lambda: followers() == 5 and waiters(client) == 1)
        work.end.set()
        assert [future.result(20) for future in futures] == ["refused"] * 7
    assert work.calls == 1
    assert not cache.has_key("k")


def test_a_large_refused_value_goes_to_all_who_wait_for_it(redis_url, backend, client):
    """Also in other processes; nothing of it stays."""
    caches = [
        cache_at(f"{redis_url}?socket_timeout={5 + number}", backend) for number in range(4)
    ]  # as if in processes
    work = Work("x" * 100_000)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(each.get_or_set, "k", work, 60, should_cache=lambda value: False) for each in caches]
        wait_until(lambda: waiters(client) == 3)
        work.end.set()
        assert [future.result(20) for future in futures] == [work.value] * 4
    assert work.calls == 1
    assert not client.exists(":1:k")
    assert all(0 < client.pttl(key) <= 10_000 for key in client.keys("*:value"))
    client.flushdb()
    assert caches[0].get_or_set("k", work, 60, should_cache=lambda value: False) == work.value
    assert not client.keys("*:value"), "nobody waits"


def test_a_failing_should_cache_or_timeout_is_the_callers_error(get, client):
    with pytest.raises(ZeroDivisionError):
        get("k", lambda: "v", 60, should_cache=lambda value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        get("k", lambda: "v", lambda value: 1 / 0)
    assert not held(client)


# Timeouts


def test_a_value_that_would_be_due_at_once_is_refused(get, settings, redis_url, backend):
    """It would be computed at each call."""
    for timeout in (10, 20, 20.0):
        with pytest.raises(ValueError, match="refresh_before must be less than the timeout"):
            get("k", never, timeout, refresh_before=20)
    with pytest.raises(ValueError, match="refresh_before"):
        cache_at(redis_url, backend, TIMEOUT=20).get_or_set("k", never, refresh_before=20)
    assert get("k", lambda: "v", 21, refresh_before=20) == "v"
    assert get("f", lambda: "v", None, refresh_before=20) == "v"
    assert get("f", never, None, refresh_before=20) == "v", "what stays for ever is never due"


def test_jitter_shortens_lives_at_random(redis_url, client):
    cache = cache_at(redis_url, OPTIONS={"LOCK": {"JITTER": 0.5}})
    for number in range(20):
        cache.get_or_set(f"k{number}", lambda: 1, 100)
    lives = [client.pttl(f":1:k{number}") for number in range(20)]
    assert all(40_000 < life <= 100_000 for life in lives)
    assert len({life // 1000 for life in lives}) > 3
    cache.get_or_set("forever", lambda: 1, None)
    assert client.pttl(":1:forever") == -1
    cache.get_or_set("exact", lambda: 1, 100, jitter=0)
    assert client.pttl(":1:exact") > 95_000
    for number in range(20):
        cache.get_or_set(f"d{number}", lambda: 1, 100, refresh_before=50, jitter=1.0)
        assert 49_000 < client.pttl(f":1:d{number}") <= 100_000, "the time in which it is due is left alone"


@pytest.mark.parametrize("options", [{}, {"lock": False}, {"stale": 30}], ids=str)
def test_a_timeout_may_be_a_function_of_the_value(get, cache, client, options):
    def timeout(value):
        return {"short": 10, "never": 0, "forever": None}[value]

    assert get("k", lambda: "short", timeout, **options) == "short"
    assert options.get("stale", 0) * 1000 < client.pttl(":1:k") <= (10 + options.get("stale", 0)) * 1000
    assert get("k", never, timeout, **options) == "short"
    assert get("f", lambda: "forever", timeout, **options) == "forever"
    assert client.pttl(":1:f") == -1
    assert get("n", lambda: "never", timeout, **options) == "never"
    assert not cache.has_key("n")
    assert not held(client)


def test_many_values_have_each_the_timeout_of_its_own(cache, client):
    for options in ({}, {"lock": False}):
        cache.clear()
        values = cache.get_or_set_many(
            "ab", lambda keys: dict.fromkeys(keys, 1) | {"a": 2}, lambda value: 10 * value, **options
        )
        assert values == {"a": 2, "b": 1}
        assert client.pttl(":1:b") <= 10_000 < client.pttl(":1:a") <= 20_000


@pytest.mark.parametrize("alias", ["redis", "local"])
def test_a_cached_function_may_tell_the_timeout_of_each_value(settings, redis_url, backend, alias):
    settings.CACHES = {
        "redis": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url},
        "local": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "timeouts"},
    } | {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    calls = []

    @cached(lambda value: 60 if value else 0, key="k:{value}", using=alias)
    def same(value):
        calls.append(value)
        return value

    @cached(lambda value: 60 if value else 0, key="a:{value}", using=alias)
    async def asame(value):
        calls.append(value)
        return value

    caches[alias].clear()
    assert [same(value) for value in (1, 1, 0, 0)] == [1, 1, 0, 0]
    assert [asyncio.run(asame(value)) for value in (1, 1, 0, 0)] == [1, 1, 0, 0]
    assert calls == [1, 0, 0] * 2


def test_load_failure_of_a_class_that_cannot_be_imported_carries_its_text():
    gone = type("Gone", (Exception,), {"__module__": "tests.gone_module"})
    module = sys.modules["tests.gone_module"] = types.ModuleType("tests.gone_module")
    module.Gone = gone
    try:
        data = dump_failure("k", pickle.dumps, pickle.loads, gone("sick"))
    finally:
        del sys.modules["tests.gone_module"]
    assert data[:1] == b"=", "it was sent as it is"
    error = load_failure(pickle.loads, data)
    assert isinstance(error, ComputationFailed)
    assert (error.kind, str(error.text)) == ("tests.gone_module.Gone", "sick")


class OwnByAttribute(Exception):
    callers_own = True


JobTimeoutException = type("JobTimeoutException", (Exception,), {})
TimeLimit = type("TimeoutError", (AssertionError,), {"__module__": "timeout_decorator.timeout_decorator"})


@pytest.mark.parametrize("own", [OwnByAttribute, JobTimeoutException, TimeLimit, Ignore, Retry])
def test_get_or_set_gives_a_callers_own_time_limit_or_retry_to_no_other_caller(cache, own):
    work = Work("mine")

    def limited():
        raise own(work())

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_set, "k", limited, 60)
        assert work.running.wait(10)
        other = pool.submit(cache.get_or_set, "k", lambda: "v", 60)
        wait_until(lambda: followers() == 1)
        work.end.set()
        assert isinstance(first.exception(20), own)
        assert other.result(20) == "v"
