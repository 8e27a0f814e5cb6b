"""The heavy job: every change of the clock, in every time zone of the tzdata package, in one year.

Each zone is asked hour by hour, or more finely, what its clock shows, and the second of each change is found by
bisection. Nothing here knows of Django, Redis or Celery.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple
from zoneinfo import ZoneInfo

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)

Clock = tuple[timedelta, str]
"""What a clock shows beside the time: its offset from UTC and the abbreviation."""


class Transition(NamedTuple):
    """One change of a zone's clock. Offsets are seconds east of UTC."""

    zone: str
    instant: datetime
    """The first second of the new clock, in UTC."""
    offset_before: int
    offset_after: int
    abbreviation_before: str
    abbreviation_after: str

    @property
    def shift(self) -> int:
        """By how many seconds the clock is moved: forward or, negative, back."""
        return self.offset_after - self.offset_before


def zone_names() -> list[str]:
    """Return the names of all zones of the tzdata package."""
    return (files("tzdata") / "zones").read_text().split()


def load_zone(name: str) -> ZoneInfo:
    """Return a zone from the tzdata package: the system's own zones may be of another version."""
    with files("tzdata.zoneinfo").joinpath(*name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def find_all_transitions(
    year: int, step: timedelta = HOUR, before_each_zone: Callable[[], object] = lambda: None
) -> list[Transition]:
    """Return the transitions of all zones in a year (of UTC), by zone and time. This takes seconds."""
    found = []
    for name in zone_names():
        before_each_zone()
        found += find_transitions(name, year, step)
    return found


def find_transitions(name: str, year: int, step: timedelta = HOUR) -> list[Transition]:
    """Return the transitions of one zone in a year (of UTC), in the order of time."""
    zone = load_zone(name)
    found = []
    early, *instants = _instants(year, step)
    before = _clock(zone, early)
    for late in instants:
        local = late.astimezone(zone)
        after = (local.utcoffset(), local.tzname())  # _clock(), written out: this line runs five million times
        if after != before:
            instant = _first_second(zone, early, late, before)
            offsets = (clock[0] // SECOND for clock in (before, after))
            found.append(Transition(name, instant, *offsets, before[1], after[1]))
        early, before = late, after
    return found


@lru_cache(maxsize=4)
def _instants(year: int, step: timedelta) -> list[datetime]:
    """Return the last second before the year, instants of the year at that distance, and its last second."""
    start = datetime(year, 1, 1, tzinfo=UTC)
    end = datetime(year + 1, 1, 1, tzinfo=UTC)
    return [start - SECOND, *(start + n * step for n in range((end - start) // step)), end - SECOND]


def _clock(zone: ZoneInfo, instant: datetime) -> Clock:
    local = instant.astimezone(zone)
    return local.utcoffset(), local.tzname()


def _first_second(zone: ZoneInfo, early: datetime, late: datetime, before: Clock) -> datetime:
    """Return the first second after `early`, and not after `late`, at which the clock no longer shows `before`."""
    while late - early > SECOND:
        middle = early + (late - early) // SECOND // 2 * SECOND
        if _clock(zone, middle) == before:
            early = middle
        else:
            late = middle
    return late
