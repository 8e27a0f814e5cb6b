from __future__ import annotations

import sys
import time

import pytest

from django_redislock.core import Lock, clock, lease
from django_redislock.exceptions import LockLost


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
