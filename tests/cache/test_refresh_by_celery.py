"""Old values replaced by a Celery worker."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from uuid import UUID

import pytest
from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.test import override_settings
from kombu.exceptions import OperationalError
from kombu.utils import functional
from kombu.utils.json import dumps, loads

from django_redislock import tasks
from django_redislock.cache import cached, refresh, refreshable
from django_redislock.cache.lease import single_flight
from django_redislock.cache.stats import alias_of, counters_for
from tests.support import cache_programs, monitoring, wait_until
from tests.support.cache_programs import (
    SiteCache,
    Work,
    cache_at,
    getter,
    held,
    make_site_cache,
    never,
    order,
    refreshable_never,
)
from tests.support.worker import Worker


def test_only_a_registered_function_can_be_refreshed_by_celery(get):
    for default in (lambda: 1, functools.partial(lambda: 1), Work(), never, os.getpid):
        with pytest.raises(TypeError, match="default"):
            get("k", default, 60, stale=30, refresh="celery")
    with pytest.raises(TypeError, match="function of a module"):
        refreshable(lambda: 1)
    with pytest.raises(TypeError, match="function of a module"):
        cached(60, key="k", stale=30, refresh="celery")(lambda: 1)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_cache_that_no_worker_can_find_returns_the_old_value_and_logs_why(redis_url, backend, asynchronous, caplog):
    """It raised ImproperlyConfigured to the visitor, although the old value was at hand."""
    cache = cache_at(redis_url, backend, KEY_PREFIX="elsewhere")
    cache.set("k", "old", 25)
    single_flight._paused.clear()
    errors = cache.stats().errors
    get = getter(cache, asynchronous)
    for _ in range(2):
        assert get("k", cache_programs.celebrate, 60, stale=30, refresh="celery") == "old"
    assert caplog.text.count("ImproperlyConfigured: refresh='celery' needs a cache that is one of CACHES") == 1, (
        "then a pause begins"
    )
    assert cache.stats().errors == errors + 1


@pytest.mark.parametrize("made", [SiteCache, make_site_cache], ids=["class", "function"])
def test_a_backend_of_the_site_that_is_named_through_another_module_has_its_alias(redis_url, made, monkeypatch):
    """Counts were mixed, and a refresh by Celery was refused."""
    messages: list = []
    monkeypatch.setattr(tasks.refresh, "apply_async", lambda args, **options: messages.append(args))
    single_flight._paused.clear()
    options = {"BACKEND": f"tests.cache.test_refresh_by_celery.{made.__name__}", "LOCATION": redis_url}
    with override_settings(CACHES={"default": {"BACKEND": "django_redislock.cache.DummyCache"}, "site": options}):
        cache = caches["site"]
        cache.set("k", "old", 25)
        assert cache.get_or_set("k", ORDER, 60, stale=30, refresh="celery") == "old"
        ((alias, _),) = messages
        assert alias == "site"
        assert cache._counters is counters_for("site")
        elsewhere: list = []
        thread = threading.Thread(target=lambda: elsewhere.append(alias_of(cache, *cache._constructor_args)))
        thread.start()
        thread.join()
        assert elsewhere == ["site" if made is SiteCache else ""]


@pytest.mark.parametrize("argument", ["default", "should_cache", "timeout_for"])
@pytest.mark.usefixtures("caches_in_settings")
def test_a_worker_obeys_registered_functions_only(client, argument, tmp_path):
    """Whoever can write to the broker could have anything called."""
    cache = caches["default"]
    cache.set("k", "old", 25)
    trace = tmp_path / "trace"
    with pytest.raises(LookupError, match=r"os\.system is not registered"):
        tasks.refresh("default", order(client, args=[f"touch {trace}"], kwargs={}, **{argument: "os.system"}))
    assert not trace.exists()
    assert cache.get("k") == "old"
    tasks.refresh("default", order(client))
    assert cache.get("k")["greeting"] == "worker 2026"
    assert not held(client)


@pytest.mark.usefixtures("caches_in_settings")
def test_of_many_messages_about_one_value_a_worker_processes_one_although_the_bytes_stay_the_same(client, monkeypatch):
    """Twenty callers had asked while the worker was away, and it computed one report twenty times."""
    computed = []
    monkeypatch.setitem(refresh._registered, "the.same", lambda *args, **kwargs: computed.append(1) or "old")
    caches["default"].set("k", "old", 25)
    for number in range(20):
        tasks.refresh("default", order(client, default="the.same", id=f"id {number}", due_ms=30_000))
    assert len(computed) == 1
    assert caches["default"].get("k") == "old"
    assert not held(client)


@pytest.fixture
def no_broker(caches_in_settings, server):
    from tests.support.celery_site.app import app
    from tests.support.celery_site.harness import connected

    app.set_default()
    with connected(server, "redis://127.0.0.1:1/0"):
        yield app


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_without_a_broker_one_process_tries_and_the_others_wait_for_the_end_of_the_pause(
    client, no_broker, caplog, asynchronous, monkeypatch
):
    """Each process sent a message once a second, and each time one of its callers waited for the broker."""
    monkeypatch.setitem(no_broker.conf, "broker_transport_options", {"max_retries": 1, "interval_start": 0})
    monkeypatch.setattr(refresh, "pause_refresh", lambda request: None)  # so each call is that of a new process
    caches["default"].set("k", "old", 25)
    default = functools.partial(cache_programs.celebrate, "worker", year=2026)
    get = getter(caches["default"], asynchronous)
    for _ in range(5):
        assert get("k", default, 60, stale=30, refresh="celery") == "old"
        for pause in client.keys("*failed:*"):  # on a busy machine five calls took longer than its second
            failures, _, _ = client.get(pause).rpartition(b" ")
            client.set(pause, failures + b" %d" % (1000 * time.time() + 3_600_000))
    assert caplog.text.count("The message to refresh the value of ':1:k' could not be sent to Celery") == 1
    assert not held(client), "the next one may try"


@pytest.mark.slow
def test_without_a_broker_a_caller_tries_no_longer_than_a_plain_message_does(no_broker, monkeypatch):
    paused: list[float] = []
    monkeypatch.setattr(functional, "sleep", paused.append)
    caches["default"].set("k", "old", 25)
    default = functools.partial(cache_programs.celebrate, "worker", year=2026)
    assert caches["default"].get_or_set("k", default, 60, stale=30, refresh="celery") == "old"
    ours = sum(paused)
    paused.clear()
    with pytest.raises(OperationalError):  # afterwards: the connection remembers the pauses of the first one
        tasks.refresh.apply_async(("default", {}))
    assert 0 < ours <= sum(paused)


def test_a_soft_time_limit_while_a_worker_is_told_is_not_swallowed(client, settings, server, monkeypatch):
    class SoftTimeLimitExceeded(Exception):
        pass

    def publish(*args, **kwargs):
        raise SoftTimeLimitExceeded

    cache = caches["default"]
    cache.set("k", "old", 25)
    monkeypatch.setattr(tasks.refresh, "apply_async", publish)
    with pytest.raises(SoftTimeLimitExceeded):
        cache.get_or_set("k", refreshable_never, 60, stale=30, refresh="celery")
    assert not held(client)


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
    assert not held(client)


# The messages: late ones, copies, and those that end


ORDER = functools.partial(cache_programs.celebrate, "worker", year=2026)


@pytest.fixture
def sent(caches_in_settings, monkeypatch):
    """The messages that were sent; no worker has them yet."""
    messages: list[tuple] = []
    monkeypatch.setattr(tasks.refresh, "apply_async", lambda args, **options: messages.append(loads(dumps(args))))
    return messages


def ask(key="k", **options):
    """Ask for an old value, as the caller of a new process does."""
    single_flight._paused.clear()
    return caches["default"].get_or_set(key, ORDER, 60, **({"stale": 30, "refresh": "celery", "jitter": 0} | options))


def test_a_message_that_waited_longer_than_its_lease_is_processed_although_there_is_a_later_one(client, sent):
    """With a queue that was always longer than the lease, each message met the lease of the next one."""
    caches["default"].set("k", "old", 25)
    assert ask(expire=0.1) == "old"
    wait_until(lambda: not held(client))
    assert ask() == "old"
    assert len(sent) == 2
    tasks.refresh(*sent[0])
    made = caches["default"].get("k")
    assert made != "old"
    tasks.refresh(*sent[1])
    assert caches["default"].get("k") == made
    assert not held(client)


def test_of_two_copies_of_a_message_one_computes(client, sent, monkeypatch):
    caches["default"].set("k", "old", 25)
    ask()
    work = cache_programs.Work("new")
    monkeypatch.setitem(refresh._registered, "tests.support.cache_programs.celebrate", lambda *args, **kwargs: work())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tasks.refresh, *sent[0])
        assert work.running.wait(20)
        single_flight._flights.clear()  # as in another process
        tasks.refresh(*sent[0])
        work.end.set()
        first.result(20)
    assert work.calls == 1
    assert caches["default"].get("k") == "new"
    assert not held(client)


@pytest.mark.slow
def test_when_a_value_ends_before_its_message_is_processed_nobody_waits_for_the_worker(client, sent):
    caches["default"].set("k", "old", 1)
    assert ask() == "old"
    wait_until(lambda: caches["default"].get("k") is None)
    assert ask(on_wait_timeout="raise", wait=2)["greeting"] == "worker 2026"


def test_the_worker_shortens_no_life_below_refresh_before(client, sent):
    """The jitter made a value due as soon as it was stored."""
    caches["default"].set("k", "old", 25)
    assert ask(stale=0, refresh_before=59, jitter=1) == "old"
    tasks.refresh(*sent[0])
    assert client.pttl(":1:k") > 58_000


@pytest.mark.parametrize("key", [5, ("shop",), UUID(int=7)], ids=str)
def test_a_worker_finds_the_value_by_a_key_that_is_no_text(sent, key):
    caches["default"].set(key, "old", 25)
    assert ask(key) == "old"
    tasks.refresh(*sent[0])
    assert caches["default"].get(key) != "old"


@pytest.mark.parametrize(
    "timeout", [60, Fraction(60), None, DEFAULT_TIMEOUT], ids=["int", "fraction", "never", "default"]
)
def test_a_worker_stores_the_value_for_as_long_as_the_caller_says(client, sent, timeout):
    """A number that is neither int nor float became the default timeout."""
    caches["default"].set("k", "old", 25)
    call = functools.partial(caches["default"].get_or_set, stale=30, refresh="celery", jitter=0)
    assert call("k", ORDER, timeout) == "old"
    tasks.refresh(*sent[0])
    left = {None: -1, DEFAULT_TIMEOUT: 330}.get(timeout, 90)
    assert left - 5 < client.ttl(":1:k") <= left


@pytest.mark.parametrize("argument", ["should_cache", "timeout"])
def test_a_function_that_no_worker_would_call_is_refused_at_the_first_call_and_not_when_the_value_is_old(
    get, client, argument
):
    options = {"timeout": 60, "stale": 30, "refresh": "celery"} | {argument: lambda value: 60}
    with pytest.raises(TypeError, match=f"^{argument} must be a function decorated with"):
        get("k", ORDER, **options)
    assert not client.exists(":1:k")


@refreshable
def sometimes(*args, **kwargs):
    """No coroutine function, but it returns a coroutine."""

    async def compute():
        return "awaited"

    return compute()


def test_a_worker_awaits_a_coroutine_that_a_plain_function_returns(caches_in_settings, client):
    cache = caches["default"]
    cache.set("k", "old", 30)
    tasks.refresh("default", order(client, default=f"{__name__}.sometimes"))
    assert cache.get("k") == "awaited"
