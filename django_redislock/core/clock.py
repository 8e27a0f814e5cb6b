"""The clock of every deadline and of every belief that a lock is held.

A lock's expiry goes on in Redis while a laptop or a virtual machine is suspended. ``time.monotonic()`` stands still meanwhile on
Linux, so whoever wakes up would believe that it holds the lock still; the clock that counts the suspension does not.
"""

from __future__ import annotations

import sys
import time
from functools import partial

if sys.platform == "linux":
    monotonic = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
else:
    monotonic = time.monotonic
