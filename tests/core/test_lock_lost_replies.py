"""Replies that get lost or come late."""

from __future__ import annotations

import threading

import pytest
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redislock.core import Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.driver import effects
from django_redislock.core.driver.connection import Connection
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError, NotAcquired
from tests.support import (
    TimeLimit,
    begin,
    begin_to_wait,
    client_at,
    counting,
    enter,
    free_port,
    lived,
    queued,
    wait_until,
    within,
)

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("retries", [0, 10])
def test_a_lost_reply_to_acquire_is_no_ghost_lock_and_one_to_release_no_false_error(make_lock, client, proxy, retries):
    with client_at(proxy.url, retry=Retry(NoBackoff(), retries)) as behind:
        lock = make_lock(behind, "a")
        with lock:
            pass
        proxy.drop_next_reply(containing=b"EVALSHA")
        assert lock.acquire(blocking=False), "yours, whatever became of the reply"
        assert proxy.dropped == 1
        assert lock.owned()
        proxy.drop_next_reply(containing=b"EVALSHA")
        lock.release()
        assert proxy.dropped == 2
    assert not make_lock(client, "a").locked()


@pytest.mark.parametrize("before", ["close"])
def test_the_reply_to_a_call_whose_end_was_interrupted_passes_for_no_other_ones(client, proxy, monkeypatch, before):
    """A soft time limit came after the socket's timeout and before the connection was closed. The next caller read the
    grant of another lock, and believed that it had acquired one that somebody else held."""
    end = getattr(Connection, before)

    def interrupted(connection, *args):
        if not left or threading.get_ident() != this_thread:  # a thread that another test left closes its own
            return end(connection, *args)
        left.clear()
        proxy.heal()  # the replies come now: to the release of the interrupted acquisition, too
        raise TimeLimit

    left, this_thread = [1], threading.get_ident()
    with Lock(client, "b"), client_at(proxy.url, socket_timeout=0.5) as behind:
        enter(Lock(behind, "c"))
        proxy.stall()
        monkeypatch.setattr(Connection, before, interrupted)
        with pytest.raises(TimeLimit):
            Lock(behind, "a").acquire(blocking=False)
        assert not Lock(behind, "b").acquire(blocking=False)
        assert Lock(behind, "d").acquire(blocking=False)


def release_unanswered(lock, proxy, arrives):
    """Acquire the lock, and release it without an answer; `arrives`: the server executes the release."""
    lock.acquire()
    if arrives:
        proxy.drop_next_reply(containing=b"EVALSHA")
        proxy.deafen()
    else:
        proxy.black_hole()
    with pytest.raises(LockBackendError):
        lock.release()


@pytest.mark.parametrize("reentrant", [False, True])
def test_after_a_release_without_an_answer_only_the_release_may_be_repeated(make_lock, proxy, reentrant):
    """It may arrive late: who extended the lock, which was still held, worked on beside the next holder."""
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        lock = make_lock(behind, "a", expire=60, reentrant=reentrant)
        release_unanswered(lock, proxy, arrives=False)
        with pytest.raises(NotAcquired):
            lock.raise_if_lost()
        proxy.heal()
        with pytest.raises(NotAcquired):
            lock.extend()
        lock.release()
        assert not lock.locked()


def test_a_release_whose_answer_did_not_come_may_be_repeated_after_the_expiry(make_lock, proxy, caplog):
    """It raised LockLost, and the log said that the lock was lost."""
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        lock = make_lock(behind, "a", expire=0.5, auto_renewal=False)
        release_unanswered(lock, proxy, arrives=True)
        lived(0.5)
        assert lock.lost is None
        proxy.heal()
        lock.release()
    assert "was lost" not in caplog.text


@pytest.mark.parametrize("expire", [0.5, 60])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_lock_object_whose_release_was_not_answered_acquires_anew(make_lock, proxy, reentrant, expire):
    """It raised AlreadyAcquired until the expiry; a re-entrant one raised LockLost from then on, for ever."""
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        lock = make_lock(behind, "a", expire=expire, auto_renewal=False, reentrant=reentrant)
        release_unanswered(lock, proxy, arrives=False)
        lived(min(expire, 0.5))
        proxy.heal()
        with lock:
            assert lock.owned()
        assert not lock.locked()


@pytest.mark.parametrize("id", [None, "given"])
def test_a_thread_that_ended_after_a_release_without_an_answer_keeps_nobody_out_after_the_expiry(proxy, id):
    """With a given id everybody else got AlreadyAcquired for ever, and helpers of the next holder saw no lock."""
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        lock = Lock(behind, "a", expire=0.5, auto_renewal=False, id=id)
        begin(release_unanswered, lock, proxy, arrives=False).result(10)
        lived(0.5)
        proxy.heal()
        with Lock(behind, "b"):  # the connections are open again
            pass
        assert lock.acquire()
        assert begin(lambda: lock.fence).result(10) == lock.fence
        assert len(lock._leases) == 1
        lock.release()


def test_an_acquisition_by_the_same_id_fails_while_the_release_may_still_arrive(
    make_lock, client, redis_url, proxy, caplog, monkeypatch
):
    """It was the acquisition that the first release ended when it arrived."""
    monkeypatch.setattr(effects, "retry_for", 1.0)
    with client_at(proxy.url) as behind:
        lock = make_lock(behind, "a", expire=60, id="given")
        lock.acquire()
        first = proxy.deliver_late(containing=b"EVALSHA")
        proxy.lead_new_to(f"redis://127.0.0.1:{free_port()}")
        with pytest.raises(LockBackendError):
            lock.release()
        failures = caplog.text.count("did not answer")
        back = begin(
            lambda: wait_until(lambda: caplog.text.count("did not answer") > failures) and proxy.lead_new_to(redis_url)
        )
        with pytest.raises(LockBackendError):
            lock.acquire()
        back.result()
        first.deliver.set()
        assert first.delivered.wait(10)
        wait_until(lambda: not make_lock(client, "a").locked())
        assert lock.acquire()
        lock.release()


def test_after_the_expiry_an_acquisition_waits_for_the_server_that_did_not_answer_the_release(
    make_lock, own_server, caplog, monkeypatch
):
    """The repeated release failed at once, because the lock had ended, and the acquisition with it."""
    with own_server.client() as client:
        lock = make_lock(client, "a", expire=20, auto_renewal=False)
        lock.acquire()
        lease = lock._visible_lease()
        own_server.kill()
        with monkeypatch.context() as patch, pytest.raises(LockBackendError):
            patch.setattr(effects, "retry_for", 0.1)
            lock.release()
        lease.deadline = monotonic()  # its expiry is over
        failures = caplog.text.count("did not answer")
        started = begin(
            lambda: wait_until(lambda: caplog.text.count("did not answer") > failures) and own_server.start()
        )
        assert lock.acquire(timeout=60)
        started.result()
        lock.release()


def test_a_lost_reply_to_reset_still_tells_that_the_lock_was_held(make_lock, client, proxy):
    with client_at(proxy.url) as behind:
        holder = make_lock(client, "a")
        holder.acquire()
        assert make_lock(behind, "b").reset() is False
        proxy.drop_next_reply(containing=b"EVALSHA")
        assert make_lock(behind, "a").reset(fence=holder.fence) is True
        assert proxy.dropped == 1
    assert not holder.locked()


def test_a_repeated_release_does_not_free_the_next_holders_lock(make_lock, client, proxy):
    with client_at(proxy.url) as behind:
        first, second = make_lock(behind, "a"), make_lock(client, "a", timeout=10)
        first.acquire()
        waiter = begin_to_wait(client, "a", second.acquire)
        proxy.drop_next_reply(containing=b"EVALSHA")
        first.release()
        assert waiter.result(5)
        assert second.locked()


def test_lost_replies_to_waiters_lose_nothing(make_lock, client, proxy, monkeypatch):
    # On a busy machine three tries may take longer than the 5 s of the default.
    monkeypatch.setattr(effects, "retry_for", 60.0)
    with (
        client_at(proxy.url, socket_timeout=60) as behind,
        make_lock(client, "a", expire=60) as holder,
    ):
        with make_lock(behind, "b"):
            pass
        proxy.drop_next_reply(n=3, containing=b"EVALSHA")
        waiter = begin(enter, make_lock(behind, "a", timeout=60))
        wait_until(lambda: proxy.dropped == 3 or waiter.done())
        wait_until(lambda: queued(client, "a") == 1 or waiter.done())
        holder.release()
        with within(2):
            assert waiter.result(10)
        holder.acquire()


def test_a_renewal_that_fails_once_loses_nothing(make_lock, client, proxy, caplog):
    told = []
    with client_at(proxy.url) as behind:
        lock = make_lock(behind, "a", expire=2, on_lost=told.append)
        with lock:
            id = lock.id
            proxy.drop_next_reply(containing=b"EVALSHA")
            wait_until(lambda: proxy.dropped == 1)
            lived(2.3)
            assert lock.owner().id == id
            lock.raise_if_lost()
    assert told == []
    assert "is tried again" in caplog.text


def test_a_reply_that_comes_late_never_makes_the_belief_outlive_the_lock(make_lock, client, proxy):
    with client_at(proxy.url, socket_timeout=5) as behind:
        lock = make_lock(behind, "a", expire=20, auto_renewal=False)
        with lock:
            pass
        proxy.delay_replies(1)
        lock.acquire()
        proxy.delay_replies(0)
        ttl = client.pttl(lock_keys("redislock", "a").lock) / 1000
        deadline = lock._visible_lease().deadline - monotonic()
        assert deadline <= ttl + 0.001, "Redis tells whole milliseconds"
        lock.release()


def test_an_acquisition_that_is_answered_after_its_expiry_is_repeated(make_lock, client, proxy):
    with client_at(proxy.url, socket_timeout=5) as behind:
        lock = make_lock(behind, "a", expire=2, auto_renewal=False)
        with lock:
            pass
        grant = proxy.hold_next_reply(containing=b"EVALSHA")
        ended = begin(
            grant.let_go_after, lambda: wait_until(lambda: not client.exists(lock_keys("redislock", "a").lock))
        )
        assert lock.acquire()
        ended.result()
        lock.raise_if_lost()
        lock.release()


def test_a_refusal_that_comes_after_the_expiry_is_not_asked_for_again(make_lock, client, proxy):
    """Nothing was granted: the call took twice its time."""
    with client_at(proxy.url, socket_timeout=5) as behind, make_lock(client, "a"):
        lock = make_lock(behind, "a", expire=0.1)
        assert not lock.acquire(blocking=False)
        proxy.delay_replies(0.2)
        with counting(client) as counts:
            assert not lock.acquire(blocking=False)
        assert counts["evalsha"] == 1
