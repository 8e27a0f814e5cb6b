"""The cells that are red today, each with the sentence that names its cure; who lands the cure removes them."""

from __future__ import annotations

from fnmatch import fnmatchcase

RED: dict[str, list[tuple[str, str]]] = {
    # Python's own limit: the child of a process whose threads ask for the GIL at that moment waits for them for ever.
    # tests/core/test_forks_in_c.py and tests/django/test_uwsgi.py fork where no thread does.
    "the child runs in a process of its own threads": [("*", "a fork that Python does not see *")],
}
"""By cure: patterns of rows and columns."""


RACY = [("*", "a fork that Python does not see *")]
"""Of the red cells, those that are green now and then."""


def is_racy(row: str, column: str) -> bool:
    return any(fnmatchcase(row, of_rows) and fnmatchcase(column, of_columns) for of_rows, of_columns in RACY)


def cure_of(row: str, column: str) -> str:
    for cure, cells in RED.items():
        if any(fnmatchcase(row, of_rows) and fnmatchcase(column, of_columns) for of_rows, of_columns in cells):
            return cure
    return ""
