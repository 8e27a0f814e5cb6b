"""What became of the calls that wanted a value, counted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

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
        return Tally(*(sum(getattr(tally, field.name) for tally in tallies) for field in fields(Tally)))
