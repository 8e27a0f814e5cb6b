"""The Lua scripts of the lock: one file for each script in ``lua/``, and parts that scripts share."""

from __future__ import annotations

from .driver.effects import Script

ACQUIRE = Script(
    *("acquire", "clock", "index", "take_unwanted", "quick"),
    *("lib", "expiry", "take", "handover", "counts", "turns"),
    granted=lambda reply: isinstance(reply, int),
)
ACQUIRE_SLOT = Script(
    *("acquire_slot", "clock", "index", "take_unwanted", "lib", "quick_slot"),
    *("expiry", "take", "handover", "counts", "turns", "slots"),
    granted=lambda reply: isinstance(reply, bytes),
)
RELEASE = Script("release", "receipts", "quick_release", "clock", "lib", "handover")
UNDO = Script("release", "undone", "receipts", "quick_release", "clock", "lib", "handover")
RENEW = Script("renew", "index", "expiry", granted=lambda reply: 1 in reply)
RESET = Script("reset", "receipts", "handover")
CAUSE = Script("cause")
READ = Script("read", "handover", "waiters")
QUEUE = Script("queue", "handover", "waiters")
NAMES = Script("names")
COUNT = Script("count")
WAITS = Script("waits")
