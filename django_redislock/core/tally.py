"""What became of the calls that wanted a value, counted."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Literal

What = Literal[
    "hits", "computed", "waited", "seconds_waited", "taken_over", "lease_lost", "fenced", "stale_served", "errors"
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
    """Values not stored, because the right to compute them ended meanwhile."""
    fenced: int = 0
    """Values not stored, because they were set or invalidated meanwhile."""
    stale_served: int = 0
    """Old values returned, while somebody computes a new one."""
    errors: int = 0
    """Computations that raised, and values for which Redis did not answer."""

    def count(self, what: What, by: float = 1) -> None:
        """Add to one of the counts, whichever threads count at the same time."""
        with _counting:
            setattr(self, what, getattr(self, what) + by)


_counting = threading.Lock()


def _after_fork() -> None:
    global _counting
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
