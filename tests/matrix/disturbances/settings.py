"""Settings that change what a lock is."""

from __future__ import annotations

from ..cell import Cell
from ..columns import column


@column("ENABLED: False", needs="settings")
def not_enabled(cell: Cell) -> None:
    with cell.configured(ENABLED=False):
        first, second = cell.actor(), cell.actor()
        third = cell.actor()
        cell.may_overlap = True
        for each in (first, second, third):
            each.enter()
        assert not cell.raw.keys("*")
        for each in (first, second, third):
            each.leave()
