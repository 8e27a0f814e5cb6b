"""The waits for locks, and the work that locks saved, in the last hour: counted in bounded space by scripts, and read
here.

The script that ends a wait counts the wait, and the script that stores a computed value counts its waiters. A
prevented duplicate of a task is counted by a call of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from . import scripts
from .clock import monotonic
from .driver.cluster.by_slot import Missing, by_slot
from .driver.effects import Operation, ScriptCall
from .driver.registry import Client, server_of
from .driver.server import Server
from .keys import held_keys, listed_name
from .validation import check_prefix

MINUTES = 60


@dataclass
class Waits:
    """The waits for one lock, or the waits that ended in one minute."""

    seconds: float = 0.0
    """The length of all waits together."""
    waits: int = 0
    gave_up: int = 0
    """The number of waits that ended without the lock."""
    duplicates: int = 0
    """How often a task was not published, or did not run, because the same task was queued or running."""
    avoided: int = 0
    """How often a process received a value that another process computed meanwhile."""

    @property
    def saved(self) -> int:
        """How often the same work was not done twice."""
        return self.duplicates + self.avoided


class Contention(NamedTuple):
    """The counts of about the last hour; of many names, only the highest counts."""

    names: dict[str, Waits]
    """By name, of a semaphore by its `queue_name`: the name with the longest waits first; of equal waits, the name that
    saved most."""
    minutes: list[Waits]
    """One for each minute, the current minute last; only `seconds` and `waits` are counted."""


def contention(
    client: Client | Server,
    prefix: str = "redislock",
    *,
    retry_for: float = math.inf,
    missing: Missing | None = None,
) -> Contention:
    """Return the counts of about the last hour under the key prefix.

    Needs four commands, and more with many names. `missing` gets the nodes of a Cluster whose counts are missing, and
    why; without it, one such node raises LockBackendError. Raises it also when Redis cannot answer.
    """
    server = server_of(client)
    return server.run(_read(server, check_prefix(prefix), monotonic() + retry_for, missing))


def _read(server: Server, prefix: str, until: float, missing: Missing | None) -> Operation[Contention]:
    names: dict[str, Waits] = defaultdict(Waits)
    minutes = [Waits() for _ in range(MINUTES)]
    indexes = held_keys(prefix)
    while indexes:
        replies = yield from by_slot(server, "", indexes, lambda held: held, _call, until, missing)
        indexes = []
        for some, (now, by_name, by_minute, saved, bucket) in replies:
            for name, ms, count, gave_up in zip(*(by_name[i::4] for i in range(4)), strict=True):
                waits = names[listed_name(name)]
                waits.seconds += float(ms) / 1000
                waits.waits += int(count)
                waits.gave_up += int(gave_up)
            for name, duplicates, avoided in zip(*(saved[i::3] for i in range(3)), strict=True):
                waits = names[listed_name(name)]
                waits.duplicates += int(duplicates)
                waits.avoided += int(avoided)
            for minute, ms, count in zip(*(by_minute[i::3] for i in range(3)), strict=True):
                ago = now - int(minute)
                if 0 <= ago < MINUTES:
                    minutes[-1 - ago].seconds += int(ms) / 1000
                    minutes[-1 - ago].waits += int(count)
            if bucket:
                indexes += some[bucket - 1 :]
    highest = sorted(names.items(), key=lambda item: (item[1].seconds, item[1].saved), reverse=True)
    return Contention(dict(highest), minutes)


def _call(indexes: list[bytes]) -> ScriptCall:
    return ScriptCall(scripts.WAITS, tuple(indexes), (b"1",))
