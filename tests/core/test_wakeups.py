from __future__ import annotations

import gc

import pytest

from django_redislock.core.clock import monotonic
from django_redislock.core.driver.wakeups import MAX_POLL_INTERVAL, Waiter, Waiters


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


def test_a_waiter_may_come_while_the_waiters_are_looked_through(waiters):
    """The tuples of a list of items let the garbage be collected, and so other threads run (Python 3.11)."""
    those = [comes(waiters, b"%d" % number) for number in range(3000)]
    before = gc.get_threshold()

    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            those.append(comes(waiters, b"late"))
            if gc.get_threshold() != before:
                Garbage()

    Garbage()
    gc.set_threshold(1, 10_000, 10_000)
    try:
        waiters.wake_pollers()
    finally:
        gc.set_threshold(*before)
    assert len(waiters) == len(those)


def test_a_process_polls_in_proportion_to_its_share_of_a_long_queue(waiters):
    """So that the polls of all processes do not grow with the queue."""
    alone = comes(waiters, b"1")
    alone.tried_at, alone.queue_length = monotonic(), 16 * 8
    waiters.wake_pollers()
    assert not alone.woken
    alone.tried_at -= 0.5 * 8
    waiters.wake_pollers()
    assert alone.woken
    alone.take_message()
    alone.tried_at = monotonic()
    others = [comes(waiters, b"%d" % number) for number in range(2, 9)]
    waiters.wake_pollers()
    assert [waiter.woken for waiter in (alone, *others)] == [True] + [False] * 7


def test_a_process_polls_every_few_seconds_in_any_queue(waiters):
    waiter = comes(waiters, b"1")
    waiter.tried_at, waiter.queue_length = monotonic() - MAX_POLL_INTERVAL, 1_000_000
    waiters.wake_pollers()
    assert waiter.woken


class Counting(dict):
    gets = 0

    def get(self, *args):
        self.gets += 1
        return super().get(*args)


def test_waiters_that_shared_one_id_make_no_wake_up_of_another_id_slower(waiters):
    for waiter in [comes(waiters, b"shared") for _ in range(400)]:
        waiters.remove(waiter)
    other = comes(waiters, b"other")
    waiters._by_id = Counting(waiters._by_id)
    waiters.dispatch([b"message", b"channel", b"other"])
    assert (other.woken, waiters._by_id.gets) == (True, 1)


def test_all_waiters_of_one_id_are_woken(waiters):
    same = [comes(waiters, b"shared") for _ in range(3)]
    waiters.remove(same[0])
    waiters.dispatch([b"message", b"channel", b"shared\ntext"])
    assert [waiter.message for waiter in same] == [None, b"text", b"text"]
