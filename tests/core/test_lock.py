"""Acquire, release, extend, reset: one client, one server, no faults."""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import wait
from datetime import UTC, datetime, timedelta

import pytest

from django_redislock import AcquireTimeout, AlreadyAcquired, LockLost, NotAcquired
from django_redislock.core import Lock
from django_redislock.core.keys import lock_keys
from tests.support import begin, begin_to_wait, counting, enter, in_thread, wait_until


def test_a_lock_has_one_holder(make_lock, client):
    first, second = make_lock(client, "a"), make_lock(client, "a")
    assert first.acquire()
    assert not second.acquire(blocking=False)
    assert first.owned()
    assert not second.owned()
    assert second.locked()
    first.release()
    assert not second.locked()
    assert second.acquire(blocking=False)
    second.release()


def test_a_cycle_that_nobody_waits_for_costs_the_server_twelve_commands(make_lock, client):
    with make_lock(client, "a"):
        pass
    with counting(client) as counts, make_lock(client, "a"):
        pass
    for of_what_is_over in ("zrangebyscore", "zremrangebyrank", "zrem"):  # sometimes
        counts.pop(of_what_is_over, None)
    acquire = {"evalsha": 1, "time": 1, "exists": 1, "zadd": 1, "pexpire": 1, "set": 2}
    release = {"evalsha": 1, "get": 1, "exists": 1, "zadd": 1, "pexpire": 1, "del": 1}
    assert counts == Counter(acquire) + Counter(release)


def test_with_releases_also_when_the_body_raises(make_lock, client):
    with pytest.raises(ZeroDivisionError), make_lock(client, "a"):
        raise ZeroDivisionError
    assert not make_lock(client, "a").locked()


def test_with_never_runs_the_body_without_the_lock(make_lock, client):
    with make_lock(client, "a"):
        for options in ({"blocking": False}, {"timeout": 0}, {"timeout": 0.05}):
            with pytest.raises(AcquireTimeout) as caught, make_lock(client, "a", **options):
                pytest.fail("the body ran")
            assert isinstance(caught.value, TimeoutError)
            assert caught.value.name == "a"


def test_release_tells_what_was_never_held_from_what_was_lost(make_lock, client):
    lock = make_lock(client, "a", auto_renewal=False)
    with pytest.raises(NotAcquired):
        lock.release()
    lock.acquire()
    client.delete(lock_keys("redislock", "a").lock)
    with pytest.raises(LockLost) as caught:
        lock.release()
    assert caught.value.record.name == "a"
    with pytest.raises(NotAcquired):
        lock.release()
    assert lock.acquire(blocking=False), "a lost lock's object can be used again"
    lock.release()


@pytest.mark.parametrize("made", [{"blocking": False}, {"timeout": 0}, {"timeout": 0.2}], ids=repr)
def test_acquire_without_arguments_waits_as_the_object_was_made(make_lock, client, made):
    lock = make_lock(client, "a", **made)
    with make_lock(client, "a"):
        assert in_thread(lock.acquire) is False
    assert lock.acquire()
    lock.release()


@pytest.mark.slow
def test_what_is_given_to_acquire_goes_before_what_the_object_was_made_with(make_lock, client):
    def ends(arguments, seconds=60, **made):
        """Return whether it ends within so many seconds while another one holds the lock."""
        lock = make_lock(client, "a", **made)
        with make_lock(client, "a"):
            call = begin(lock.acquire, **arguments)
            wait_until(lambda: call.done() or lock.owner().waiting == 1)
            ended = bool(wait([call], seconds).done)
        assert call.result(60) is not ended
        lock.reset()
        return ended

    assert not ends({}, 0.5)
    assert not ends({"timeout": 20}, 0.5, blocking=False)
    assert not ends({"timeout": None}, 0.5, timeout=0.1)
    assert not ends({"blocking": True}, 0.5, blocking=False)
    assert ends({"blocking": True}, timeout=0.1)
    assert ends({"blocking": False})
    assert ends({"blocking": False}, timeout=300)
    assert ends({"timeout": 0.1}, timeout=300)
    assert ends({"blocking": True, "timeout": 0.1})


def test_the_same_object_twice_in_one_thread_raises_instead_of_hanging(make_lock, client):
    lock = make_lock(client, "a")
    with lock, pytest.raises(AlreadyAcquired):
        lock.acquire()


def test_threads_that_share_an_object_take_turns_and_cannot_release_for_each_other(make_lock, client):
    lock = make_lock(client, "a", expire=5)
    inside, most, order = [], [], []

    def work(number):
        with lock:
            inside.append(1)
            most.append(len(inside))
            order.append(number)
            fence = lock.fence
            time.sleep(0)
            assert lock.fence == fence
            inside.pop()

    def release_refused():
        with pytest.raises(NotAcquired):
            lock.release()
        return not lock.owned()

    with lock:
        assert in_thread(release_refused)
        assert lock.owned()
        turns = [begin_to_wait(client, "a", work, number) for number in range(6)]
    for turn in turns:
        turn.result(20)
    assert most == [1] * 6
    assert order == list(range(6))


def test_the_id_lets_another_object_release_and_extend(make_lock, client):
    lock = make_lock(client, "a", expire=5, auto_renewal=False)
    lock.acquire()
    other = make_lock(client, "a", id=lock.id)
    other.extend(60)
    assert lock.ttl() > 50
    other.release()
    assert not lock.locked()
    with pytest.raises(LockLost):
        lock.release()


def test_an_object_with_a_given_id_that_acquired_nothing_does_not_say_that_the_lock_is_held(make_lock, client):
    """`raise_if_lost` passed, whoever held the lock, and the caller took its next step."""
    other = make_lock(client, "a", id="mine")
    with make_lock(client, "a"), pytest.raises(NotAcquired):
        other.raise_if_lost()
    other.acquire()
    other.raise_if_lost()
    other.release()


@pytest.mark.parametrize("id", [None, "mine"])
def test_by_a_given_id_a_life_is_made_longer_but_not_shorter(make_lock, client, id):
    """The holder believes in the life that it asked for."""
    holder = make_lock(client, "a", expire=40, auto_renewal=False, id=id)
    holder.acquire()
    other = make_lock(client, "a", id=holder.id, expire=1, auto_renewal=False)
    other.extend()
    other.extend(1)
    assert holder.ttl() > 30
    assert other.acquire(blocking=False)
    assert other.fence == holder.fence
    assert holder.ttl() > 30
    other.extend(1)
    other.raise_if_lost()
    assert holder.ttl() > 30
    make_lock(client, "a", id=holder.id).extend(60)
    assert 50 < holder.ttl() <= 60
    longer = make_lock(client, "a", id=holder.id, expire=80, auto_renewal=False)
    assert longer.acquire(blocking=False)
    assert 70 < holder.ttl() <= 80
    holder.extend(20)
    assert 10 < holder.ttl() <= 20, "who acquired it may"
    holder.release()


def test_an_answer_that_comes_late_does_not_shorten_the_belief(make_lock, client):
    """A renewal was on its way while the lock was extended, and its answer came after that of the extension."""
    lock = make_lock(client, "a", expire=20, auto_renewal=False)
    lock.acquire()
    (lease,) = lock._leases.values()
    sent = lease.acquired
    lock.extend(60)
    deadline = lease.deadline
    lease.renewed(sent, 20)
    assert lease.deadline == deadline > sent + 59
    lock.release()


def test_an_id_that_holds_nothing_has_lost_nothing(make_lock, client, caplog):
    stranger = make_lock(client, "a", id="nobody", on_lost=lambda lock: pytest.fail("nothing was lost"))
    for operation in (stranger.release, stranger.extend):
        with pytest.raises(NotAcquired):
            operation()
    assert "lost" not in caplog.text


def test_extend_sets_a_new_life(make_lock, client):
    lock = make_lock(client, "a", expire=5, auto_renewal=False)
    with pytest.raises(NotAcquired):
        lock.extend()
    with lock:
        lock.extend(timedelta(seconds=50))
        assert 45 < lock.ttl() <= 50
        lock.extend(2)
        assert lock.ttl() <= 2
        client.flushdb()
        with pytest.raises(LockLost):
            lock.extend()
        with pytest.raises(LockLost):
            lock.raise_if_lost()
        lock.acquire()


def test_the_owner_is_known(client):
    lock = Lock(client, "a", expire=12.5, label="invoice 42")
    assert lock.owner() is None
    assert lock.ttl() is None
    with lock:
        owner = Lock(client, "a").owner()
        assert (owner.name, owner.id, owner.fence, owner.kind) == ("a", lock.id, lock.fence, "lock")
        assert (owner.label, owner.thread, owner.expire, owner.auto_renewal) == ("invoice 42", "MainThread", 12.5, True)
        assert owner.pid > 0
        assert owner.host
        assert "invoice 42" in owner.holder
        assert abs(owner.acquired_at - datetime.now(UTC)) < timedelta(minutes=1)
        assert 0 <= owner.age < 10
        assert 2 < owner.ttl <= 12.5


def test_reset_takes_the_lock_from_whoever_holds_it(make_lock, client, caplog):
    lock = make_lock(client, "a")
    assert lock.reset() is False
    lock.acquire()
    assert make_lock(client, "a").reset(fence=lock.fence - 1) is False
    assert lock.owned()
    assert make_lock(client, "a").reset(fence=lock.fence) is True
    assert "force-released" in caplog.text
    assert not lock.locked()
    with pytest.raises(LockLost):
        lock.release()


def test_reset_wakes_the_next_waiter(make_lock, client):
    make_lock(client, "a", expire=60).acquire()
    waiter = begin_to_wait(client, "a", enter, make_lock(client, "a", timeout=20))
    make_lock(client, "a").reset()
    assert waiter.result(20)


def test_events_are_logged(make_lock, client, caplog):
    caplog.set_level(logging.DEBUG, "django_redislock")
    with make_lock(client, "a"):
        pass
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]


def test_the_bodys_exception_is_not_replaced_by_that_of_the_release(make_lock, client, caplog):
    lock = make_lock(client, "a", auto_renewal=False)
    with pytest.raises(ValueError, match="mine") as caught, lock:
        make_lock(client, "a").reset()
        raise ValueError("mine")
    assert isinstance(caught.value.__context__, LockLost)
    assert "could not be released" in caplog.text


def test_a_body_that_fails_after_several_locks_were_lost_ends(make_lock, client):
    with pytest.raises(ZeroDivisionError), make_lock(client, "a"), make_lock(client, "b"), make_lock(client, "c"):
        client.flushdb()
        raise ZeroDivisionError


@pytest.mark.slow
def test_max_hold_ends_the_renewal_and_the_end_is_told(make_lock, client, caplog):
    told = []
    lock = make_lock(client, "a", expire=1, max_hold=1.2, on_lost=told.append)
    lock.acquire()
    acquired = time.monotonic()
    wait_until(lambda: told)
    assert time.monotonic() - acquired >= 1.15
    assert "max_hold = 1.2 s" in caplog.text
    wait_until(lambda: not lock.locked())  # the holder's belief ends before the lock does
    with pytest.raises(LockLost):
        lock.raise_if_lost()
    with pytest.raises(LockLost):
        lock.release()
    assert len(told) == 1


# Fences


def test_fences_grow_over_release_expiry_reset_and_loss_of_the_data(make_lock, client):
    fences = []
    for end in ("release", "expiry", "reset", "flush", "release"):
        lock = make_lock(client, "a", expire=0.05 if end == "expiry" else 30, auto_renewal=False)
        lock.acquire()
        fences.append(lock.fence)
        if end == "release":
            lock.release()
        elif end == "reset":
            make_lock(client, "a").reset()
        elif end == "flush":
            client.flushall()
        else:
            wait_until(lambda: not make_lock(client, "a").locked())
    assert fences == sorted(set(fences))


def test_fences_grow_when_the_clock_steps_back(make_lock, client):
    with make_lock(client, "a") as lock:
        fence = lock.fence
    ahead = fence + 3_600_000_000  # what the counter holds after the clock was set back by an hour
    client.set(lock_keys("redislock", "a").fence, ahead, ex=3600)
    with lock:
        assert lock.fence == ahead + 1


def test_a_stale_holder_never_sees_its_successors_fence(make_lock, client):
    stale = make_lock(client, "a", auto_renewal=False)
    stale.acquire()
    make_lock(client, "a").reset()
    fence = stale.fence
    with make_lock(client, "a") as successor:
        assert successor.fence > fence
        assert stale.fence == fence
