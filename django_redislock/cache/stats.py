"""What became of the calls that wanted a value: counted for each cache alias of this process.

The counts are module-level, because Django makes a backend object for every thread and task.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from django.conf import settings

from ..core.driver.fork import after_in_child

What = Literal[
    "hits",
    "computed",
    "waited",
    "seconds_waited",
    "taken_over",
    "lease_lost",
    "lease_evicted",
    "fenced",
    "stale_served",
    "errors",
]


@dataclass(slots=True)
class Tally:
    """Counts of this process since it started, for one cache alias."""

    hits: int = 0
    """Values that were there."""
    computed: int = 0
    """Values that were computed here."""
    waited: int = 0
    """How often a caller waited for a value that another one computed."""
    seconds_waited: float = 0.0
    taken_over: int = 0
    """Values computed here after waiting for one who failed, died or was overtaken by an invalidation."""
    lease_lost: int = 0
    """Computations that took longer than the right to compute lasts; others may have computed the same values, too."""
    lease_evicted: int = 0
    """Rights to compute that the server evicted; others may have computed the same values, too."""
    fenced: int = 0
    """Values not stored, because they were set or invalidated meanwhile."""
    stale_served: int = 0
    """Old values returned, while somebody computes a new one."""
    errors: int = 0
    """Computations that raised, and values for which Redis did not answer."""


class Counters:
    """Count exactly without a lock: a signal handler or a destructor may count, too, at any point of a count.

    Whoever counts takes a tally out of those that are free, so that nobody else changes it meanwhile. There are as many as
    were ever needed at the same time, and their sum is what was counted.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew; a count that is under way does not reach the new tallies."""
        all: list[Tally] = []
        free: list[Tally] = []
        self._tallies = all, free

    def count(self, what: What, by: float = 1) -> None:
        """Add to one of the counts."""
        all, free = self._tallies
        try:
            mine = free.pop()
        except IndexError:
            mine = Tally()
            all.append(mine)
        setattr(mine, what, getattr(mine, what) + by)
        free.append(mine)

    def read(self) -> Tally:
        """Return the counts so far."""
        tallies = list(self._tallies[0])
        return Tally(*(sum(getattr(counters, field.name) for counters in tallies) for field in fields(Tally)))


_tallies: dict[str, Counters] = {}


def counters_for(alias: str) -> Counters:
    """Return the counters of the alias in this process."""
    return _tallies.setdefault(alias, Counters())


def alias_of(backend: type, location: Any, params: dict[str, Any]) -> str:
    """Return the alias of a backend made with these arguments, "" when no alias of the settings is so."""
    aliases: dict[str, dict[str, Any]] = settings.CACHES
    for alias, cache in aliases.items():
        others = {key: value for key, value in cache.items() if key not in ("BACKEND", "LOCATION")}
        module, _, name = cache["BACKEND"].rpartition(".")
        named = name == backend.__name__ and f"{backend.__module__}.".startswith(f"{module}.")
        if named and cache.get("LOCATION", "") == location and others == params:
            return alias
    return ""


def _after_fork() -> None:
    for counters in _tallies.values():
        counters.reset()  # what the parent did was not done here


after_in_child("statistics", _after_fork)
