"""The Lua scripts of the lock: one file for each script in ``lua/``, and parts that scripts share."""

from __future__ import annotations

from .driver.effects import Script

ACQUIRE = Script(
    *("acquire", "index", "expiry", "take", "quick", "handover", "counts", "turns"),
    granted=lambda reply: isinstance(reply, int),
)
ACQUIRE_SLOT = Script(
    *("acquire_slot", "index", "expiry", "take", "quick_slot", "handover", "counts", "turns", "slots"),
    granted=lambda reply: isinstance(reply, bytes),
)
RELEASE = Script("release", "receipts", "handover")
UNDO = Script("release", "receipts", "handover", "undone")
RENEW = Script("renew", "index", "expiry", granted=lambda reply: 1 in reply)
RESET = Script("reset", "receipts", "handover")
CAUSE = Script("cause")
READ = Script("read", "handover", "waiters")
QUEUE = Script("queue", "handover", "waiters")
NAMES = Script("names")
COUNT = Script("count")
WAITS = Script("waits")
