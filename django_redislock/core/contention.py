"""Which locks were waited for, how long, and what they saved: counted in bounded space, and read here.

The script that ends a wait counts it, and that which stores a value counts who waited for it; a duplicate of a task takes a
call of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis import Redis

from . import scripts
from .clock import monotonic
from .driver.effects import Operation, ScriptCall
from .driver.registry import server_of
from .driver.retry import with_retries
from .driver.server import Server
from .keys import held_keys
from .validation import check_prefix

MINUTES = 60


@dataclass
class Waits:
    """The waits for one lock, or those that ended in one minute."""

    seconds: float = 0.0
    """How long was waited, by all together."""
    waits: int = 0
    gave_up: int = 0
    """How many of them ended without the lock."""
    duplicates: int = 0
    """How often a task was not published, or did not run, because it was under way."""
    avoided: int = 0
    """How often a process was given a value that another one computed meanwhile."""

    @property
    def saved(self) -> int:
        """How often something was not done twice."""
        return self.duplicates + self.avoided


class Contention(NamedTuple):
    """The counts of about the last hour; of many names, those of the highest only."""

    names: dict[str, Waits]
    """By name, that which was waited for longest first, and then that which saved most."""
    minutes: list[Waits]
    """The last of them is the minute that it is now; only `seconds` and `waits` are known."""


def contention(client: Redis | Server, prefix: str = "redislock", *, retry_for: float = math.inf) -> Contention:
    """Return the counts of about the last hour under the key prefix.

    Costs one command, or some more with many names. Raises LockBackendError when Redis cannot answer.
    """
    return server_of(client).run(_read(check_prefix(prefix), monotonic() + retry_for))


def _read(prefix: str, until: float) -> Operation[Contention]:
    keys = tuple(held_keys(prefix))
    by_name: list[bytes] = []
    by_minute: list[Any] = []
    saved: list[bytes] = []
    now, bucket = 0, 1
    while bucket:
        call = ScriptCall(scripts.WAITS, keys, (b"%d" % bucket,))
        _, (now, some, minutes_of_some, saved_of_some, bucket) = yield from with_retries("", call, until)
        by_name += some
        by_minute += minutes_of_some
        saved += saved_of_some
    names: dict[str, Waits] = {}
    for name, ms, count, gave_up in zip(*(by_name[i::4] for i in range(4)), strict=True):
        waits = names.setdefault(name.decode(), Waits())
        waits.seconds += float(ms) / 1000
        waits.waits += int(count)
        waits.gave_up += int(gave_up)
    for name, duplicates, avoided in zip(*(saved[i::3] for i in range(3)), strict=True):
        waits = names.setdefault(name.decode(), Waits())
        waits.duplicates += int(duplicates)
        waits.avoided += int(avoided)
    minutes = [Waits() for _ in range(MINUTES)]
    for minute, ms, count in zip(*(by_minute[i::3] for i in range(3)), strict=True):
        ago = now - int(minute)
        if 0 <= ago < MINUTES:
            minutes[-1 - ago].seconds += int(ms) / 1000
            minutes[-1 - ago].waits += int(count)
    highest = sorted(names.items(), key=lambda item: (item[1].seconds, item[1].saved), reverse=True)
    return Contention(dict(highest), minutes)
