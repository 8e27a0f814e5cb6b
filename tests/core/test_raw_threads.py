"""Threads that Python did not start."""

from __future__ import annotations

import _thread
import threading

import pytest

from django_redislock.exceptions import NotAcquired
from tests.support import wait_until
from tests.support.locks import RLock


def test_a_thread_with_the_number_of_one_that_died_holding_does_not_hold_its_lock(client):
    """Python did not start these threads, and before 3.13 it takes the second one for the first."""
    numbers, seen = [], []
    held, wanted = RLock(client, "a", expire=60), RLock(client, "a", expire=60)

    def die_holding():
        held.acquire()
        numbers.append(threading.get_ident())

    def look():
        if threading.get_ident() == numbers[0]:
            try:
                held.release()
            except NotAcquired:
                seen.append(wanted.acquire(blocking=False))
            else:
                seen.append("released the lock of the dead thread")
        else:
            other.append(True)

    _thread.start_new_thread(die_holding, ())
    wait_until(lambda: numbers)
    for _ in range(100):
        other = []
        _thread.start_new_thread(look, ())
        wait_until(lambda: seen or other)  # noqa: B023
        if seen:
            break
    else:
        pytest.skip("no thread got the number of the first one")
    assert seen == [False]
