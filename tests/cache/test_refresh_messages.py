"""The messages by which a Celery worker is told to replace an old value: late ones, copies, and those that end."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from uuid import UUID

import pytest
from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from kombu.utils.json import dumps, loads

from django_redislock import tasks
from django_redislock.cache import refresh
from django_redislock.cache.lease import single_flight
from tests.support import cache_programs, wait_until
from tests.support.cache_programs import held

pytestmark = pytest.mark.usefixtures("caches_in_settings")
ORDER = functools.partial(cache_programs.celebrate, "worker", year=2026)


@pytest.fixture
def sent(monkeypatch):
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
    running, end, calls = threading.Event(), threading.Event(), []

    def compute(*args, **kwargs):
        calls.append(1)
        running.set()
        assert len(calls) > 1 or end.wait(20)
        return "new"

    caches["default"].set("k", "old", 25)
    ask()
    monkeypatch.setitem(refresh._registered, "tests.support.cache_programs.celebrate", compute)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tasks.refresh, *sent[0])
        assert running.wait(20)
        single_flight._flights.clear()  # as in another process
        tasks.refresh(*sent[0])
        end.set()
        first.result(20)
    assert len(calls) == 1
    assert caches["default"].get("k") == "new"
    assert not held(client)


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
