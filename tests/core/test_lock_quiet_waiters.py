"""Waiters whom nothing reaches, and how seldom waiters look by themselves.

Nothing reaches them when a subscription died in silence, or when their process is frozen.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import contextmanager

import pytest

from django_redislock.core import AsyncLock, Lock
from django_redislock.core.driver import wakeups
from tests.support import BUSY, Proxy, client_at, lived, monitoring, queued, say, wait_until


def start(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


@contextmanager
def contention(client, name):
    """Others come and go, so that the lock is never found free."""
    stop = threading.Event()

    def cycle():
        while not stop.is_set():
            with Lock(client, name):
                stop.wait(0.02)

    others = [start(cycle) for _ in range(3)]
    try:
        wait_until(lambda: queued(client, name) >= 2)
        yield
    finally:
        stop.set()
        for other in others:
            other.join(10)


@pytest.mark.slow
def test_a_subscription_that_died_in_silence_starves_no_thread(client, redis_url, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", 0.5)
    with Proxy(redis_url) as proxy, client_at(proxy.url) as behind:
        with Lock(client, "a"):
            assert not Lock(behind, "a").acquire(timeout=0.1)
        proxy.forget_subscriptions()
        with contention(client, "a"):
            lock = Lock(behind, "a")
            assert lock.acquire(timeout=10)
            lock.release()


@pytest.mark.slow
def test_a_subscription_that_died_in_silence_starves_no_task(client, redis_url, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", 0.5)

    async def main():
        with Lock(client, "a"):
            assert not await AsyncLock(behind, "a").acquire(timeout=0.1)
        proxy.forget_subscriptions()
        with contention(client, "a"):
            lock = AsyncLock(behind, "a")
            assert await lock.acquire(timeout=10)
            await lock.release()

    with Proxy(redis_url) as proxy, client_at(proxy.url) as behind:
        asyncio.run(main())


def subscriptions(client):
    return {found["id"] for found in client.client_list() if int(found["sub"])}


@pytest.mark.slow
def test_a_quiet_subscription_that_lives_is_kept(client, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", 0.2)
    with Lock(client, "a"):
        thread = start(lambda: Lock(client, "a").acquire(timeout=30))
        wait_until(lambda: queued(client, "a") == 1)
        before = wait_until(lambda: subscriptions(client))
        with monitoring(client) as sent:
            lived(2)
        assert sent.count("PING") >= 2
        assert subscriptions(client) == before
    thread.join(10)


def wait_in_threads(url, name, count):
    client = client_at(url)

    def wait():
        with Lock(client, name):
            pass

    for _ in range(count):
        start(wait)
    say(event="started")
    input()


@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 8])
def test_a_frozen_process_holds_up_a_free_lock_once_and_not_for_each_of_its_threads(
    client, redis_url, run_python, count
):
    with Lock(client, "a", expire=60):
        frozen = run_python(wait_in_threads, redis_url, "a", count)
        wait_until(lambda: queued(client, "a") == count)
        frozen.pause()
        taken = []

        def wait():
            with Lock(client, "a", timeout=30):
                taken.append(time.monotonic())

        thread = start(wait)
        wait_until(lambda: queued(client, "a") == count + 1)
    freed = time.monotonic()
    thread.join(30)
    assert taken[0] - freed < 0.5 + BUSY, "one reservation, not one for each of its threads"


@pytest.mark.slow
def test_waiters_for_a_short_lived_lock_do_not_look_all_of_them_at_its_every_end(client):
    def acquire():
        with Lock(client, "a", timeout=20):
            pass

    with Lock(client, "a", expire=1.5):
        threads = [start(acquire) for _ in range(50)]
        wait_until(lambda: queued(client, "a") == 50)
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        lived(3)
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"] - before
    for thread in threads:
        thread.join(20)
    assert calls <= 50, "two looks a second, and the renewals"


def test_threads_that_come_to_wait_all_the_time_keep_nobody_from_looking(client, proxy, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", math.inf)
    held, other, got = Lock(client, "a", expire=60), Lock(client, "b", expire=60), []
    held.acquire()
    other.acquire()
    with client_at(proxy.url) as far:
        thread = start(lambda: got.append(Lock(far, "a").acquire(timeout=60)))
        wait_until(lambda: queued(client, "a"))
        proxy.forget_subscriptions()
        held.release()
        wait_until(lambda: Lock(far, "b").acquire(timeout=0.05) or got, timeout=20)
        thread.join()
    assert got == [True]
