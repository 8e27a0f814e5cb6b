"""Greenlets in place of threads."""

from __future__ import annotations

from functools import partial

from ..cell import Cell
from ..columns import column
from ..greenlets import KINDS, faults


def _among_greenlets(cell: Cell, kind: str) -> None:
    assert faults(kind)[cell.row.name] == ""


for _kind in KINDS:
    column(f"gevent: {_kind}", needs="thread here", slow=True)(partial(_among_greenlets, kind=_kind))
