"""A lock that goes from a message to its execution, and the mark of what has been worked off."""

from __future__ import annotations

import threading

import pytest

from django_redislock import LockLost, NotAcquired
from django_redislock.core import Lock
from django_redislock.core.handover import Delivery, Ending, ExecutionLock, waiting_id
from tests.support import BUSY, lived, wait_until

FIRST = Delivery("task", "task:0:", again=False)
COPY = FIRST._replace(again=True)


@pytest.fixture
def lock(client):
    """Make a lock of one name; give an `id` for a message and a `delivery` for an execution."""

    def lock(**options):
        return ExecutionLock(client, "name", expire=30).named("name", **options)

    return lock


def test_an_execution_takes_over_what_its_message_holds(lock):
    message, execution = lock(id="task", auto_renewal=False), lock(delivery=FIRST, details={"worker": "w"})
    assert message.acquire(blocking=False)
    before = message.owner()
    assert execution.acquire(blocking=False)
    after = execution.owner()
    assert after.fence > before.fence
    assert (before.worker, after.worker) == ("", "w")
    assert message.free() is False
    assert execution.owned()
    execution.release()
    assert execution.owner() is None


def test_nobody_else_takes_it_over(lock):
    lock(id="task", auto_renewal=False).acquire()
    other = lock(delivery=Delivery("another", "", again=False))
    assert not other.acquire(blocking=False)
    assert not other.worked_off


def test_a_copy_does_not_take_over_from_a_living_execution(lock):
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    assert execution.acquire(blocking=False)
    assert not copy.acquire(blocking=False)
    assert not copy.worked_off
    assert not lock(id="task").acquire(blocking=False), "nor does what it publishes"


def test_what_is_not_confirmed_ends_with_the_life_of_its_mark(lock):
    """Whoever ran it died before its result was stored: then a copy may be the only one."""
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    execution.acquire()
    execution.ending = Ending(marked=1)
    execution.release()
    assert not copy.acquire(blocking=False)
    assert not copy.worked_off
    assert copy.acquire(timeout=1 + BUSY)
    copy.release()


def test_what_is_confirmed_is_worked_off(client, lock):
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    execution.acquire()
    execution.ending = Ending(marked=30)
    execution.release()
    execution.confirm(30)
    assert not copy.acquire(timeout=10)
    assert copy.worked_off
    retry = lock(delivery=Delivery("task", "task:1:", again=True))
    assert retry.acquire(blocking=False), "another message of the same task"
    retry.release()


def test_the_copy_that_waits_learns_that_it_was_worked_off(client, lock):
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    execution.acquire()
    execution.ending = Ending(marked=1)
    answers = []
    thread = threading.Thread(target=lambda: answers.append((copy.acquire(timeout=20), copy.worked_off)))
    thread.start()
    wait_until(lambda: copy.owner().waiting == 1)
    execution.release()
    execution.confirm(30)
    thread.join(timeout=30)
    assert answers == [(False, True)]
    assert copy.owner() is None
    assert not client.exists(copy._keys.queue)


def test_a_mark_is_left_also_where_the_lock_was_lost(client, lock):
    execution, copy = lock(delivery=FIRST), lock(delivery=COPY)
    execution.acquire()
    execution.reset()
    execution.ending = Ending(marked=30)
    with pytest.raises(LockLost):
        execution.release()
    assert not copy.acquire(blocking=False)


def test_a_lock_that_is_kept_is_somebody_elses_for_its_life(lock):
    execution = lock(delivery=FIRST)
    execution.acquire()
    execution.ending = Ending(keep_id="task", keep=20)
    execution.release()
    with pytest.raises(NotAcquired):
        execution.release()
    assert 0 < execution.ttl() <= 20
    again = lock(delivery=FIRST)
    assert again.acquire(blocking=False), "the id that keeps it is its own message's"
    again.release()


def test_an_execution_waits_its_turn_among_other_locks(client, lock):
    execution = lock(delivery=FIRST)
    with Lock(client, "name"):
        assert not execution.acquire(timeout=0.01)
    assert not client.exists(execution._keys.queue)
    assert execution.acquire(blocking=False)
    execution.release()


@pytest.mark.parametrize("task_id", ["", "a b", "ü", "x" * 1000, "a:b\n"])
def test_any_task_id_gives_an_owner_id(lock, task_id):
    message = lock(id=waiting_id(task_id))
    assert message.acquire(blocking=False)
    execution = lock(delivery=Delivery(waiting_id(task_id), "", again=False))
    assert execution.acquire(blocking=False)
    execution.release()


def test_a_message_that_waits_in_a_worker_lives_no_longer_than_the_worker(lock):
    """Its own life is that of a queue; should the process die in the wait, the message is lost."""
    message = lock(id="task", auto_renewal=False, expire=600)
    assert message.acquire(blocking=False)
    with message.alive(2):
        assert message.ttl() <= 2
        lived(2.5)
        assert message.owned()
    assert message.ttl() <= 2
    message.free()
