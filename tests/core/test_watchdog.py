"""The watchdog: many locks, several servers, and what must not disturb it."""

from __future__ import annotations

import gc
import random
import socket
import threading
import time
import weakref
from contextlib import ExitStack, suppress

import pytest
import redis

from django_redislock.core import Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.driver.registry import server_of
from django_redislock.core.driver.server import Server, endpoint_of
from django_redislock.core.keys import BUCKETS, lock_keys
from django_redislock.core.operations import renew_call
from django_redislock.exceptions import LockBackendError, LockLost
from tests.support import (
    ON_A_CLUSTER,
    RedisServer,
    client_at,
    in_threads,
    key_of,
    lived,
    renew_now,
    wait_until,
    watchdogs_of,
)


def calls(client):
    return client.info("commandstats")["cmdstat_evalsha"]["calls"]


@pytest.mark.parametrize("jitter", [0, 0.5, None])
def test_the_pause_until_a_renewal_is_shortened_at_random_by_up_to_the_jitter(client, jitter):
    """Processes that started together renewed together for as long as they lived."""
    pauses = set()
    for _ in range(50):
        with Lock(client, "a", expire=30, renewal_jitter=jitter) as lock:
            (lease,) = lock._leases.values()
            pauses.add(round(lease.next_renewal - lease.acquired, 6))
    share = 0.1 if jitter is None else jitter
    assert 10 * (1 - share) <= min(pauses) <= max(pauses) <= 10
    assert len(pauses) == 1 if jitter == 0 else len(pauses) > 25


@pytest.mark.slow
def test_a_thousand_locks_cost_one_thread_and_five_commands_a_second(client):
    """With redis-py's default pool, and none is lost."""
    told = []
    locks = [Lock(client, f"lock {i}", expire=3, on_lost=told.append) for i in range(1000)]
    for lock in locks:
        lock.acquire()
    lived(2)  # they were taken one after another, and fall into step
    began, before = time.monotonic(), calls(client)
    lived(8)  # long enough for the round that may begin at each of its ends
    sent = calls(client) - before
    seconds = time.monotonic() - began
    slots = BUCKETS if ON_A_CLUSTER else 1  # a call is one for each of them
    assert sent <= 5 * slots * seconds, "no call renews more than 250"
    assert watchdogs_of(client) == 1
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
            Lock(stack.enter_context(server.client()), f"lock {i}", expire=2) for server in servers for i in range(3)
        ]
        mine = Lock(client, "mine", expire=2, on_lost=told.append)
        mine.acquire()
        for lock in frozen:
            lock.acquire()
        for server in servers:
            server.pause()
        lived(3)
        assert not told
        assert mine.owned()
        mine.release()
        for server in servers:
            server.resume()
        for lock in frozen:
            with pytest.raises((LockLost, LockBackendError)):
                lock.release()


@pytest.fixture
def slow_names(monkeypatch):
    """The name "localhost" is not resolved until the event is set that is returned."""
    resolved, resolve = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if host == "localhost":
            resolved.wait(60)
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield resolved
    resolved.set()


@pytest.mark.slow
@pytest.mark.parametrize("nearby", [True, False], ids=["nearby", "on the same server"])
def test_a_short_life_does_not_cut_the_patience_for_a_long_one_on_a_distant_server(proxy, client, nearby):
    told = []
    with client_at(proxy.url) as distant:
        long = Lock(distant, "long", expire=2, on_lost=told.append)
        long.acquire()
        proxy.delay_replies(0.1)
        end = monotonic() + 2.7
        while monotonic() < end:
            # A busy machine may take what little time it has.
            with suppress(LockLost), Lock(client if nearby else distant, "short", expire=0.3):
                lived(0.25)
        assert not told
        assert long.owned()
        long.release()


@pytest.mark.slow
def test_a_name_that_is_resolved_slowly_costs_no_lock_of_another_server_its_renewal(client, proxy, slow_names):
    """And who holds the lock there is told at its end, although nobody knows yet where the server is."""
    lost, kept = [], []
    with client_at(proxy.url) as first:
        slow_names.set()
        with redis.Redis(host="localhost", port=proxy.port) as named:
            away = Lock(named, "away", expire=2, on_lost=lost.append)
            away.acquire()
            slow_names.clear()
            proxy.cut()
            wait_until(lambda: away._visible_lease().renewal_pending)
            here = Lock(client, "here", expire=1.5, on_lost=kept.append)
            here.acquire()
            wait_until(lambda: lost)
            assert not slow_names.is_set()
            lived(1)
            assert here.owned()
            assert not kept
            here.release()
            slow_names.set()
            with pytest.raises(LockLost, match="Redis confirmed no renewal"):
                away.release()
        first.ping()


def test_a_loss_is_told_while_the_answer_about_a_longer_lock_of_the_same_server_is_waited_for(own_server):
    told = []
    with own_server.client() as frozen:
        long, short = Lock(frozen, "long", expire=60), Lock(frozen, "short", expire=2, on_lost=told.append)
        long.acquire()
        short.acquire()
        own_server.pause()
        asked = renew_now(long)
        wait_until(lambda: told)
        assert asked.renewal_pending
        assert told == [short]
        own_server.resume()
        with pytest.raises(LockLost):
            short.release()
        long.release()


@pytest.mark.slow
def test_a_short_lock_is_renewed_while_the_answer_about_a_long_one_is_late(proxy, client):
    with client_at(proxy.url) as distant:
        long, short = Lock(distant, "long", expire=60), Lock(distant, "short", expire=1.5)
        long.acquire()
        answer = proxy.hold_next_reply(containing=b"EVALSHA")
        asked = renew_now(long)
        assert answer.held.wait(30)
        short.acquire()
        lived(2)
        assert asked.renewal_pending
        assert short.lost is None
        assert short.owned()
        short.release()
        answer.let_go.set()
        wait_until(lambda: not asked.renewal_pending)
        long.release()
        wait_until(lambda: watchdogs_of(distant) == 1)


def test_a_lock_that_is_taken_while_another_server_is_frozen_is_renewed_and_each_server_has_one_thread_after_that(
    client, own_server
):
    """The frozen one's locks are long, and its client has all the patience of the defaults. Whoever kept watch
    meanwhile goes."""
    told = []
    with own_server.client() as other:
        locks = [Lock(one, f"lock {i}", expire=40) for i in range(20) for one in (client, other)]
        for lock in locks:
            lock.acquire()
        own_server.pause()
        for lock in locks:
            renew_now(lock)
        wait_until(lambda: any(lock._visible_lease().renewal_pending for lock in locks))
        short = Lock(client, "short", expire=1.5, on_lost=told.append)
        short.acquire()
        lived(2.2)
        assert short.owned()
        assert not told
        own_server.resume()
        wait_until(lambda: not any(lock._visible_lease().renewal_pending for lock in locks))
        wait_until(lambda: watchdogs_of(client) == watchdogs_of(other) == 1)
        for lock in [*locks, short]:
            lock.release()


def test_a_renewal_needs_no_connection_beyond_that_of_the_calls(client, own_server):
    with own_server.client() as observer, own_server.client(client_name="held") as used:
        lock = Lock(used, "a", expire=2.4)
        with lock:
            lived(2)
            assert lock.owned()
            assert [one["name"] for one in observer.client_list()].count("held") == 1


@pytest.mark.slow
def test_a_renewal_waits_for_no_connection_that_callers_use(redis_url):
    with client_at(redis_url, max_connections=1) as small:
        server = server_of(small)
        lock = Lock(small, "a", expire=1)
        lock.acquire()
        used = server.pool.free.pop()  # somebody is about to call, and takes his time
        before = lock._visible_lease().deadline
        wait_until(lambda: lock._visible_lease().deadline > before + 1)
        assert lock.lost is None
        server.pool.free.append(used)
        lock.release()
        assert len(server.pool.free) <= 2


def test_a_renewal_whose_script_the_server_forgot_is_sent_with_its_text(client):
    with Lock(client, "a", auto_renewal=False) as lock:
        client.script_flush()
        assert lock._server.renew(renew_call([lock._visible_lease()]), patience=5) == [1]


def test_a_call_has_its_own_time_after_a_renewal_used_its_connection(own_server):
    with own_server.client(socket_timeout=7, socket_connect_timeout=6) as client:
        lock = Lock(client, "a", expire=2)
        lock.acquire()
        before = lock._visible_lease().deadline
        wait_until(lambda: lock._visible_lease().deadline > before)
        (link,) = wait_until(lambda: server_of(client).pool.free)
        assert link.redis_connection._sock.gettimeout() == 7
        assert (link.redis_connection.socket_timeout, link.redis_connection.socket_connect_timeout) == (7, 6)
        lock.release()


@pytest.mark.slow
def test_a_key_that_something_else_wrote_costs_no_other_lock_its_renewal(client):
    told = []
    locks = [Lock(client, f"lock {i}", expire=1.5, on_lost=told.append) for i in range(10)]
    for lock in locks:
        lock.acquire()
    client.delete(key_of("lock 3"))
    client.rpush(key_of("lock 3"), "what is this")
    client.delete(lock_keys("redislock", "lock 5").held)
    client.set(lock_keys("redislock", "lock 5").held, "nor this")
    lived(2)
    wait_until(lambda: told)
    assert told == [locks[3]]
    assert all(lock.owned() for lock in locks if lock is not locks[3])
    client.delete(lock_keys("redislock", "lock 5").held)
    locks.remove(locks[3])
    for lock in locks:
        lock.release()


@pytest.mark.slow
def test_who_is_told_of_a_loss_may_take_his_time(client):
    """A slow receiver does not keep the watchdog from renewing other locks."""
    told, done = threading.Event(), threading.Event()

    def slow(lock):
        told.set()
        done.wait(20)

    doomed, kept = Lock(client, "doomed", expire=0.6, on_lost=slow), Lock(client, "kept", expire=1.5)
    doomed.acquire()
    kept.acquire()
    client.delete(key_of("doomed"))
    assert told.wait(20)
    lived(2)
    owned = kept.owned()
    done.set()
    assert owned
    kept.release()


# Extensions


@pytest.mark.slow
def test_a_life_that_was_shortened_is_renewed_in_time(client):
    lock = Lock(client, "a", expire=30)
    with lock:
        lock.extend(1.5)
        lived(2)
        assert lock.owned()
        lock.raise_if_lost()


@pytest.mark.slow
def test_an_extension_that_is_not_answered_does_not_leave_a_belief_that_outlives_the_lock(client, proxy):
    """The server may have set the shorter life, and it may not."""
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        lock = Lock(behind, "a", expire=30, auto_renewal=False)
        lock.acquire()
        lock.extend()  # the server knows the script from now on: what is asked for once arrives at once
        proxy.stall()
        with pytest.raises(LockBackendError):
            lock.extend(1.2)
        proxy.heal()
        wait_until(lambda: Lock(client, "a").ttl() is None)
        assert lock.lost is not None
        with pytest.raises(LockLost):
            lock.release()


# Releases


@pytest.mark.slow
def test_a_renewal_that_races_a_release_reports_nothing_and_revives_nothing(client, caplog):
    """Each release comes while the watchdog renews the lock, or a moment after."""
    told, stop = [], time.monotonic() + 4

    def cycle(name):
        chance = random.Random(name)
        while time.monotonic() < stop:
            lock = Lock(client, name, on_lost=told.append)
            lock.acquire()
            renew_now(lock)
            lived(chance.choice((0, 0, 0.005)))
            lock.release()

    in_threads(8, lambda number: cycle(f"lock {number}"))
    assert not told
    assert "was lost" not in caplog.text
    assert not client.exists(*(key_of(f"lock {i}") for i in range(8)))


@pytest.mark.slow
def test_a_server_that_renewed_a_lock_goes_with_its_last_lock_and_needs_no_garbage_collector(client):
    def renew():
        server = Server(endpoint_of(client))
        with Lock(server, "a", expire=1) as lock:
            lived(1.2)
            assert lock.owned()
        return weakref.ref(server)

    gc.collect()
    gc.disable()
    try:
        gone = renew()
        wait_until(lambda: gone() is None)
    finally:
        gc.enable()
