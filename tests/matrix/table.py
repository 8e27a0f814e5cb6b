"""All cells: which run, and which are left out for what reason."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import md5
from typing import Any

import pytest

from . import disturbances  # noqa: F401  (it notes the columns)
from .columns import DISTURBANCES, Disturbance
from .holders import HOLDERS, LACKS, Holder


@dataclass(frozen=True)
class Verdict:
    """One cell, and what is known of it before it runs."""

    row: Holder
    column: Disturbance

    @property
    def id(self) -> str:
        return f"{self.row.name} x {self.column.name}"

    @property
    def left_out(self) -> str:
        """Why it does not run; nothing if it does."""
        lacking = sorted(self.row.lacks & self.column.needs)
        return LACKS[lacking[0]] if lacking else ""

    @property
    def marks(self) -> list[Any]:
        marks: list[Any] = [pytest.mark.cell]
        if self.column.skip:
            marks.append(pytest.mark.skip(reason=self.column.skip))
        if self.column.slow or self not in QUICK:
            marks.append(pytest.mark.slow)
        return marks


def verdicts(rows: list[Holder], columns: list[Disturbance]) -> list[Verdict]:
    return [Verdict(row, column) for row in rows for column in columns]


ALL = verdicts(HOLDERS, DISTURBANCES)
CELLS = [each for each in ALL if not each.left_out]


def _quick(cells: list[Verdict]) -> set[Verdict]:
    """Of each column some cells, of rows that differ from column to column."""
    found: set[Verdict] = set()
    for column in DISTURBANCES:
        mine = [each for each in cells if each.column is column]
        found |= set(sorted(mine, key=lambda each: md5(each.id.encode()).digest())[:OF_EACH])
    return found


OF_EACH = 2
"""So many cells of each column are in the quick part of the suite."""
QUICK = _quick(CELLS)


def text(rows: str = "*", columns: str = "*") -> str:
    """Return the table: the holders down, the disturbances across, numbered, because their names are long."""
    shown = [each for each in ALL if fnmatchcase(each.row.name, rows) and fnmatchcase(each.column.name, columns)]
    across = list(dict.fromkeys(each.column for each in shown))
    down = list(dict.fromkeys(each.row for each in shown))
    reasons = {reason: chr(ord("a") + number) for number, reason in enumerate(LACKS.values())}
    width = max((len(row.name) for row in down), default=0)
    lines = []
    for row in down:
        signs = []
        for column in across:
            cell = Verdict(row, column)
            signs.append(reasons.get(cell.left_out, "+").rjust(3))
        lines.append(f"{row.name:{width}}{''.join(signs)}")
    lines += ["", *(f"{number:3} {column.name}" for number, column in enumerate(across, 1))]
    lines.insert(0, " " * width + "".join(str(number + 1).rjust(3) for number in range(len(across))))
    out = [each for each in shown if each.left_out]
    lines += ["", f"{len(shown)} cells: {len(shown) - len(out)} run (+), {len(out)} left out"]
    lines += [f"{sign:>3} {why}" for why, sign in reasons.items() if any(each.left_out == why for each in out)]
    return "\n".join(lines)
