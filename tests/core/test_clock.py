from __future__ import annotations

import sys
import time

import pytest

from django_redislock.core import Lock, clock, lease, watchdog
from django_redislock.exceptions import LockLost
from tests.support import lived, wait_until


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a clock that counts a suspension")
def test_deadlines_are_measured_by_a_clock_that_counts_a_suspension_of_the_host():
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = clock.monotonic()
    assert before <= now <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_host_that_was_suspended_for_longer_than_the_expiry_does_not_believe_that_it_holds_the_lock(
    client, monkeypatch
):
    lock = Lock(client, "a", expire=5, auto_renewal=False)
    with pytest.raises(LockLost), lock:
        monkeypatch.setattr(lease, "monotonic", lambda: clock.monotonic() + 6)
        lock.raise_if_lost()


def test_soon_after_a_suspension_the_holder_is_told_although_a_sleep_does_not_count_it(own_server, monkeypatch):
    """The sleep of the watchdog is cut, so that it need not be ten seconds here."""
    told, suspended = [], [0]
    monkeypatch.setattr(watchdog, "LONGEST_SLEEP", 0.2)
    for module in (lease, watchdog):
        monkeypatch.setattr(module, "monotonic", lambda: clock.monotonic() + suspended[0])
    with own_server.client() as client:
        lock = Lock(client, "a", expire=60, auto_renewal=False, on_lost=told.append)
        lock.acquire()
        lived(0.5)
        assert not told
        suspended[0] = 100
        wait_until(lambda: told, timeout=20)
        with pytest.raises(LockLost):
            lock.release()
