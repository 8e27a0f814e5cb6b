"""Races that end with two holders, with none, or with a false report: each forced into the order that does harm."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import weakref
from contextlib import contextmanager, suppress

import pytest
import redis

from django_redislock.core import AsyncLock, Lock, RLock
from django_redislock.core.clock import monotonic
from django_redislock.core.driver import wakeups
from django_redislock.core.driver.connection import ScriptConnection
from django_redislock.core.driver.server import server_of
from django_redislock.core.keys import milliseconds
from django_redislock.exceptions import AlreadyAcquired, LockBackendError, LockLost, NotAcquired
from tests.support import BUSY, Proxy, in_a_fork, lived, monitoring, queued, say, wait_until


def start(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


class LateProxy(Proxy):
    """Closes one connection towards the client at its next EVALSHA, and brings what it said to the server only later."""

    def __init__(self, url):
        super().__init__(url)
        self._direct = url
        self.armed = False
        self.held = threading.Event()
        self.deliver = threading.Event()
        self.delivered = threading.Event()

    def _note_request(self, link, data):
        if not self.armed or b"EVALSHA" not in data:
            return super()._note_request(link, data)
        self.armed = False
        link.client.shutdown(socket.SHUT_WR)
        while more := link.client.recv(65536):
            data += more
        self.held.set()
        self.deliver.wait(30)
        port = link.server.getsockname()[1]
        link.server.sendall(data)
        with suppress(OSError):  # the answer found nobody, and closed it
            link.server.shutdown(socket.SHUT_WR)
        wait_until(lambda: self._ended(port))
        self.delivered.set()
        raise OSError("said all")

    def _ended(self, port):
        """Whether the server has read everything from that port and closed the connection."""
        with redis.Redis.from_url(self._direct) as client:
            return not any(found["addr"].endswith(f":{port}") for found in client.client_list())


# Commands that arrive late


def test_a_call_that_arrives_after_its_repetition_frees_nothing(client, redis_url):
    with LateProxy(redis_url) as proxy, redis.Redis.from_url(proxy.url) as behind:
        lock = Lock(behind, "a")
        with lock:
            pass
        proxy.armed = True
        assert lock.acquire(timeout=5), "repeated on another connection"
        assert proxy.held.wait(30)
        assert lock.owned()
        proxy.deliver.set()
        assert proxy.delivered.wait(30)
        assert lock.owned(), "what arrived late undid the repeated acquisition"
        lock.release()


def test_an_unanswered_acquisition_with_a_given_id_does_not_undo_the_next_one(client, own_server):
    with Proxy(own_server.url) as proxy, redis.Redis.from_url(proxy.url, socket_timeout=0.5) as behind:
        with Lock(behind, "b"):
            pass
        proxy.stall()
        with pytest.raises(LockBackendError):
            Lock(behind, "a", id="given").acquire(timeout=0)
        with own_server.client() as direct:
            again = Lock(direct, "a", id="given", expire=60)
            assert again.acquire(timeout=5)
            before = direct.info("commandstats").get("cmdstat_eval", {"calls": 0})["calls"]
            proxy.heal()
            lived(0.5)
            assert again.owned(), (before, direct.info("commandstats").get("cmdstat_eval"))
            again.release()


# One id, several acquisitions


def test_a_receipt_is_only_for_its_own_acquisition(client):
    """Released and acquired again with the same id, then lost: that release must not say all was well."""
    lock = Lock(client, "a", id="given", auto_renewal=False)
    lock.acquire()
    lock.release()
    lock.acquire()
    Lock(client, "a").reset()
    with pytest.raises(LockLost):
        lock.release()


def test_a_force_released_holder_does_not_live_on_in_its_successor_of_the_same_id(client):
    stale = Lock(client, "a", id="given", expire=0.9)
    stale.acquire()
    Lock(client, "a").reset()
    successor = Lock(client, "a", id="given", expire=30)
    successor.acquire(blocking=False)
    wait_until(lambda: stale.lost, timeout=10, message="the former holder is told")
    with pytest.raises(LockLost):
        stale.release()
    assert successor.owned()
    successor.release()


def test_threads_that_share_an_object_with_a_given_id_never_hold_it_both(client):
    shared = Lock(client, "a", id="given")
    results = []

    def acquire():
        try:
            results.append(shared.acquire(timeout=10))
        except AlreadyAcquired:
            results.append(False)
        else:
            done.wait(20)

    done = threading.Event()
    with Lock(client, "a", expire=60):
        threads = [start(acquire) for _ in range(2)]
        wait_until(lambda: queued(client, "a") or results)
        lived(0.2)
    wait_until(lambda: len(results) == 2)
    done.set()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [False, True]


# Lives


def test_the_life_in_redis_is_never_shorter_than_the_one_believed_in():
    for life in (0.0014, 0.0011, 1.2344, 1.00049, 29.9999):
        assert int(milliseconds(life)) >= life * 1000


def test_a_renewal_that_overlaps_an_extension_does_not_cut_it_short(client):
    """The watchdog's call was made with the old life and arrives after the new one was set."""
    server = server_of(client)
    lock = Lock(client, "a", expire=3)
    call, at_gate, gate, arrived = server.renew, threading.Event(), threading.Event(), threading.Event()

    def late(*what):
        at_gate.set()
        gate.wait(10)
        reply = call(*what)
        arrived.set()
        return reply

    with lock:
        server.renew = late
        try:
            assert at_gate.wait(5)
            lock.extend(60)
            gate.set()
            assert arrived.wait(5)
            assert lock.ttl() > 50
        finally:
            gate.set()
            del server.renew
        lived(3.2)
        assert lock.owned()
        lock.raise_if_lost()


def test_a_renewal_that_overlaps_a_shortening_does_not_let_the_belief_outlive_the_lock(client):
    """The watchdog's call was made with the old life, and is answered after the new one was set."""
    server = server_of(client)
    lock = Lock(client, "a", expire=3)
    call, at_gate, gate, answered = server.renew, threading.Event(), threading.Event(), threading.Event()

    def late(*what):
        reply = call(*what)
        at_gate.set()
        gate.wait(10)
        answered.set()
        return reply

    with lock:
        server.renew = late
        try:
            assert at_gate.wait(5)
            lock.extend(0.5)
            gate.set()
            assert answered.wait(5)
            wait_until(lambda: lock._visible_lease().next_renewal <= monotonic() + 0.2)
            assert lock._visible_lease().deadline <= monotonic() + 0.5
        finally:
            gate.set()
            del server.renew
        lived(1)
        assert lock.owned()


# The waiting room


class ForgetfulProxy(Proxy):
    """Lets subscriptions die as a router does that forgot them: the server has closed them, and the client hears nothing."""

    def __init__(self, url):
        super().__init__(url)
        self.subscriptions = []
        self.forgotten = []

    def _note_request(self, link, data):
        super()._note_request(link, data)
        if b"\nSUBSCRIBE" in data:
            self.subscriptions.append(link)

    def forget(self):
        for link in self.subscriptions:
            link.close = lambda: None
            link.server.shutdown(socket.SHUT_RDWR)
            self.forgotten.append(link)
        self.subscriptions = []

    def close(self):
        for link in self.forgotten:
            del link.close
            link.close()
        super().close()


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


def test_a_subscription_that_died_in_silence_starves_no_thread(client, redis_url, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", 0.5)
    with ForgetfulProxy(redis_url) as proxy, redis.Redis.from_url(proxy.url) as behind:
        with Lock(client, "a"):
            assert not Lock(behind, "a").acquire(timeout=0.1)
        proxy.forget()
        with contention(client, "a"):
            lock = Lock(behind, "a")
            assert lock.acquire(timeout=10)
            lock.release()


def test_a_subscription_that_died_in_silence_starves_no_task(client, redis_url, monkeypatch):
    monkeypatch.setattr(wakeups, "QUIET", 0.5)

    async def main():
        with Lock(client, "a"):
            assert not await AsyncLock(behind, "a").acquire(timeout=0.1)
        proxy.forget()
        with contention(client, "a"):
            lock = AsyncLock(behind, "a")
            assert await lock.acquire(timeout=10)
            await lock.release()

    with ForgetfulProxy(redis_url) as proxy, redis.Redis.from_url(proxy.url) as behind:
        asyncio.run(main())


def subscriptions(client):
    return {found["id"] for found in client.client_list() if int(found["sub"])}


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
    client = redis.Redis.from_url(url)

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


# False reports


@pytest.mark.processes
def test_a_forked_child_reports_no_loss_of_its_parents_lock(client, caplog):
    told = []
    lock = Lock(client, "a", expire=1.5, on_lost=told.append)
    lock.acquire()

    def child():
        lived(2)
        assert lock.lost is None
        with pytest.raises(NotAcquired):
            lock.raise_if_lost()
        assert told == []

    in_a_fork(child)
    lock.release()


def test_a_released_reentrant_lock_is_not_reported_as_lost(client, caplog):
    first, second = RLock(client, "a", expire=1.5), RLock(client, "a", expire=1.5)
    with first, second:
        pass
    with first:
        second.acquire()
        second.release()
    lived(1.7)
    assert second.lost is None
    assert first.lost is None
    assert "was lost" not in caplog.text


def test_an_interrupted_call_keeps_no_lock_alive(client, monkeypatch):
    """Else the watchdog would renew what nobody holds, until the garbage is collected."""

    def interrupt(*args):
        raise KeyboardInterrupt

    lock = Lock(client, "a")
    gone = weakref.ref(lock)
    with monkeypatch.context() as patch:
        patch.setattr(ScriptConnection, "call", interrupt)
        gc.disable()
        try:
            with suppress(KeyboardInterrupt):
                lock.acquire()
            del lock
            assert gone() is None
        finally:
            gc.enable()
