"""Old values returned while one caller computes a new one: inline, in a thread, and what follows an error."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
from asgiref.sync import async_to_sync
from django.core.cache import caches
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.urls import clear_script_prefix, reverse, set_script_prefix
from django.utils import timezone, translation

from django_redislock.cache.lease import request, single_flight
from tests.support import counting, monitoring, wait_until
from tests.support.bank.models import Account
from tests.support.cache_programs import Work, cache_at, commands, held, lease_elsewhere, never, refreshable_never


def test_a_value_lives_longer_by_stale_and_a_fresh_one_is_read_in_one_round_trip(get, cache, client):
    assert get("k", lambda: "v", 60, stale=30) == "v"
    assert 80_000 < client.pttl(":1:k") <= 90_000
    assert get("k", never, 60, stale=30) == "v"
    with monitoring(client) as sent:
        assert cache.get_or_set("k", never, 60, stale=30) == "v"
    assert commands(sent) == ["GET", "PTTL"]


@pytest.mark.parametrize("stale", [0, 30])
def test_a_value_whose_own_timeout_is_shorter_than_refresh_before_is_not_due_at_once(get, client, stale):
    """It was computed at each call."""
    calls = []

    def ask():
        return get("k", lambda: calls.append(1), lambda value: 5, stale=stale, refresh_before=10)

    assert [ask() for _ in range(3)] == [None] * 3
    assert len(calls) == 1
    if stale:
        client.pexpire(":1:k", 25_000)
        ask()
        assert len(calls) == 2


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
    assert not held(client)


@pytest.mark.slow
def test_who_computes_another_value_in_the_loop_of_the_task_that_refreshes_gets_the_old_one(cache):
    """It cannot wait for the task, so it computed for itself."""

    async def main():
        cache.set("k", "old", 25)
        running, end = asyncio.Event(), asyncio.Event()

        async def refresh():
            running.set()
            await end.wait()
            return "new"

        async def other():
            return cache.get_or_set("k", never, 60, stale=30)

        task = asyncio.create_task(cache.aget_or_set("k", refresh, 60, stale=30))
        await running.wait()
        assert await cache.aget_or_set("other", other, 60) == "old"
        end.set()
        assert await task == "new"

    asyncio.run(main())


REFRESHES = ["inline", "thread", "celery"]


@pytest.mark.parametrize("refresh", REFRESHES)
def test_a_process_that_knows_of_a_refresh_elsewhere_does_not_ask_again(client, settings, redis_url, backend, refresh):
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}}
    cache = caches["default"]
    cache.set("k", "old", 25)
    started = []

    async def ask_in_tasks():
        for _ in range(30):
            assert await cache.aget_or_set("k", refreshable_never, 60, stale=30, refresh=refresh) == "old"
            await asyncio.gather(*[task for task in asyncio.all_tasks() if task.get_name() == "redislock-refresh"])

    with lease_elsewhere(client, "k"), pytest.MonkeyPatch.context() as patch:
        start = threading.Thread.start
        patch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name) or start(thread))
        with monitoring(client) as sent:
            for _ in range(30):
                assert cache.get_or_set("k", refreshable_never, 60, stale=30, refresh=refresh) == "old"
                wait_until(lambda: "redislock-refresh" not in {thread.name for thread in threading.enumerate()})
            asyncio.run(ask_in_tasks())
    # Once a second, however slow the machine is; a new connection looks for the script.
    assert commands(sent).count("EVALSHA") < 10
    assert started.count("redislock-refresh") < 10


def test_a_stale_hit_of_what_another_process_computes_makes_the_server_copy_and_hash_nothing(cache, client, get):
    """Only the caller's own read takes the value; what is asked then looks at the lease alone."""
    value = "x" * 1000
    get("k", lambda: value, 1, stale=600)
    client.pexpire(":1:k", 500_000)
    with lease_elsewhere(client, "k"), counting(client) as ran:
        assert get("k", lambda: 1 / 0, 1, stale=600) == value
    reads = {name: ran[name] for name in ("evalsha", "get", "strlen")}
    assert reads == {"evalsha": 1, "get": 2, "strlen": 0}, "the caller reads the value, and the script the lease"


# By a thread


def test_in_the_background_everybody_has_the_old_value_at_once(get, cache, client):
    cache.set("k", "old", 25)
    calls = []
    options = {"stale": 30, "refresh": "thread"}
    assert get("k", lambda: calls.append(1) or "new", 60, **options) == "old"
    wait_until(lambda: cache.get("k") == "new")
    assert client.pttl(":1:k") > 70_000
    assert get("k", never, 60, **options) == "new"
    assert len(calls) == 1
    wait_until(lambda: not held(client) and not single_flight._flights)


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

    def compute():
        value = cache.get_or_set(
            "inner",
            lambda: seen.append([lease.name for lease in request.enclosing_leases()]),
            60,
            stale=30,
            refresh="thread",
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
    assert not held(client)


@pytest.mark.parametrize("refresh", ["inline", "thread"])
def test_a_failure_is_the_callers_own_or_logged_and_the_old_value_stays(get, cache, client, caplog, refresh):
    cache.set("k", "old", 25)

    def fail():
        raise ValueError("mine")

    if refresh == "inline":
        with pytest.raises(ValueError, match="mine"):
            get("k", fail, 60, stale=30)
    else:
        assert get("k", fail, 60, stale=30, refresh="thread") == "old"
        wait_until(lambda: "The refresh of the value of" in caplog.text)
    wait_until(lambda: not held(client))
    assert cache.get("k") == "old"


# Errors


def test_a_pause_costs_the_server_no_look_at_the_value(redis_url, backend, client):
    """Each process asks once a second. The server copied and hashed 20 MB each time."""
    cache = cache_at(redis_url, backend)
    cache.set("k", "old", 25)

    def ask():
        single_flight._paused.clear()  # as another process, or a second later
        assert cache.get_or_set("k", lambda: 1 / 0, 60, stale=30, on_error="stale") == "old"

    ask()  # fails, so the next ones are refused
    with counting(client) as refused:
        ask()
    # The caller's own, the lock and the failures.
    assert refused["strlen"] == 0
    assert refused["get"] <= 3


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
            wait_until(lambda: not single_flight._flights and not held(client))
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


def test_a_value_that_is_computed_after_a_delete_ends_the_pause_of_the_refreshes_that_failed(cache, client):
    def fail():
        raise ValueError("sick")

    cache.set("k", "old", 25)
    assert cache.get_or_set("k", fail, 60, stale=30, on_error="stale") == "old"
    assert client.keys("*failed:*")
    cache.delete("k")
    assert cache.get_or_set("k", lambda: "new", 60, stale=30) == "new"
    assert not client.keys("*failed:*")


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
    assert not held(client)


def test_on_error_stale_hides_no_interruption(cache, client):
    cache.set("k", "old", 25)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get_or_set("k", interrupted, 60, stale=30, on_error="stale")
    assert not client.keys("*failed:*")
    with pytest.raises(ValueError, match="on_error"):
        cache.get_or_set("k", never, on_error="ignore")


# ``on_error="stale"`` within a transaction


OPTIONS = {"stale": 30, "on_error": "stale"}


@pytest.fixture
def banks(redis_url, database):
    """A cache with an old value, for computations that use the database of the bank."""
    cache = cache_at(redis_url)
    cache.set("k", "old", 25)
    return cache


def fail():
    Account.objects.create(pk=1)  # there is one


def fail_within_a_savepoint():
    with transaction.atomic():
        fail()


def test_an_error_that_has_broken_the_transaction_is_raised_and_says_why(banks):
    with pytest.raises(IntegrityError) as raised, transaction.atomic():
        banks.get_or_set("k", fail, 60, **OPTIONS)
    assert "has broken the transaction of database 'default'" in raised.value.__notes__[0]


def test_the_loop_of_a_synchronous_caller_knows_its_transaction(banks):
    """The loop runs in another thread, which has no connection."""
    with pytest.raises(IntegrityError), transaction.atomic():
        async_to_sync(banks.aget_or_set)("k", fail, 60, **OPTIONS)
    assert async_to_sync(banks.aget_or_set)("k", never, 60, **OPTIONS) == "old"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_error_of_a_plain_query_breaks_the_transaction_of_postgresql(banks):
    with pytest.raises(DatabaseError, match="no_such_table"), transaction.atomic():
        banks.get_or_set("k", lambda: connection.cursor().execute("SELECT * FROM no_such_table"), 60, **OPTIONS)


def test_the_stale_value_is_returned_where_the_transaction_stands(banks):
    with transaction.atomic():
        assert banks.get_or_set("k", fail_within_a_savepoint, 60, **OPTIONS) == "old"
        Account.objects.create(pk=2)
    assert Account.objects.count() == 2


def test_the_stale_value_is_returned_outside_of_transactions(banks):
    assert banks.get_or_set("k", fail, 60, **OPTIONS) == "old"
