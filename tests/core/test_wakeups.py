from __future__ import annotations

import pytest

from django_redislock.core.driver.wakeups import Waiter, Waiters


class Sleeper(Waiter):
    def interrupt(self):
        """Be woken, and no more."""


@pytest.fixture
def waiters():
    return Waiters()


def comes(waiters, id):
    waiter = Sleeper(b"lock", id, b"channel")
    waiters.add(waiter)
    return waiter


def test_one_waiter_for_each_lock_looks(waiters):
    first, second = comes(waiters, b"1"), comes(waiters, b"2")
    for _ in range(2):
        waiters.wake_pollers()
        assert (first.woken, second.woken) == (True, False)
        first.take_message()


def test_a_waiter_that_was_interrupted_keeps_no_other_one_from_looking(waiters):
    """Its object may be kept alive, by the traceback of its error for example."""
    interrupted, other = comes(waiters, b"1"), comes(waiters, b"2")
    waiters.wake_pollers()
    assert interrupted.woken
    waiters.wake_pollers()
    assert other.woken
    other.take_message()
    waiters.wake_pollers()
    assert other.woken
    assert waiters.polls(other)


def test_a_waiter_that_left_is_not_taken_for_the_first_any_more(waiters):
    left = comes(waiters, b"1")
    waiters.remove(left)
    assert waiters.polls(left), "by a reader that saw it just before it left"
    other = comes(waiters, b"2")
    waiters.wake_pollers()
    assert other.woken
    assert waiters.polls(other)
