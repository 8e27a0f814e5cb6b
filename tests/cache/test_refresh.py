"""Old values returned while one caller computes new ones, refused values, jitter, and what comes when the wait is over."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
from django.core.cache import caches
from django.test import override_settings
from django.urls import clear_script_prefix, reverse, set_script_prefix
from django.utils import timezone, translation

from django_redislock import tasks
from django_redislock.cache import cached, refreshable
from django_redislock.cache.lease import request, single_flight
from django_redislock.cache.stats import Counters, counters_for
from django_redislock.core import Lock, held_locks
from django_redislock.exceptions import AcquireTimeout
from tests.support import cache_programs, counting, in_a_fork, monitoring, wait_until
from tests.support.cache_programs import Work, cache_at, commands, followers, order
from tests.support.worker import Worker


@pytest.fixture
def cache(redis_url, backend):
    return cache_at(redis_url, backend)


@pytest.fixture(params=["sync", "async"])
def get(request, cache):
    """``get("k", default, 60, …)`` calls get_or_set or its asynchronous twin."""
    if request.param == "sync":
        return cache.get_or_set

    async def in_a_loop(*args, **kwargs):
        value = await cache.aget_or_set(*args, **kwargs)
        wait_for = [task for task in asyncio.all_tasks() if task.get_name() == "redislock-refresh"]
        await asyncio.gather(*wait_for)
        return value

    return lambda *args, **kwargs: asyncio.run(in_a_loop(*args, **kwargs))


def never():
    raise AssertionError("computed although nobody should")


def make_stale(client, key=":1:k", left=10):
    """Bring the end of a value that lives 60 + 30 seconds near, as if time had passed."""
    assert client.expire(key, left)


def test_a_value_lives_longer_by_stale(get, client):
    assert get("k", lambda: "v", 60, stale=30) == "v"
    assert 80_000 < client.pttl(":1:k") <= 90_000
    assert get("k", never, 60, stale=30) == "v"


def test_a_fresh_value_is_read_in_one_round_trip(cache, client):
    cache.get_or_set("k", lambda: "v", 60, stale=30)
    with monitoring(client) as sent:
        assert cache.get_or_set("k", never, 60, stale=30) == "v"
    assert commands(sent) == ["GET", "PTTL"]


def test_a_value_that_stays_for_ever_is_never_due(get, cache):
    cache.set("k", "v", None)
    assert get("k", never, None, refresh_before=10) == "v"


@pytest.mark.parametrize(
    "options", [{"stale": 30}, {"refresh_before": 30}, {"stale": 20, "refresh_before": 10}], ids=str
)
def test_one_refreshes_and_everybody_else_has_the_old_value_at_once(cache, client, options):
    cache.set("k", "old", 25)
    work = Work("new")
    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(cache.get_or_set, "k", work, 60, **options)
        assert work.running.wait(10)
        others = [pool.submit(cache.get_or_set, "k", never, 60, **options) for _ in range(9)]
        assert [other.result(10) for other in others] == ["old"] * 9
        elsewhere = asyncio.run(cache.aget_or_set("k", never, 60, **options))
        assert elsewhere == "old"
        work.end.set()
        assert first.result(20) == "new"
    assert work.calls == 1
    assert cache.get("k") == "new"
    assert client.pttl(":1:k") > 50_000
    assert not list(held_locks(client))


def test_what_another_process_refreshes_is_not_waited_for(cache, client, get):
    """Another process's lease is a lock of that name."""
    cache.set("k", "old", 25)
    with Lock(client, "cache::1:k"):
        assert get("k", never, 60, stale=30) == "old"
        assert get("k", never, 60, stale=30, refresh="thread") == "old"
        wait_until(lambda: "redislock-refresh" not in {thread.name for thread in threading.enumerate()})
    wait_until(lambda: get("k", lambda: "new", 60, stale=30) == "new")


def test_in_the_background_everybody_has_the_old_value_at_once(get, cache, client):
    cache.set("k", "old", 25)
    calls = []
    options = {"stale": 30, "refresh": "thread"}
    assert get("k", lambda: calls.append(1) or "new", 60, **options) == "old"
    wait_until(lambda: cache.get("k") == "new")
    assert client.pttl(":1:k") > 70_000
    assert get("k", never, 60, **options) == "new"
    assert len(calls) == 1
    wait_until(lambda: not list(held_locks(client)) and not single_flight._flights)


def test_a_background_thread_is_one_for_all(cache):
    cache.set("k", "old", 25)
    work = Work("new")
    assert cache.get_or_set("k", work, 60, stale=30, refresh="thread") == "old"
    assert work.running.wait(10)
    for _ in range(5):
        assert cache.get_or_set("k", never, 60, stale=30, refresh="thread") == "old"
    assert sum(thread.name == "redislock-refresh" for thread in threading.enumerate()) == 1
    work.end.set()
    wait_until(lambda: cache.get("k") == "new")
    wait_until(lambda: not any(thread.name == "redislock-refresh" for thread in threading.enumerate()))


TENANT: ContextVar[str] = ContextVar("tenant", default="public")


def test_a_background_refresh_computes_in_the_context_of_its_caller(get, cache):
    """What is stored for the caller's key is what the caller would have computed."""

    def compute():
        return translation.get_language(), timezone.get_current_timezone_name(), TENANT.get(), reverse("admin:index")

    def ask(key):
        with translation.override("de"), timezone.override("Asia/Tokyo"):
            token = TENANT.set("ours")
            set_script_prefix("/there/")
            try:
                return get(key, compute, 60, stale=30, refresh="thread")
            finally:
                TENANT.reset(token)
                clear_script_prefix()

    expected = ask("inline")
    assert expected == ("de", "Asia/Tokyo", "ours", "/there/admin/")
    cache.set("k", "old", 25)
    assert ask("k") == "old"
    wait_until(lambda: cache.get("k") != "old")
    assert cache.get("k") == expected


def test_a_background_refresh_within_a_computation_is_no_part_of_it(cache, client):
    """It outlives the computation, so nobody has to avoid a circle for its sake."""
    cache.set("inner", "old", 25)
    seen = []
    outer = cache._server_of(":1:inner")

    def compute():
        value = cache.get_or_set(
            "inner", lambda: seen.append([lease.name for lease in request.enclosing_leases(outer)]), 60, stale=30, refresh="thread"
        )
        wait_until(lambda: seen)
        return value

    assert cache.get_or_set("outer", compute) == "old"
    assert seen == [["cache::1:inner"]]


def test_a_background_refresh_has_cache_objects_of_its_own(cache):
    """Django gives each thread its own, because not every backend may be used by two at once."""
    mine, found = caches["default"], []
    cache.set("k", "old", 25)
    assert cache.get_or_set("k", lambda: found.append(caches["default"]), 60, stale=30, refresh="thread") == "old"
    wait_until(lambda: found)
    assert found[0] is not mine


def test_no_thread_for_a_refresh_is_no_reason_to_refuse_the_old_value(cache, client, monkeypatch, caplog):
    cache.set("k", "old", 25)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert cache.get_or_set("k", never, 60, stale=30, refresh="thread") == "old"
    assert "can't start new thread" in caplog.text
    assert not list(held_locks(client))


def test_a_background_failure_is_logged_and_the_old_value_stays(get, cache, client, caplog):
    cache.set("k", "old", 25)

    def fail():
        raise ValueError("mine")

    assert get("k", fail, 60, stale=30, refresh="thread") == "old"
    wait_until(lambda: "The refresh of the value of" in caplog.text)
    wait_until(lambda: not list(held_locks(client)))
    assert cache.get("k") == "old"


REFRESHES = ["inline", "thread", "celery"]


@pytest.mark.parametrize("refresh", REFRESHES)
def test_a_process_that_knows_of_a_refresh_elsewhere_does_not_ask_again(client, settings, server, backend, refresh):
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": server.url}}
    cache = caches["default"]
    cache.set("k", "old", 25)
    started = []

    async def ask_in_tasks():
        for _ in range(30):
            assert await cache.aget_or_set("k", interrupting, 60, stale=30, refresh=refresh) == "old"
            await asyncio.gather(*[task for task in asyncio.all_tasks() if task.get_name() == "redislock-refresh"])

    with Lock(client, "cache::1:k"), pytest.MonkeyPatch.context() as patch:
        start = threading.Thread.start
        patch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name) or start(thread))
        with monitoring(client) as sent:
            for _ in range(30):
                assert cache.get_or_set("k", interrupting, 60, stale=30, refresh=refresh) == "old"
                wait_until(lambda: "redislock-refresh" not in {thread.name for thread in threading.enumerate()})
            asyncio.run(ask_in_tasks())
    # Once a second, however slow the machine is; a new connection looks for the script.
    assert commands(sent).count("EVALSHA") < 10
    assert started.count("redislock-refresh") < 10


@pytest.mark.parametrize("refresh", ["inline", "thread"])
def test_a_sick_origin_is_tried_with_a_pause_that_grows_over_all_processes(redis_url, backend, client, refresh, caplog):
    processes = [cache_at(f"{redis_url}?socket_timeout={5 + number}", backend) for number in range(4)]
    processes[0].set("k", "old", 25)
    calls, pauses = [], []

    def fail():
        calls.append(1)
        raise ValueError("sick")

    def ask(each):
        return each.get_or_set("k", fail, 60, stale=30, refresh=refresh, on_error="stale")

    for failures in (1, 2, 3):
        for each in processes * 3:
            assert ask(each) == "old"
            wait_until(lambda: not single_flight._flights and not list(held_locks(client)))
        assert len(calls) == failures
        (paused,) = client.keys("*failed:*")
        count, again = map(int, client.get(paused).split())
        assert count == failures
        pauses.append(again - int(time.time() * 1000))
        assert 0 < client.pttl(paused) <= 2**failures * 1000 + 60_000
        client.set(paused, f"{count} 1", ex=60)  # the pause is over
        single_flight._paused.clear()
    assert pauses[0] < pauses[1] < pauses[2] <= 4000
    assert caplog.text.count("ValueError: sick") == 3
    assert processes[0].get_or_set("k", lambda: "new", 60, stale=30) == "new"
    assert not client.exists(paused)


@pytest.mark.parametrize("by", ["argument", "setting", "alias"])
def test_on_error_stale_returns_the_old_value_while_there_is_one(redis_url, backend, client, caplog, settings, by):
    alias = {"OPTIONS": {"LOCK": {"ON_ERROR": "stale"}}} if by == "alias" else {}
    if by == "setting":
        settings.DJANGO_REDISLOCK = {"CACHE": {"ON_ERROR": "stale"}}
    cache = cache_at(redis_url, backend, **alias)
    options = {"stale": 30} | ({"on_error": "stale"} if by == "argument" else {})
    before = cache.stats()

    def fail():
        raise ValueError("sick")

    async def afail():
        raise ValueError("sick")

    for key, ask in (
        ("k", lambda: cache.get_or_set("k", fail, 60, **options)),
        ("a", lambda: asyncio.run(cache.aget_or_set("a", afail, 60, **options))),
    ):
        cache.set(key, None, 25)
        caplog.clear()
        assert ask() is None, "a value like any other"
        assert "the stale value is returned" in caplog.text
        assert "ValueError: sick" in caplog.text
        cache.delete(key)
        with pytest.raises(ValueError, match="sick"):
            ask()
    after = cache.stats()
    assert after.stale_served - before.stale_served == 2
    assert after.errors - before.errors == 4
    assert not list(held_locks(client))


def test_on_error_stale_hides_no_interruption(cache, client):
    cache.set("k", "old", 25)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get_or_set("k", interrupted, 60, stale=30, on_error="stale")
    assert not client.keys("*failed:*")
    with pytest.raises(ValueError, match="on_error"):
        cache.get_or_set("k", never, on_error="ignore")


def test_an_inline_failure_is_the_callers_own(get, cache, client):
    cache.set("k", "old", 25)

    def fail():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        get("k", fail, 60, stale=30)
    assert cache.get("k") == "old"
    assert not list(held_locks(client))


def test_who_prefers_a_new_value_waits_for_it_and_then_takes_the_old_one(cache, client):
    cache.set("k", "old", 25)
    work = Work("new")
    options = {"stale": 30, "on_wait_timeout": "stale"}
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(cache.get_or_set, "k", work, 60, **options)
        assert work.running.wait(10)
        assert cache.get_or_set("k", never, 60, wait=0.1, **options) == "old"
        patient = pool.submit(cache.get_or_set, "k", never, 60, wait=20, **options)
        wait_until(lambda: sum(info.waiting for info in held_locks(client)) == 1)
        work.end.set()
        assert first.result(20) == "new"
        assert patient.result(20) == "new"


def test_without_an_old_value_stale_is_to_compute(cache, client, get):
    assert Lock(client, "cache::1:k").acquire()
    assert get("k", lambda: "own", 60, wait=0.1, on_wait_timeout="stale") == "own"
    assert cache.get("k") == "own"


# When the wait is over


@pytest.mark.parametrize(
    ("answer", "expected"),
    [({"a": 1}, {"a": 1}), (0, 0), (False, False), (lambda: "text", "text"), (lambda: None, None)],
)
def test_any_value_may_be_the_answer_when_the_wait_is_over(client, get, answer, expected):
    with Lock(client, "cache::1:k"):
        assert get("k", never, 60, wait=0.1, on_wait_timeout=answer) == expected


def test_raise(client, get):
    with Lock(client, "cache::1:k"), pytest.raises(AcquireTimeout):
        get("k", never, 60, wait=0, on_wait_timeout="raise")


# Values that are not to be stored


@pytest.mark.parametrize("value", [None, "no"])
def test_a_refused_value_is_returned_and_not_stored(get, cache, client, value):
    assert get("k", lambda: value, 60, should_cache=lambda found: found == "yes") == value
    assert not cache.has_key("k")
    assert not list(held_locks(client))
    assert get("k", lambda: "yes", 60, should_cache=lambda found: found == "yes") == "yes"
    assert cache.get("k") == "yes"


def test_a_refused_value_goes_to_all_who_wait_for_it(redis_url, cache, client, run_python):
    """In this process and in others: they do not compute one after another what nobody stores."""
    other = run_python(cache_programs.ask, redis_url, "RedisCache", "k", "own", {}, {})
    other.wait_for(event="ready")
    work = Work("refused")
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(cache.get_or_set, "k", work, 60, should_cache=lambda value: False) for _ in range(6)]
        assert work.running.wait(10)
        other.send("ask")
        wait_until(lambda: followers() == 5 and sum(info.waiting for info in held_locks(client)) == 1)
        work.end.set()
        assert [future.result(20) for future in futures] == ["refused"] * 6
    assert other.wait_for(event="got")["value"] == "refused"
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
        wait_until(lambda: sum(info.waiting for info in held_locks(client)) == 3)
        work.end.set()
        assert [future.result(20) for future in futures] == [work.value] * 4
    assert work.calls == 1
    assert not client.exists(":1:k")
    assert all(0 < client.pttl(key) <= 10_000 for key in client.keys("*:value"))
    client.flushdb()
    assert caches[0].get_or_set("k", work, 60, should_cache=lambda value: False) == work.value
    assert not client.keys("*:value"), "nobody waits"


def test_a_failing_should_cache_is_the_callers_error(get, client):
    with pytest.raises(ZeroDivisionError):
        get("k", lambda: "v", 60, should_cache=lambda value: 1 / 0)
    assert not list(held_locks(client))


# Lives


def test_a_value_that_would_be_due_at_once_is_refused(get, settings, redis_url, backend):
    """It would be computed at each call."""
    for timeout in (10, 20, 20.0):
        with pytest.raises(ValueError, match="refresh_before must be less than the timeout"):
            get("k", never, timeout, refresh_before=20)
    with pytest.raises(ValueError, match="refresh_before"):
        cache_at(redis_url, backend, TIMEOUT=20).get_or_set("k", never, refresh_before=20)
    assert get("k", lambda: "v", 21, refresh_before=20) == "v"
    assert get("f", lambda: "v", None, refresh_before=20) == "v"


def test_jitter_leaves_the_time_in_which_a_value_is_due_alone(redis_url, backend, client):
    cache = cache_at(redis_url, backend, OPTIONS={"LOCK": {"JITTER": 1.0}})
    for number in range(20):
        cache.get_or_set(f"k{number}", lambda: 1, 100, refresh_before=50)
        assert 49_000 < client.pttl(f":1:k{number}") <= 100_000


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
    assert not list(held_locks(client))


def test_many_values_have_each_the_timeout_of_its_own(cache, client):
    for options in ({}, {"lock": False}):
        cache.clear()
        values = cache.get_or_set_many(
            "ab", lambda keys: dict.fromkeys(keys, 1) | {"a": 2}, lambda value: 10 * value, **options
        )
        assert values == {"a": 2, "b": 1}
        assert client.pttl(":1:b") <= 10_000 < client.pttl(":1:a") <= 20_000


@pytest.mark.parametrize("alias", ["redis", "local"])
def test_a_cached_function_may_tell_the_timeout_of_each_value(settings, server, backend, alias):
    settings.CACHES = {
        "redis": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": server.url},
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


def test_a_failing_timeout_is_the_callers_error(get, client):
    with pytest.raises(ZeroDivisionError):
        get("k", lambda: "v", lambda value: 1 / 0)
    assert not list(held_locks(client))


# Counters


def test_counters(redis_url):
    alias = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": redis_url, "KEY_PREFIX": "counted"}
    with override_settings(CACHES={"default": alias, "counted": alias | {"VERSION": 2}}):
        cache = caches["counted"]
        before, elsewhere = cache.stats(), caches["default"].stats()
        cache.get_or_set("k", lambda: 1)
        cache.get_or_set("k", never)
        with pytest.raises(ZeroDivisionError):
            cache.get_or_set("fails", lambda: 1 / 0)
        cache.get_or_set("deleted", lambda: cache.delete("deleted"))
        cache.set("old", "old", 25)
        cache.get_or_set("old", never, refresh="thread", stale=30, wait=0)
        after = cache.stats()
        assert caches["default"].stats() == elsewhere
    change = {name: getattr(after, name) - getattr(before, name) for name in after.__slots__}
    assert change["hits"] == 1
    assert change["computed"] == 2
    assert change["errors"] >= 1
    assert change["fenced"] == 1
    assert change["stale_served"] == 1
    assert change["waited"] == change["taken_over"] == change["lease_lost"] == 0


def test_counters_of_those_who_wait_and_take_over(cache, client):
    before = cache.stats()
    work = Work("new")
    with ThreadPoolExecutor(3) as pool:
        lock = Lock(client, "cache::1:k")
        lock.acquire()
        first = pool.submit(cache.get_or_set, "k", work, 60)
        wait_until(lambda: sum(info.waiting for info in held_locks(client)) == 1)
        second = pool.submit(cache.get_or_set, "k", never, 60)
        wait_until(lambda: followers() == 1)
        lock.release()
        assert work.running.wait(10)
        work.end.set()
        assert first.result(20) == second.result(20) == "new"
    after = cache.stats()
    assert after.waited - before.waited == 2
    assert after.taken_over - before.taken_over == 1
    assert after.seconds_waited > before.seconds_waited
    with override_settings(DJANGO_REDISLOCK={"CACHE": {"AUTO_RENEWAL": False}}):
        cache.get_or_set("l", lambda: wait_until(lambda: not list(held_locks(client))), expire=0.1)
    assert cache.stats().lease_lost - after.lease_lost == 1


def test_no_count_is_lost_that_is_made_in_the_middle_of_another_one():
    """By another thread, as happens without the GIL, or by a signal handler or a destructor in the same one."""
    counters = Counters()
    other = threading.Thread(target=counters.count, args=("hits",))

    class Seen(int):
        """What is added when others count before the sum is written."""

        def __radd__(self, count):
            other.start()
            other.join()
            counters.count("hits")
            counters.count("computed")
            return count + int(self)

    counters.count("hits", Seen(1))
    counters.count("seconds_waited", 0.5)
    counters = counters.read()
    assert (counters.hits, counters.computed, counters.seconds_waited) == (3, 1, 0.5)


def test_counts_outlive_their_thread_and_a_forked_child_begins_anew():
    counters = counters_for("an alias of this test")
    for _ in range(3):
        thread = threading.Thread(target=counters.count, args=("computed",))
        thread.start()
        thread.join()

    def child():
        counters.count("computed")
        assert counters_for("an alias of this test").read().computed == 1

    in_a_fork(child)
    assert counters.read().computed == 3


# By Celery


def test_only_a_registered_function_can_be_refreshed_by_celery(get):
    for default in (lambda: 1, functools.partial(lambda: 1), Work(), never, os.getpid):
        with pytest.raises(TypeError, match="default"):
            get("k", default, 60, stale=30, refresh="celery")
    with pytest.raises(TypeError, match="function of a module"):
        refreshable(lambda: 1)
    with pytest.raises(TypeError, match="function of a module"):
        cached(60, key="k", stale=30, refresh="celery")(lambda: 1)


@pytest.mark.parametrize("argument", ["default", "should_cache", "timeout_for"])
def test_a_worker_obeys_registered_functions_only(client, settings, server, backend, argument, tmp_path):
    """Whoever can write to the broker could have anything called."""
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": server.url}}
    cache = caches["default"]
    cache.set("k", "old", 25)
    trace = tmp_path / "trace"
    with pytest.raises(LookupError, match=r"os\.system is not registered"):
        tasks.refresh("default", order(client, args=[f"touch {trace}"], kwargs={}, **{argument: "os.system"}))
    assert not trace.exists()
    assert cache.get("k") == "old"
    tasks.refresh("default", order(client))
    assert cache.get("k")["greeting"] == "worker 2026"
    assert not list(held_locks(client))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_without_a_broker_everybody_has_the_old_value(client, settings, server, backend, caplog, asynchronous):
    from tests.support.celery_site.app import app
    from tests.support.celery_site.harness import connected

    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": server.url}}
    cache = caches["default"]
    cache.set("k", "old", 25)
    default = functools.partial(cache_programs.celebrate, "worker", year=2026)
    app.set_default()
    with connected(server, "redis://127.0.0.1:1/0"):
        if asynchronous:
            assert asyncio.run(cache.aget_or_set("k", default, 60, stale=30, refresh="celery")) == "old"
        else:
            assert cache.get_or_set("k", default, 60, stale=30, refresh="celery") == "old"
    assert "The message to refresh the value of ':1:k' could not be sent to Celery" in caplog.text
    assert not list(held_locks(client)), "the next one may try"


@refreshable
def interrupting():
    raise AssertionError("not called here")


def test_a_soft_time_limit_while_a_worker_is_told_is_not_swallowed(client, settings, server, monkeypatch):
    class SoftTimeLimitExceeded(Exception):
        pass

    def publish(*args, **kwargs):
        raise SoftTimeLimitExceeded

    cache = caches["default"]
    cache.set("k", "old", 25)
    monkeypatch.setattr(tasks.refresh, "apply_async", publish)
    with pytest.raises(SoftTimeLimitExceeded):
        cache.get_or_set("k", interrupting, 60, stale=30, refresh="celery")
    assert not list(held_locks(client))


@pytest.mark.processes
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_celery_worker_refreshes(server, client, tmp_path, asynchronous):
    from tests.support.celery_site.app import app
    from tests.support.celery_site.harness import connected

    cache = caches["default"]
    cache.set("k", "old", 120)  # longer than a worker may take to start
    default = functools.partial(cache_programs.celebrate, "worker", year=2026)
    if asynchronous:
        default = functools.partial(cache_programs.acelebrate, "worker", year=2026)
    options = {"stale": 300, "refresh": "celery", "jitter": 0}

    def ask():
        if asynchronous:
            return asyncio.run(cache.aget_or_set("k", default, 60, **options))
        return cache.get_or_set("k", default, 60, **options)

    app.set_default()
    with connected(server):
        with monitoring(client) as sent:
            assert [ask() for _ in range(3)] == ["old"] * 3
        assert sum(line.startswith("LPUSH") for line in sent) == 1, "one order, however many find it old"
        with Worker("celery", "solo", tmp_path / "worker.log", "-I", "tests.support.cache_programs") as worker:
            worker.wait_ready()
            wait_until(lambda: cache.get("k") != "old")
    made = cache.get("k")
    assert made["greeting"] == "worker 2026"
    assert made["pid"] != threading.get_native_id()
    assert client.pttl(":1:k") > 240_000
    assert not list(held_locks(client))


def test_a_stale_hit_of_what_another_process_computes_makes_the_server_copy_and_hash_nothing(cache, client, get):
    """Only the caller's own read takes the value; what is asked then looks at the lease alone."""
    value = "x" * 1000
    get("k", lambda: value, 1, stale=600)
    client.pexpire(":1:k", 500_000)
    with Lock(client, "cache::1:k"), counting(client) as ran:
        assert get("k", lambda: 1 / 0, 1, stale=600) == value
    reads = {name: ran[name] for name in ("evalsha", "get", "strlen")}
    assert reads == {"evalsha": 1, "get": 2, "strlen": 0}, "the caller reads the value, and the script the lease"
