"""The watchdog: many locks, several servers, and what must not disturb it."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack

import pytest
import redis

from django_redislock.core import Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.keys import lock_keys
from django_redislock.core.watchdog import watchdog
from django_redislock.exceptions import LockBackendError, LockLost
from tests.support import Proxy, RedisServer, key_of, lived, wait_until

WATCHDOG = "redislock-watchdog"


def calls(client):
    return client.info("commandstats")["cmdstat_evalsha"]["calls"]


def test_a_thousand_locks_cost_one_thread_and_five_commands_a_second(client):
    """With redis-py's default pool, and none is lost."""
    told = []
    locks = [Lock(client, f"lock {i}", expire=3, on_lost=told.append) for i in range(1000)]
    for lock in locks:
        lock.acquire()
    lived(3)  # they were taken one after another, and fall into step
    before, seconds = calls(client), 6
    lived(seconds)
    assert calls(client) - before <= 5 * seconds, "no call renews more than 250"
    assert [thread.name for thread in threading.enumerate()].count(WATCHDOG) == 1
    assert not told
    assert all(lock.lost is None for lock in locks)
    assert client.exists(*(key_of(lock.name) for lock in locks)) == 1000
    for lock in locks:
        lock.release()


@pytest.mark.processes
def test_frozen_servers_do_not_keep_the_locks_of_another_one_from_being_renewed(client):
    told = []
    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer()) for _ in range(4)]
        frozen = [
            Lock(stack.enter_context(server.client()), f"lock {i}", expire=3) for server in servers for i in range(3)
        ]
        mine = Lock(client, "mine", expire=3, on_lost=told.append)
        mine.acquire()
        for lock in frozen:
            lock.acquire()
        for server in servers:
            server.pause()
        lived(4.5)
        assert not told
        assert mine.owned()
        mine.release()
        for server in servers:
            server.resume()
        for lock in frozen:
            with pytest.raises((LockLost, LockBackendError)):
                lock.release()


def test_a_key_that_something_else_wrote_costs_no_other_lock_its_renewal(client):
    told = []
    locks = [Lock(client, f"lock {i}", expire=2.4, on_lost=told.append) for i in range(10)]
    for lock in locks:
        lock.acquire()
    client.delete(key_of("lock 3"))
    client.rpush(key_of("lock 3"), "what is this")
    client.delete(lock_keys("redislock", "lock 5").held)
    client.set(lock_keys("redislock", "lock 5").held, "nor this")
    lived(3)
    wait_until(lambda: told)
    assert told == [locks[3]]
    assert all(lock.owned() for lock in locks if lock is not locks[3])
    client.delete(lock_keys("redislock", "lock 5").held)
    locks.remove(locks[3])
    for lock in locks:
        lock.release()


def test_who_is_told_of_a_loss_may_take_his_time(client):
    """A slow receiver does not keep the watchdog from renewing other locks."""
    told, done = threading.Event(), threading.Event()

    def slow(lock):
        told.set()
        done.wait(20)

    doomed, kept = Lock(client, "doomed", expire=0.6, on_lost=slow), Lock(client, "kept", expire=2)
    doomed.acquire()
    kept.acquire()
    client.delete(key_of("doomed"))
    assert told.wait(20)
    lived(3)
    owned = kept.owned()
    done.set()
    assert owned
    kept.release()


# Extensions


def test_a_life_that_was_shortened_is_renewed_in_time(client):
    lock = Lock(client, "a", expire=30)
    with lock:
        lock.extend(2)
        lived(3)
        assert lock.owned()
        lock.raise_if_lost()


def test_an_extension_that_is_not_answered_does_not_leave_a_belief_that_outlives_the_lock(client, redis_url):
    """The server may have set the shorter life, and it may not."""
    with Proxy(redis_url) as proxy, ExitStack() as stack:
        behind = stack.enter_context(redis.Redis.from_url(proxy.url, socket_timeout=0.5))
        lock = Lock(behind, "a", expire=30, auto_renewal=False)
        lock.acquire()
        lock.extend()  # the server knows the script from now on: what is asked for once arrives at once
        proxy.stall()
        with pytest.raises(LockBackendError):
            lock.extend(2)
        proxy.heal()
        wait_until(lambda: Lock(client, "a").ttl() is None)
        assert lock.lost is not None
        with pytest.raises(LockLost):
            lock.release()


# Releases


def test_a_renewal_that_races_a_release_reports_nothing_and_revives_nothing(client, caplog):
    """Each release comes while the watchdog renews the lock, or a moment after."""
    told, stop = [], time.monotonic() + 4

    def cycle(name):
        chance = random.Random(name)
        while time.monotonic() < stop:
            lock = Lock(client, name, on_lost=told.append)
            lock.acquire()
            lease = lock._latest()
            lease.next_renewal = monotonic()
            watchdog.hurry(lease)
            lived(chance.choice((0, 0, 0.005)))
            lock.release()

    threads = [threading.Thread(target=cycle, args=(f"lock {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not told
    assert "was lost" not in caplog.text
    assert not client.exists(*(key_of(f"lock {i}") for i in range(8)))
