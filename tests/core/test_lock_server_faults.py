"""A server that restarts, loses its data, freezes, falls silent, is replaced by a replica, or whose clock jumps."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redislock.core import Lock, Semaphore
from django_redislock.core.driver import effects
from django_redislock.core.driver.effects import Sleep
from django_redislock.core.driver.server import Server
from django_redislock.core.keys import lock_keys
from django_redislock.core.redis_py import RedisPyLock
from django_redislock.exceptions import LockBackendError, LockLost
from tests.support import (
    BUSY,
    ON_A_CLUSTER,
    Proxy,
    RedisServer,
    begin,
    begin_to_wait,
    client_at,
    listening,
    lived,
    queued,
    side_by_side,
    wait_until,
    wait_until_renewed,
    within,
)

pytestmark = pytest.mark.processes


def test_a_restart_with_its_data_keeps_held_locks_held_and_waiters_waiting(make_lock, own_server):
    with own_server.client() as client:
        holder = make_lock(client, "a", expire=60)
        holder.acquire()
        waiter = begin_to_wait(client, "a", make_lock(client, "a").acquire, timeout=30)
        own_server.restart(keep_data=True)
        wait_until_renewed(holder)
        wait_until(lambda: client.pubsub_channels("redislock:wake:*"), message="the waiter listens again")
        assert holder.owned()
        assert not waiter.done()
        holder.release()
        assert waiter.result(5)


@pytest.mark.parametrize("id", [None, "given"])
def test_a_wait_goes_on_after_a_silence_of_the_server(make_lock, own_server, refusals, id):
    with own_server.client() as client, client_at(own_server.url, socket_timeout=0.6) as short_timeout:
        holder = make_lock(client, "a", expire=60)
        holder.acquire()
        waiter = make_lock(short_timeout, "a", expire=60, id=id)
        got = begin_to_wait(client, "a", waiter.acquire, timeout=300)
        client.ping()  # by now the waiter's reply was sent: a first call that is not answered is an error
        own_server.pause()
        wait_until(lambda: len(refusals) >= 3)
        own_server.resume()
        assert queued(client, "a") == 1, "it has kept its place"
        holder.release()
        assert got.result(BUSY)
        wait_until(lambda: queued(client, "a") == 0)
        assert waiter.locked(), "what undoes the call without a reply is about that call alone"


def test_a_wait_ends_when_the_server_stays_silent(make_lock, own_server, monkeypatch):
    monkeypatch.setattr(effects, "retry_for", 0.1)
    with own_server.client() as client, client_at(own_server.url, socket_timeout=0.5) as short_timeout:
        holder = make_lock(client, "a", expire=60)
        holder.acquire()
        waiter = begin_to_wait(client, "a", make_lock(short_timeout, "a").acquire)
        own_server.pause()
        with pytest.raises(LockBackendError):
            waiter.result(60)
        own_server.resume()
        wait_until(lambda: queued(client, "a") == 0)
        holder.release()


def test_lost_data_is_told_within_one_renewal(make_lock, client):
    told = threading.Event()
    holder = make_lock(client, "a", expire=3, on_lost=lambda lock: told.set())
    holder.acquire()
    fence = holder.fence
    client.flushdb()
    with make_lock(client, "a") as second:
        assert second.fence > fence
        assert told.wait(20)
        assert holder.lost.fence == fence
        with pytest.raises(LockLost):
            holder.release()
        assert second.owned()


@pytest.mark.parametrize("fault", ["freeze", "CLIENT PAUSE"])
def test_a_silence_shorter_than_the_life_loses_nothing(make_lock, own_server, fault):
    told = []
    with own_server.client() as client, own_server.client() as other:
        lock = make_lock(client, "a", expire=2, on_lost=told.append)
        with lock:
            if fault == "freeze":
                own_server.pause()
                lived(0.8)  # its renewal falls into it
                own_server.resume()
            else:
                other.client_pause(800, all=True)
                lived(0.8)
            lived(1.7)
            assert lock.owned()
            lock.raise_if_lost()
        assert not told


def test_a_failover_to_a_replica_that_never_had_the_lock_is_told_by_loss_and_fence(make_lock, own_server):
    keys, told = lock_keys("redislock", "a"), []
    with (
        Proxy(own_server.url) as replication,
        RedisServer(replicaof=f"127.0.0.1 {replication.port}") as promoted,
        Proxy(own_server.url) as proxy,
        promoted.client() as on_promoted,
        client_at(proxy.url) as before,
        client_at(proxy.url) as after,
    ):
        with make_lock(before, "a"):
            wait_until(lambda: on_promoted.get(keys.lock), message="replicated")
        wait_until(lambda: not on_promoted.get(keys.lock))
        replication.black_hole()
        stale = make_lock(before, "a", expire=3, on_lost=told.append)
        stale.acquire()
        own_server.kill()
        assert not on_promoted.exists(keys.lock)
        on_promoted.execute_command("REPLICAOF", "NO", "ONE")
        proxy.lead_to(promoted.url)
        successor = make_lock(after, "a", expire=60)
        assert successor.acquire(timeout=5)
        assert successor.fence > stale.fence
        wait_until(lambda: told)
        with pytest.raises(LockLost):
            stale.release()
        assert successor.owned()
        successor.release()


def test_silence_longer_than_the_life_is_told_at_the_deadline(make_lock, client, proxy):
    told = []
    with client_at(proxy.url) as behind:
        lock = make_lock(behind, "a", expire=1, on_lost=lambda lock: told.append(time.monotonic()))
        lock.acquire()
        proxy.black_hole()
        silent = time.monotonic()
        wait_until(lambda: told)
        assert told[0] - silent < 1 + BUSY
        with within(0.5), pytest.raises(LockLost):
            lock.release()
        proxy.heal()


@pytest.mark.parametrize(("socket_timeout", "retries"), [(None, 0), (1, 10)])
def test_every_call_comes_back_from_a_black_hole(make_lock, own_server, socket_timeout, retries):
    timeout = socket_timeout or 5
    and_asked = timeout if ON_A_CLUSTER else 0  # which node has the slot now
    with (
        Proxy(own_server.url) as proxy,
        client_at(proxy.url, socket_timeout=socket_timeout, retry=Retry(NoBackoff(), retries)) as client,
    ):
        held = make_lock(client, "held", expire=2)
        held.acquire()
        proxy.black_hole()

        def ask():
            with within(timeout + 0.5), pytest.raises(LockBackendError):
                make_lock(client, "a").acquire(blocking=False)

        def wait():
            with within(0.3 + timeout + and_asked + 0.5), pytest.raises(LockBackendError):
                make_lock(client, "a").acquire(timeout=0.3)

        with (
            side_by_side(ask, wait),
            within(timeout + and_asked + 0.5),
            pytest.raises((LockBackendError, LockLost)),
        ):
            held.release()
        proxy.heal()
        with make_lock(client, "a", timeout=5):
            pass


def test_a_waiter_in_a_black_hole_comes_back_at_its_deadline(make_lock, own_server):
    with (
        Proxy(own_server.url) as proxy,
        client_at(proxy.url, socket_timeout=0.5) as behind,
        own_server.client() as client,
        make_lock(client, "a", expire=60),
    ):
        waiter = begin_to_wait(client, "a", make_lock(behind, "a").acquire, timeout=1.5)
        proxy.black_hole()
        with within(1.5 + 0.5), suppress(LockBackendError):  # its deadline and one socket timeout
            assert waiter.result(20) is False
        proxy.heal()


def test_a_full_server_extends_and_releases_a_lock_and_renews_all_others(make_lock, own_server):
    """An extension beyond the former expiry writes the record: refused as too large, it failed with all in its call."""
    with own_server.client() as client:
        longer, other = make_lock(client, "a", expire=0.9), make_lock(client, "b", expire=0.9)
        longer.acquire()
        other.acquire()
        client.config_set("maxmemory", "1")  # and nothing is evicted
        assert longer.extend(60)
        assert longer.ttl() > 50
        lived(0.9)
        for lock in (longer, other):
            assert lock.owned()
            lock.release()
        assert not longer.locked()


def test_a_server_that_is_down_is_a_typed_error_and_nothing_hangs(make_lock, own_server):
    with own_server.client(socket_timeout=1) as client:
        lock = make_lock(client, "a", expire=2)
        lock.acquire()
        own_server.kill()
        with within(3), pytest.raises((LockBackendError, LockLost)):
            lock.release()
        with within(1), pytest.raises(LockBackendError) as caught:
            make_lock(client, "a").acquire(blocking=False)
        assert "Connection" in caught.value.cause
        with within(7), pytest.raises(LockBackendError):
            make_lock(client, "a").acquire(timeout=1)


# A clock that jumps


@pytest.mark.parametrize("call", ["owner", "reset", "holders"])
def test_every_call_is_repeated_for_as_long_as_its_kind_of_server_needs(own_server, monkeypatch, call):
    """Calls about a lock that the caller does not hold ended after 5 s, and a failover by Sentinel takes 10 to 40."""
    monkeypatch.setattr(effects, "RETRY_FOR", 0.0)
    monkeypatch.setattr(Server, "retry_for", 40.0)
    with own_server.client() as client:
        lock = Semaphore(client, "a", 2) if call == "holders" else Lock(client, "a")
        own_server.stop()
        answer = begin(getattr(lock, call))
        own_server.start()
        assert not answer.result(60)


def test_when_the_servers_clock_jumps_fences_grow_and_a_loss_is_told(make_lock, clock):
    told = []
    with clock.client() as client:
        stale = make_lock(client, "a", expire=3, on_lost=lambda _: told.append("stale"))
        stale.acquire()
        clock.jump(3600)
        ahead = make_lock(client, "a", expire=60, on_lost=lambda _: told.append("ahead"))
        assert ahead.acquire(timeout=5), "its life is over for the server, however often it was renewed"
        assert ahead.fence > stale.fence
        wait_until(lambda: told == ["stale"])
        with pytest.raises(LockLost):
            stale.release()
        clock.jump(0)
        assert not stale.acquire(blocking=False)
        ahead.extend()
        assert 50 < ahead.ttl() <= 60
        fences = [ahead.fence]
        ahead.release()
        for offset in (0, -3600, 3600, 0):
            clock.jump(offset)
            with make_lock(client, "a", timeout=5) as lock:
                fences.append(lock.fence)
        assert fences == sorted(set(fences))
        assert told == ["stale"]


@pytest.mark.parametrize("options", [{"reentrant": True}, {"token": "mine"}], ids=["again", "by a token"])
def test_who_does_not_want_to_wait_is_told_at_once_that_the_server_is_away(own_server, monkeypatch, options):
    """Another entry, or an acquisition by a token, tried for five seconds, or forty with Sentinels."""
    pauses = []
    monkeypatch.setattr(effects, "Sleep", lambda seconds: pauses.append(seconds) or Sleep(seconds))
    token = {"token": options.pop("token")} if "token" in options else {}
    with own_server.client() as client:
        lock = (RedisPyLock if token else Lock)(client, "a", auto_renewal=False, **options)
        assert token or lock.acquire()
        own_server.kill()
        with pytest.raises(LockBackendError):
            lock.acquire(blocking=False, **token)
    assert pauses == [0.0], "the call is repeated once, over another connection"


@pytest.mark.parametrize("ahead", [3600, 365 * 86400])
def test_a_renewal_after_the_servers_clock_stepped_back_sets_the_end(make_lock, clock, ahead):
    """Renewals once kept the inflated end, so that a killed holder's lock stayed for the length of the step."""
    with clock.client() as client:
        clock.jump(ahead)
        lock = make_lock(client, "a", expire=2)
        lock.acquire()
        clock.jump(0)
        wait_until(lambda: lock.ttl() <= 2)
        lock.extend(9)
        assert 5 < lock.ttl() <= 9, "the longest expiry that the holder asked for"
        assert make_lock(client, "a", id=lock.id, expire=30).acquire(blocking=False)
        lock.extend()
        assert 25 < lock.ttl() <= 30, "another holder by the same id asked for it"
        lock.release()


def test_a_reservation_ends_although_the_servers_clock_stepped_back(make_lock, clock):
    keys = lock_keys("redislock", "a")
    with clock.client() as client, listening(client, "ghost"):
        lock = make_lock(client, "a", expire=60)
        lock.acquire()
        client.zadd(keys.queue, {"ghost\nghost-id": 1})  # listens, but never comes
        waiter = begin_to_wait(client, "a", make_lock(client, "a").acquire, timeout=20)
        lock.release()
        clock.jump(-3600)
        with within(1):
            assert waiter.result(30)
