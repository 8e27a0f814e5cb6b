"""Which locks were waited for, and how long: counted by the script that ends a wait, in bounded space, and read here."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

from redis import Redis

from . import scripts
from .keys import check_prefix, held_keys
from .protocol import Call, Steps, attempt
from .server import Server, server_of

MINUTES = 60


@dataclass
class Waits:
    """The waits for one lock, or those that ended in one minute."""

    seconds: float = 0.0
    """How long was waited, by all together."""
    waits: int = 0
    gave_up: int = 0
    """How many of them ended without the lock."""


class Contention(NamedTuple):
    """The waits of about the last hour; of those for many names, only the longest."""

    names: dict[str, Waits]
    """By name, that which was waited for longest first."""
    minutes: list[Waits]
    """The last of them is the minute that it is now; `gave_up` is not known."""


def contention(client: Redis | Server, prefix: str = "redislock", *, retry_for: float = math.inf) -> Contention:
    """Return the waits of about the last hour under the key prefix.

    Costs one command. Raises LockBackendError when Redis cannot answer.
    """
    return server_of(client).run(_read(check_prefix(prefix), time.monotonic() + retry_for))


def _read(prefix: str, until: float) -> Steps[Contention]:
    _, (now, by_name, by_minute) = yield from attempt(prefix, Call(scripts.WAITS, tuple(held_keys(prefix)), ()), until)
    names: dict[str, Waits] = {}
    for name, ms, count, gave_up in zip(*(by_name[i::4] for i in range(4)), strict=True):
        waits = names.setdefault(name.decode(), Waits())
        waits.seconds += float(ms) / 1000
        waits.waits += int(count)
        waits.gave_up += int(gave_up)
    minutes = [Waits() for _ in range(MINUTES)]
    for minute, ms, count in zip(*(by_minute[i::3] for i in range(3)), strict=True):
        ago = now - int(minute)
        if 0 <= ago < MINUTES:
            minutes[-1 - ago].seconds += int(ms) / 1000
            minutes[-1 - ago].waits += int(count)
    longest = sorted(names.items(), key=lambda item: item[1].seconds, reverse=True)
    return Contention(dict(longest), minutes)
