"""The cells that are red today, each with the sentence that names its cure; who lands the cure removes them."""

from __future__ import annotations

from fnmatch import fnmatchcase

RED: dict[str, list[tuple[str, str]]] = {}
"""By cure: patterns of rows and columns."""


def cure_of(row: str, column: str) -> str:
    for cure, cells in RED.items():
        if any(fnmatchcase(row, of_rows) and fnmatchcase(column, of_columns) for of_rows, of_columns in cells):
            return cure
    return ""
