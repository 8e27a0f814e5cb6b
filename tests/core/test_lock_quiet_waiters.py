"""Waiters whom nothing reaches, and how seldom waiters look by themselves.

Nothing reaches them when a subscription died in silence, or when their process is frozen.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager

import pytest

from django_redislock.core import Lock
from django_redislock.core.driver import wakeups
from tests.support import begin, begin_to_wait, client_at, enter, lived, monitoring, queued, say, wait_until, within


@contextmanager
def contention(client, name):
    """Others come and go, so that the lock is never found free."""
    stop = threading.Event()

    def cycle():
        while not stop.is_set():
            with Lock(client, name):
                stop.wait(0.02)

    others = [begin(cycle) for _ in range(3)]
    try:
        wait_until(lambda: queued(client, name) >= 2)
        yield
    finally:
        stop.set()
        for other in others:
            other.result(10)


@pytest.mark.slow
def test_a_subscription_that_died_in_silence_starves_nobody(make_lock, client, proxy, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", 0.5)
    with client_at(proxy.url) as behind:
        with Lock(client, "a"):
            assert not make_lock(behind, "a").acquire(timeout=0.1)
        proxy.forget_subscriptions()
        with contention(client, "a"):
            assert enter(make_lock(behind, "a", timeout=10))


def subscriptions(client):
    return {found["id"] for found in client.client_list() if int(found["sub"])}


@pytest.mark.slow
def test_a_quiet_subscription_that_lives_is_kept(client, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", 0.2)
    with Lock(client, "a"):
        waiter = begin_to_wait(client, "a", enter, Lock(client, "a"))
        before = wait_until(lambda: subscriptions(client))
        with monitoring(client) as sent:
            lived(2)
        assert sent.count("PING") >= 2
        assert subscriptions(client) == before
    assert waiter.result(10)


def wait_in_threads(url, name, count):
    client = client_at(url)
    for _ in range(count):
        begin(enter, Lock(client, name))
    say(event="started")
    input()


@pytest.mark.processes
def test_a_frozen_process_holds_up_a_free_lock_once_and_not_for_each_of_its_threads(client, redis_url, run_python):
    count = 8
    with Lock(client, "a", expire=60):
        frozen = run_python(wait_in_threads, redis_url, "a", count)
        wait_until(lambda: queued(client, "a") == count)
        frozen.pause()
        waiter = begin_to_wait(client, "a", enter, Lock(client, "a", timeout=30))
    with within(0.5):  # one reservation, not one for each of its threads
        assert waiter.result(30)


@pytest.mark.slow
def test_waiters_for_a_short_lived_lock_do_not_look_all_of_them_at_its_every_end(client):
    with Lock(client, "a", expire=1.5):
        waiters = [begin(enter, Lock(client, "a", timeout=300)) for _ in range(50)]
        wait_until(lambda: queued(client, "a") == 50)
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        lived(3)
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"] - before
    for waiter in waiters:
        waiter.result(60)
    assert calls <= 50, "two looks a second, and the renewals"


def test_threads_that_come_to_wait_all_the_time_keep_nobody_from_looking(client, proxy, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", math.inf)
    held, other = Lock(client, "a", expire=60), Lock(client, "b", expire=60)
    held.acquire()
    other.acquire()
    with client_at(proxy.url) as far:
        waiter = begin_to_wait(client, "a", Lock(far, "a").acquire, timeout=60)
        proxy.forget_subscriptions()
        held.release()
        wait_until(lambda: Lock(far, "b").acquire(timeout=0.05) or waiter.done(), timeout=20)
        assert waiter.result() is True
