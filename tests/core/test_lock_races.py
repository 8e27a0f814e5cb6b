"""Races that end with two holders, with none, or with a false report: each forced into the order that does harm."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager, suppress

import pytest

from django_redislock.core import Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.driver.connection import Connection
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys, milliseconds
from django_redislock.exceptions import AlreadyAcquired, LockBackendError, LockLost, NotAcquired
from tests.support import Proxy, begin, client_at, in_a_fork, lived, queued, renew_now, wait_until, within
from tests.support.locks import RLock

KEYS = lock_keys("redislock", "a")

# Commands that arrive late


def test_a_call_that_arrives_after_its_repetition_frees_nothing(proxy):
    with client_at(proxy.url) as behind:
        lock = Lock(behind, "a")
        with lock:
            pass
        late = proxy.deliver_late(containing=b"EVALSHA")
        assert lock.acquire(timeout=5), "repeated on another connection"
        assert late.held.wait(30)
        assert lock.owned()
        late.deliver.set()
        assert late.delivered.wait(30)
        assert lock.owned(), "what arrived late undid the repeated acquisition"
        lock.release()


@pytest.mark.slow
def test_a_release_that_arrives_late_ends_no_acquisition_of_the_same_object(proxy):
    """The thread entered the lock again, which was still held, and worked on beside the next holder."""
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        lock = RLock(behind, "a", auto_renewal=False)
        for _ in range(2):
            lock.acquire()
            fence = lock.fence
            late = proxy.deliver_late(containing=b"EVALSHA")
            proxy.deafen()
            with pytest.raises(LockBackendError):
                lock.release()
            assert late.held.is_set()
            proxy.heal()
            assert lock.acquire(timeout=5)
            late.deliver.set()
            assert late.delivered.wait(30)
            assert lock.owned()
            assert lock.fence > fence
            lock.release()
        assert not lock.locked()


@pytest.mark.parametrize("again", ["extend", "enter"])
def test_an_extension_that_arrives_after_a_later_one_does_not_cut_it_short(proxy, again):
    """Else the holder would believe in an expiry that Redis does not have, and a second holder would come."""
    with client_at(proxy.url) as behind:
        lock = RLock(behind, "a", expire=5, auto_renewal=False)
        lock.acquire()
        lock.extend()  # now the server knows the script
        late = proxy.deliver_late(containing=b"EVALSHA")
        assert lock.extend() if again == "extend" else lock.acquire()
        assert late.held.wait(30), "it was repeated on another connection"
        assert lock.extend(60)
        late.deliver.set()
        assert late.delivered.wait(30)
        assert lock.ttl() > 50


def test_the_acquirer_shortens_its_lock_again_when_it_got_no_answer(client, proxy):
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        lock = Lock(behind, "a", expire=60, auto_renewal=False)
        lock.acquire()
        proxy.black_hole()
        with pytest.raises(LockBackendError):
            lock.extend(20)
        proxy.heal()
        assert lock.extend()
        assert 15 < lock.ttl() <= 20
        assert lock.extend(60)
        assert lock.ttl() > 50


def end_belief(lease):
    """Let the lease's time be over now: with a real expiry, a slow machine noticed it after the late answer."""
    lease.deadline = monotonic()
    assert lease.loss


def test_an_extension_that_is_answered_after_the_deadline_keeps_nobody_out(make_lock, client, proxy):
    with client_at(proxy.url) as behind:
        lock = make_lock(behind, "a", expire=20, auto_renewal=False)
        lock.acquire()
        lease = lock._visible_lease()
        answer = proxy.hold_next_reply(containing=b"EVALSHA")
        ended = begin(answer.let_go_after, lambda: end_belief(lease))
        with pytest.raises(LockLost, match="expiry"):
            lock.extend(60)
        ended.result()
        assert make_lock(client, "a").acquire(blocking=False)


def test_a_server_that_goes_away_after_a_late_answer_is_not_waited_for(make_lock, own_server):
    """The late answer had moved the deadline, until which the release was tried again."""
    with Proxy(own_server.url) as proxy, client_at(proxy.url) as behind:
        lock = make_lock(behind, "a", expire=20, auto_renewal=False)
        lock.acquire()
        lock.extend()  # now the server knows the script
        lease = lock._visible_lease()
        answer = proxy.hold_next_reply(containing=b"EVALSHA")

        def go_away():
            own_server.kill()
            end_belief(lease)

        with within(2):  # of the five seconds for which it is tried again
            gone = begin(answer.let_go_after, go_away)
            with pytest.raises(LockLost):
                lock.extend(60)
            with pytest.raises(LockLost):
                lock.release()
            gone.result()


@pytest.mark.slow
@pytest.mark.parametrize(("auto_renewal", "entries"), [(False, 1), (True, 1), (False, 2)])
def test_an_extension_that_is_not_answered_ends_with_the_last_release(make_lock, client, proxy, auto_renewal, entries):
    """The holder cannot know that it arrived."""
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        lock = make_lock(behind, "a", expire=1.2, auto_renewal=auto_renewal, reentrant=entries > 1)
        for _ in range(entries):
            lock.acquire()
        proxy.delay_replies(0.8)
        with pytest.raises(LockBackendError):
            lock.extend(60)
        wait_until(lambda: lock.lost)
        proxy.delay_replies(0)
        for _ in range(entries):
            assert make_lock(client, "a").ttl() > 10
            why = "until its expiry ended" if auto_renewal else "its expiry ended without"
            with pytest.raises(LockLost, match=why):
                lock.release()
        assert make_lock(client, "a").acquire(blocking=False)


@pytest.mark.slow
def test_a_renewal_that_is_answered_after_the_loss_ends_with_the_release(client, proxy):
    with client_at(proxy.url) as behind:
        lock = Lock(behind, "a", expire=8)
        lock.acquire()
        lease = lock._visible_lease()
        proxy.delay_replies(1.2)
        renew_now(lock)
        wait_until(lambda: lease.renewal_pending)
        lease.deadline = monotonic()  # as after seconds without an answer
        assert lock.lost
        wait_until(lambda: not lease.renewal_pending)
        assert client.pttl(KEYS.lock) > 3_000
        with pytest.raises(LockLost):
            lock.release()
        assert not client.exists(KEYS.lock)


@pytest.mark.parametrize("by", ["extend", "acquire"])
def test_the_release_of_a_lost_lock_frees_nothing_that_was_kept_by_its_id(make_lock, client, by):
    lost = make_lock(client, "a", expire=20, auto_renewal=False)
    lost.acquire()
    other = make_lock(client, "a", id=lost.id, expire=20)
    getattr(other, by)()
    end_belief(lost._visible_lease())
    with pytest.raises(LockLost):
        lost.release()
    assert other.owned()
    other.release()


def test_the_release_of_a_lost_lock_that_was_not_extended_asks_nobody(make_lock, proxy):
    """A server that is silent by then would be waited for."""
    with client_at(proxy.url) as behind:
        lock = make_lock(behind, "a", expire=0.3, auto_renewal=False)
        lock.acquire()
        wait_until(lambda: lock.lost)
        proxy.drop_next_reply()
        with pytest.raises(LockLost):
            lock.release()
        assert proxy.dropped == 0


def test_an_unanswered_acquisition_with_a_given_id_does_not_undo_the_next_one(own_server):
    with Proxy(own_server.url) as proxy, client_at(proxy.url, socket_timeout=0.5) as behind:
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
    shared, done = Lock(client, "a", id="given"), threading.Event()

    def acquire():
        try:
            return shared.acquire(timeout=10) and not done.set()
        except AlreadyAcquired:
            return False
        finally:
            done.wait(20)

    with Lock(client, "a", expire=60):
        calls = [begin(acquire) for _ in range(2)]
        wait_until(lambda: queued(client, "a"))
        lived(0.2)
    assert sorted(call.result(30) for call in calls) == [False, True]


# Expiry


def test_the_life_in_redis_is_never_shorter_than_the_one_believed_in():
    for life in (0.0014, 0.0011, 1.2344, 1.00049, 29.9999):
        assert int(milliseconds(life)) >= life * 1000


@contextmanager
def renewal_held_up(client, where):
    """Hold up the next renewal before it is sent or when it is answered; give a function that lets it go on."""
    server, at_gate, gate, passed = server_of(client), threading.Event(), threading.Event(), threading.Event()
    renew = server.renew

    def late(*what):
        reply = renew(*what) if where == "answered" else None
        at_gate.set()
        gate.wait(10)
        reply = renew(*what) if where == "sent" else reply
        passed.set()
        return reply

    def go_on():
        gate.set()
        assert passed.wait(5)

    server.renew = late
    try:
        assert at_gate.wait(5)
        yield go_on
    finally:
        gate.set()
        del server.renew


@pytest.mark.slow
def test_a_renewal_that_overlaps_an_extension_does_not_cut_it_short(client):
    """The watchdog's call was made with the old life and arrives after the new one was set."""
    with Lock(client, "a", expire=1.5) as lock:
        with renewal_held_up(client, "sent") as go_on:
            lock.extend(60)
            go_on()
            assert lock.ttl() > 50
        lived(1.8)
        assert lock.owned()
        lock.raise_if_lost()


@pytest.mark.slow
def test_a_renewal_that_overlaps_a_shortening_does_not_let_the_belief_outlive_the_lock(client):
    """The watchdog's call was made with the old life, and is answered after the new one was set."""
    with Lock(client, "a", expire=3) as lock:
        with renewal_held_up(client, "answered") as go_on:
            lock.extend(0.5)
            go_on()
            wait_until(lambda: lock._visible_lease().next_renewal <= monotonic() + 0.2)
            assert lock._visible_lease().deadline <= monotonic() + 0.5
        lived(1)
        assert lock.owned()


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


@pytest.mark.slow
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

    execute, thread = Connection.execute, threading.get_ident()

    def interrupt(*args):
        if threading.get_ident() != thread:  # the one that gives the lock back
            return execute(*args)
        raise KeyboardInterrupt

    lock = Lock(client, "a")
    gone = weakref.ref(lock)
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "execute", interrupt)
        gc.disable()
        try:
            with suppress(KeyboardInterrupt):
                lock.acquire()
            del lock
            assert gone() is None
        finally:
            gc.enable()
