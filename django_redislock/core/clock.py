"""The clock of every deadline and of every belief that a lock is held.

A lock's expiry goes on in Redis while a laptop or a virtual machine is suspended. ``time.monotonic()`` stands still meanwhile on
Linux, so whoever wakes up would believe that it holds the lock still; the clock that counts the suspension does not. Tools that
stop or move the time in tests (freezegun, time-machine) leave it alone.
"""

from __future__ import annotations

import time
from functools import partial

# Partial functions, because freezegun puts its own in place of each reference to a function of `time` that it finds.
if hasattr(time, "CLOCK_BOOTTIME"):
    monotonic = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
else:
    monotonic = partial(time.monotonic)
