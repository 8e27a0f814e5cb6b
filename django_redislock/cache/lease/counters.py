"""Counts of hits, computations and waits of this process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from ...core.driver.process import notice_fork

CounterName = Literal[
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
    """Values that were found in the cache."""
    computed: int = 0
    """Values that this process computed."""
    waited: int = 0
    """Waits for a value that another caller computed."""
    seconds_waited: float = 0.0
    taken_over: int = 0
    """Values that this process computed after it had waited for a process that failed, died or was invalidated."""
    lease_lost: int = 0
    """Computations that took longer than their lease; other processes may have computed the same values, too."""
    lease_evicted: int = 0
    """Leases that the server evicted; other processes may have computed the same values, too."""
    fenced: int = 0
    """Values that were not stored, because they were set or invalidated during the computation."""
    stale_served: int = 0
    """Stale values that were returned, while another caller computed or after an error."""
    errors: int = 0
    """Computations that raised an error or were not done, and values for which Redis did not answer."""


class Counters:
    """Counts exactly without a lock: a signal handler or a destructor may count at any point of another count.

    Each count takes a tally out of the free ones, so that no other count changes it meanwhile. There are as many
    tallies as were ever needed at the same time. The counts are their sums.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again at zero; a count that is under way does not reach the new tallies."""
        tallies: list[Tally] = []
        free: list[Tally] = []
        self._tallies = tallies, free

    def count(self, name: CounterName, by: float = 1) -> None:
        """Add to one of the counts."""
        notice_fork()
        tallies, free = self._tallies
        try:
            tally = free.pop()
        except IndexError:
            tally = Tally()
            tallies.append(tally)
        setattr(tally, name, getattr(tally, name) + by)
        free.append(tally)

    def read(self) -> Tally:
        """Return the counts so far."""
        notice_fork()
        tallies = list(self._tallies[0])
        return Tally(*(sum(getattr(tally, field.name) for tally in tallies) for field in fields(Tally)))
