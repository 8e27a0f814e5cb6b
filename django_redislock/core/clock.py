"""The clock of every deadline and of every belief that a lock is held.

A lock's expiry goes on in Redis while a laptop or a virtual machine is suspended. ``time.monotonic()`` stands still
meanwhile on Linux, so a holder would still believe after the suspension that it holds the lock. Hence the clock here
counts the suspension, too. Tools that stop or move the time in tests (freezegun, time-machine) do not change this
clock.
"""

from __future__ import annotations

import time
from functools import partial

# Partial functions, because freezegun replaces each reference to a function of `time` that it finds.
if hasattr(time, "CLOCK_BOOTTIME"):
    monotonic = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
else:
    monotonic = partial(time.monotonic)
