"""Old values replaced by a Celery worker."""

from __future__ import annotations

import asyncio
import functools
import os
import threading

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from kombu.exceptions import OperationalError
from kombu.utils import functional

from django_redislock import tasks
from django_redislock.cache import cached, refresh, refreshable
from tests.support import cache_programs, monitoring, wait_until
from tests.support.cache_programs import Work, cache_at, held, never, order, refreshable_never
from tests.support.worker import Worker


def test_only_a_registered_function_can_be_refreshed_by_celery(get):
    for default in (lambda: 1, functools.partial(lambda: 1), Work(), never, os.getpid):
        with pytest.raises(TypeError, match="default"):
            get("k", default, 60, stale=30, refresh="celery")
    with pytest.raises(TypeError, match="function of a module"):
        refreshable(lambda: 1)
    with pytest.raises(TypeError, match="function of a module"):
        cached(60, key="k", stale=30, refresh="celery")(lambda: 1)


def test_a_cache_that_no_worker_can_find_cannot_be_refreshed_by_celery(client, redis_url, backend):
    cache = cache_at(redis_url, backend, KEY_PREFIX="elsewhere")
    cache.set("k", "old", 25)
    with pytest.raises(ImproperlyConfigured, match="one of CACHES"):
        cache.get_or_set("k", cache_programs.celebrate, 60, stale=30, refresh="celery")


@pytest.mark.parametrize("argument", ["default", "should_cache", "timeout_for"])
def test_a_worker_obeys_registered_functions_only(client, settings, redis_url, backend, argument, tmp_path):
    """Whoever can write to the broker could have anything called."""
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}}
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


def test_of_many_messages_about_one_value_a_worker_processes_one_although_the_bytes_stay_the_same(
    client, settings, redis_url, backend, monkeypatch
):
    """Twenty callers had asked while the worker was away, and it computed one report twenty times."""
    computed = []
    monkeypatch.setitem(refresh._registered, "the.same", lambda *args, **kwargs: computed.append(1) or "old")
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}}
    caches["default"].set("k", "old", 25)
    for number in range(20):
        tasks.refresh("default", order(client, default="the.same", id=f"id {number}", due_ms=30_000))
    assert len(computed) == 1
    assert caches["default"].get("k") == "old"
    assert not held(client)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_without_a_broker_everybody_has_the_old_value(
    client, settings, server, redis_url, backend, caplog, asynchronous, monkeypatch
):
    from tests.support.celery_site.app import app
    from tests.support.celery_site.harness import connected

    monkeypatch.setitem(app.conf, "broker_transport_options", {"max_retries": 1, "interval_start": 0})
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}}
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
    assert not held(client), "the next one may try"


@pytest.mark.slow
def test_without_a_broker_one_process_tries_and_the_others_wait_for_the_end_of_the_pause(
    client, settings, server, redis_url, backend, caplog, monkeypatch
):
    """Each process sent a message once a second, and each time one of its callers waited for the broker."""
    from tests.support.celery_site.app import app
    from tests.support.celery_site.harness import connected

    monkeypatch.setitem(app.conf, "broker_transport_options", {"max_retries": 1, "interval_start": 0})
    monkeypatch.setattr(refresh, "pause_refresh", lambda request: None)  # so each call is that of a new process
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}}
    caches["default"].set("k", "old", 25)
    default = functools.partial(cache_programs.celebrate, "worker", year=2026)
    app.set_default()
    with connected(server, "redis://127.0.0.1:1/0"):
        for _ in range(5):
            assert caches["default"].get_or_set("k", default, 60, stale=30, refresh="celery") == "old"
    assert caplog.text.count("could not be sent to Celery") == 1
    assert not held(client)


@pytest.mark.slow
def test_without_a_broker_a_caller_tries_no_longer_than_a_plain_message_does(
    client, settings, server, redis_url, backend, monkeypatch
):
    from tests.support.celery_site.app import app
    from tests.support.celery_site.harness import connected

    paused: list[float] = []
    monkeypatch.setattr(functional, "sleep", paused.append)
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}}
    caches["default"].set("k", "old", 25)
    default = functools.partial(cache_programs.celebrate, "worker", year=2026)
    app.set_default()
    with connected(server, "redis://127.0.0.1:1/0"):
        assert caches["default"].get_or_set("k", default, 60, stale=30, refresh="celery") == "old"
        ours = sum(paused)
        paused.clear()
        with pytest.raises(
            OperationalError
        ):  # afterwards, because the connection remembers the pauses of the first one
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
