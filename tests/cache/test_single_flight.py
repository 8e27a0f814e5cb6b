"""Threads of one process that want the same value: one computes it, the others wait for it without Redis."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from asgiref.sync import SyncToAsync

from django_redislock.cache.lease import many, single_flight, store
from django_redislock.cache.lease.request import enclosing_leases
from django_redislock.exceptions import AcquireTimeout
from tests.support import BUSY, interruptions, lived, monitoring, wait_until
from tests.support.cache_programs import Work, cache_at, commands, followers, held, lease_elsewhere, waiters


@pytest.fixture
def cache(redis_url):
    return cache_at(redis_url)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(40) as pool:
        yield pool


class Computation(Work):
    """Work of which each call returns or raises what comes next."""

    def __init__(self, *results):
        super().__init__(list(results))

    def __call__(self):
        result = super().__call__().pop(0)
        if isinstance(result, BaseException):
            raise result
        return result


def outcome(future):
    error = future.exception(timeout=20)
    return future.result() if error is None else error


def test_25_threads_compute_once_and_send_nothing_while_they_wait(redis_url, backend, client, pool):
    caches = [cache_at(redis_url, backend) for _ in range(25)]
    for cache in caches:
        cache.get_or_set("{:1:k}warm", lambda: 1)  # at the node of the key
    work = Computation([1, 2])
    with monitoring(client) as sent:
        futures = [pool.submit(cache.get_or_set, "k", work, 60) for cache in caches]
        wait_until(lambda: followers() == 24)
        work.end.set()
        values = [outcome(future) for future in futures]
    assert values == [[1, 2]] * 25
    assert len({id(value) for value in values}) == 25, "each has a copy of its own"
    assert work.calls == 1
    assert sorted(commands(sent)) == ["EVALSHA"] * 2 + ["GET"] * 25
    assert not single_flight._flights


class NoUser(OSError):
    def __init__(self, user, url):
        super().__init__(f"no user {user}")
        self.url = url


class Moved(FileNotFoundError):
    def __init__(self, path):
        super().__init__(2, "moved", path)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no value"),
        FileNotFoundError(2, "none", "a.txt"),
        NoUser(1, url="/a"),
        Moved("b.txt"),
        StopIteration(3),
    ],
)
def test_who_waited_gets_a_copy_of_the_error_and_nobody_else_does(cache, client, pool, error):
    """With one error for all, its traceback was that of another request."""
    error.__cause__ = KeyError("cause")
    error.add_note("a note")
    work = Computation(error, "second")
    futures = [pool.submit(cache.get_or_set, "k", work, 60) for _ in range(10)]
    wait_until(lambda: followers() == 9)
    work.end.set()
    errors = [outcome(future) for future in futures]
    assert error in errors, "the caller that computed gets its own"
    assert len(set(map(id, errors))) == 10

    def look(each):
        more = [getattr(each, name, None) for name in ("filename", "errno", "value")]
        return type(each), each.args, str(each), vars(each), each.__cause__, more

    assert list(map(look, errors)) == [look(error)] * 10
    assert work.calls == 1
    assert not held(client)
    assert cache.get_or_set("k", work, 60) == "second"
    for each in errors:
        frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(each.__traceback__)]
        assert frames.count("get_or_set") == 1, "the traceback does not grow with every thread"
        assert frames[-1] == "__call__", "it leads to where it was raised"
    errors[0].add_note("mine")
    assert all(each.__notes__ == ["a note"] for each in errors[1:])


class SoftTimeLimitExceeded(Exception):
    """As billiard's, which Celery raises in a task that takes too long."""


@pytest.mark.parametrize(
    "interrupt",
    [KeyboardInterrupt(), SystemExit(1), GeneratorExit(), asyncio.CancelledError(), SoftTimeLimitExceeded()],
    ids=lambda error: type(error).__name__,
)
def test_an_interruption_of_one_is_nobody_elses(cache, pool, interrupt):
    work, results = Computation(interrupt, "v"), []

    def be_interrupted():
        with pytest.raises(type(interrupt)):
            cache.get_or_set("k", work, 60)
        results.append("interrupted")

    first = threading.Thread(target=be_interrupted)
    first.start()
    assert work.running.wait(10)
    others = [pool.submit(cache.get_or_set, "k", work, 60) for _ in range(5)]
    wait_until(lambda: followers() == 5)
    work.end.set()
    first.join(20)
    assert results == ["interrupted"]
    assert [outcome(other) for other in others] == ["v"] * 5
    assert work.calls == 2


def test_a_timeout_error_of_a_signal_handler_ends_the_wait_for_another_thread(cache, pool):
    """It passed for the end of the wait, and the caller computed without its limit."""
    work = Computation("v")
    first = pool.submit(cache.get_or_set, "k", work, 60)
    assert work.running.wait(10)
    with interruptions(TimeoutError) as interrupted_after, pytest.raises(TimeoutError):
        interrupted_after(0.2)
        cache.get_or_set("k", lambda: "mine", 60)
    work.end.set()
    assert first.result(20) == "v"


def test_an_error_when_the_watchdog_is_told_leaves_no_lease_that_is_renewed(cache, client, monkeypatch):
    """Each later call of that thread passed for a nested one."""
    add = store.watchdog.add

    def refused(lease, renews):
        add(lease, renews)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(store.watchdog, "add", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cache.get_or_set("k", lambda: "v", 60)
    assert enclosing_leases() == []
    wait_until(lambda: not held(client))


def test_what_a_background_thread_of_a_computation_wants_later_is_not_nested(cache):
    """A context outlives the computation it was copied in."""
    import contextvars

    contexts = []

    def compute():
        contexts.append(contextvars.copy_context())
        return 1

    cache.get_or_set("k", compute)
    assert contexts[0].run(enclosing_leases) == []


OTHERS = [
    {"version": 2},
    {"params": {"KEY_PREFIX": "other"}},
    {"params": {"VERSION": 7}},
    pytest.param({"db": 9}, marks=pytest.mark.one_server("a Cluster has one database")),
    {"key": "k2"},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_versions_prefixes_and_databases_do_not_wait(redis_url, server, backend, client, pool, other):
    cache = cache_at(redis_url, backend)
    work = Computation("v")
    first = pool.submit(cache.get_or_set, "k", work, 60)
    assert work.running.wait(10)
    try:
        url = server.url_of_db(other["db"]) if "db" in other else redis_url
        elsewhere = cache_at(url, backend, **other.get("params", {}))
        elsewhere.delete(other.get("key", "k"), version=other.get("version"))
        with monitoring(client) as sent:
            value = elsewhere.get_or_set(other.get("key", "k"), lambda: "other", 60, version=other.get("version"))
        assert value == "other"
        assert not [line for line in sent if "SUBSCRIBE" in line]
        assert not work.end.is_set()
        elsewhere.delete(other.get("key", "k"), version=other.get("version"))
    finally:
        work.end.set()
    assert outcome(first) == "v"


@pytest.mark.parametrize("error", [ValueError, SoftTimeLimitExceeded])
def test_nothing_is_left_of_a_nested_computation_that_fails(redis_url, client, pool, error):
    here, there = cache_at(redis_url), cache_at(f"{redis_url}?socket_timeout=4.9")  # as if in two processes
    inner = Computation("inner")

    def compute():
        there.get_or_set("inner", inner, 60)
        raise error

    first = pool.submit(here.get_or_set, "inner", inner, 60)
    assert inner.running.wait(10)
    outer = pool.submit(there.get_or_set, "outer", compute, 60)
    wait_until(lambda: waiters(client, "inner"))
    inner.end.set()
    assert outcome(first) == "inner"
    assert isinstance(outcome(outer), error)
    assert not client.exists("{redislock}:waits")
    assert not client.keys("*:lock:*")


CHANGES = {
    "delete": lambda cache: cache.delete("k"),
    "delete_many": lambda cache: cache.delete_many(["k"]),
    "a set that deletes": lambda cache: cache.set("k", "gone", 0),
    "a touch that deletes": lambda cache: cache.touch("k", 0),
    "incr_version": lambda cache: cache.incr_version("k"),
    "clear": lambda cache: cache.clear(),
    "adelete": lambda cache: asyncio.run(cache.adelete("k")),
    "aclear": lambda cache: asyncio.run(cache.aclear()),
}


@pytest.mark.parametrize("asks", ["get_or_set", "aget_or_set", "get_or_set_many"])
@pytest.mark.parametrize("change", CHANGES)
def test_who_comes_after_its_own_delete_does_not_follow_a_leader_from_before(
    redis_url, backend, pool, monkeypatch, change, asks
):
    """The value of that leader is stored already, but its flight still stands: its followers would get that value."""
    cache = cache_at(redis_url, backend)
    decided, goes_on = threading.Event(), threading.Event()

    def wait_once(outcome):
        if not decided.is_set():
            decided.set()
            goes_on.wait(20)
        return real(outcome)

    def ask():
        if asks == "get_or_set":
            return cache.get_or_set("k", lambda: "new", 60)
        if asks == "aget_or_set":
            return asyncio.run(cache.aget_or_set("k", lambda: "new", 60))
        return cache.get_or_set_many(["k"], lambda keys: dict.fromkeys(keys, "new"), 60)["k"]

    real = single_flight.for_followers
    monkeypatch.setattr(single_flight, "for_followers", wait_once)
    first = pool.submit(cache.get_or_set, "k", lambda: "old", 60)
    assert decided.wait(10)
    try:
        CHANGES[change](cache)
        after = pool.submit(ask)
        wait_until(lambda: after.done() or followers())
    finally:
        goes_on.set()
    assert (outcome(first), outcome(after)) == ("old", "new")
    assert cache.get("k") == "new"
    assert not single_flight._flights


# When the wait is over


@pytest.mark.slow
def test_who_has_waited_long_enough_computes_for_itself_once_a_process(cache, pool):
    slow, fast = Computation("slow"), Computation("fast")
    first = pool.submit(cache.get_or_set, "k", slow, 60)
    assert slow.running.wait(10)
    others = [pool.submit(cache.get_or_set, "k", fast, 60, wait=1) for _ in range(5)]
    assert fast.running.wait(10)
    wait_until(lambda: followers() == 4)
    fast.end.set()
    assert [outcome(other) for other in others] == ["fast"] * 5
    assert fast.calls == 1
    assert cache.get("k") == "fast", "those who come next find it"
    slow.end.set()
    assert outcome(first) == "slow", "its own, and no exception"
    assert cache.get("k") == "fast"


def test_one_computes_for_all_whose_wait_is_over_however_long_it_takes(cache, client, pool):
    work = Computation("own")
    assert lease_elsewhere(client, "k").acquire()  # somebody computes, and is overtaken
    futures = [pool.submit(cache.get_or_set, "k", work, 60, wait=0.1) for _ in range(5)]
    assert work.running.wait(10)
    lived(0.6)
    assert work.calls == 1
    assert followers() == 4
    work.end.set()
    assert [outcome(future) for future in futures] == ["own"] * 5
    assert work.calls == 1


def test_the_wait_of_an_alias_is_used_and_who_is_not_to_compute_for_itself_is_told(redis_url, pool):
    cache = cache_at(redis_url, OPTIONS={"LOCK": {"WAIT": 0.1, "ON_WAIT_TIMEOUT": "raise"}})
    slow = Computation("slow")
    first = pool.submit(cache.get_or_set, "k", slow, 60)
    assert slow.running.wait(10)
    for wait, options in ((0.1, {}), (0, {"wait": 0}), (0.2, {"wait": 0.2})):
        started = time.monotonic()
        with pytest.raises(AcquireTimeout, match=r"cache::1:k") as caught:
            cache.get_or_set("k", slow, 60, **options)
        assert wait <= time.monotonic() - started < wait + BUSY
        assert caught.value.timeout == wait
    slow.end.set()
    assert outcome(first) == "slow"
    assert slow.calls == 1


@pytest.mark.slow
def test_after_max_hold_another_caller_of_the_process_computes(redis_url, pool):
    """Those of other processes did; without a limit of the wait, those of this process waited for ever."""
    cache = cache_at(redis_url, OPTIONS={"LOCK": {"WAIT": None, "MAX_HOLD": 0.5, "EXPIRE": 0.5}})
    hangs = Work("late")
    first = pool.submit(cache.get_or_set, "k", hangs, 60)
    assert hangs.running.wait(10)
    others = [pool.submit(cache.get_or_set, "k", lambda: "v", 60) for _ in range(3)]
    assert [other.result(20) for other in others] == ["v"] * 3
    hangs.end.set()
    assert first.result(20) == "late"


def test_a_leader_that_never_lands_is_waited_for_once_only(cache):
    """As after a signal between two lines; the next one finds the way free."""
    place = (cache._server_of(":1:k"), ":1:k")
    with ExitStack() as stack:
        single_flight._flights[place] = flight = single_flight.Flight()
        flight.thread = 0  # that of another one
        stack.callback(single_flight._flights.pop, place, None)
        assert cache.get_or_set("k", lambda: "v", 60, wait=0.1) == "v"
        assert place not in single_flight._flights


def test_a_miss_works_with_an_asgiref_without_its_private_name(redis_url, backend, monkeypatch):
    monkeypatch.delattr(SyncToAsync, "threadlocal")
    cache = cache_at(redis_url, backend)
    work = Work()
    with ThreadPoolExecutor(5) as pool:
        futures = [pool.submit(cache.get_or_set, "k", work, 60) for _ in range(5)]
        wait_until(lambda: followers() == 4)
        work.end.set()
        assert [future.result(20) for future in futures] == ["v"] * 5
    assert work.calls == 1


@pytest.mark.parametrize("module", [single_flight, many], ids=["one value", "many values"])
def test_a_flight_ends_that_was_interrupted_as_it_ended_while_its_traceback_is_kept(cache, monkeypatch, module):
    """Celery logs the error of a refresh; while the log kept it, the process sent no other refresh of that value."""
    interrupted, original = [], single_flight.close

    def close(*args, **kwargs):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        original(*args, **kwargs)

    monkeypatch.setattr(module, "close", close)
    with pytest.raises(KeyboardInterrupt) as kept:
        if module is many:
            cache.get_or_set_many(["k"], lambda keys: dict.fromkeys(keys, 1), 60)
        else:
            cache.get_or_set("k", lambda: 1, 60)
    assert kept.tb
    assert not single_flight._flights
