"""Which held locks the command's arguments mean: by a name, a unique beginning of one, or a task."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from ..heldlocks import Listing, Row, read
from ..task_names import is_waiting, key_of, task_of

NEAR = 5
"""Names that are told in place of one that nobody holds."""
COMPARED = 10_000
"""Names among which similar ones are looked for, so that the answer comes soon."""


def held_names(connection: str | None) -> tuple[set[str], dict[str, str]]:
    """Return the names of all held locks, and why connections could not be read; nothing else is read of the locks."""
    names: set[str] = set()
    listing = read(connection, lambda at, name: names.add(name))
    return names, listing.failed


def near(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the names that may have been meant: those that begin so, else those that contain it, else similar ones."""
    names = sorted(names)
    folded = wanted.casefold()
    beginning = [name for name in names if name.startswith(wanted)]
    containing = [name for name in names if folded in name.casefold()] if not beginning else []
    return (beginning or containing or difflib.get_close_matches(wanted, names[:COMPARED], n=NEAR))[:NEAR]


def did_you_mean(names: list[str]) -> str:
    """Return a question that ends a sentence; empty without names."""
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


def of_task(connection: str | None, task: str) -> tuple[list[Row], Listing, set[str]]:
    """Return the held locks of a task, the listing that they are from, and the tasks of all held locks."""
    tasks: set[str] = set()

    def matching(at: str, name: str) -> bool:
        found = task_of(name)
        if found is not None:
            tasks.add(found)
        return found == task

    listing = read(connection, matching)
    return [row for row in listing.rows if row.info.kind == "celery"], listing, tasks


def chosen(rows: list[Row], waiting: bool, pattern: str | None) -> list[Row]:
    """Return those of a task's locks that a message holds which waits, and whose key or arguments match the pattern."""
    return [
        row
        for row in rows
        if (not waiting or is_waiting(row.info))
        and (pattern is None or fnmatchcase(key_of(row.held.name), pattern) or fnmatchcase(row.info.arguments, pattern))
    ]
