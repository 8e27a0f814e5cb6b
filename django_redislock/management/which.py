"""The held locks that the command's arguments mean: by a name, a unique beginning of a name, or a task."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from ..core.lock import Lock
from ..exceptions import LockBackendError
from ..inventory import Listing, Row, read
from ..task_names import is_waiting, key_of, task_of

NEAR = 5
"""Similar names that are suggested at most."""
COMPARED = 10_000
"""Names that are compared at most, so that the answer comes soon."""


def held_names(connection: str | None) -> tuple[set[str], dict[str, str]]:
    """Return the names of all held locks, and the errors of the connections; only the names are read."""
    names: set[str] = set()
    listing = read(connection, lambda at, name: names.add(name))
    return names, listing.failed


def near(wanted: str, names: Iterable[str]) -> list[str]:
    """Return similar names: those with this beginning, else those that contain it, else the nearest ones."""
    names = sorted(names)
    folded = wanted.casefold()
    beginning = [name for name in names if name.startswith(wanted)]
    containing = [name for name in names if folded in name.casefold()] if not beginning else []
    return (beginning or containing or difflib.get_close_matches(wanted, names[:COMPARED], n=NEAR))[:NEAR]


def did_you_mean(names: list[str]) -> str:
    """Return a question that ends a sentence; empty without names."""
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


def of_task(connection: str | None, task: str) -> tuple[list[Row], Listing, set[str]]:
    """Return the held locks of a task, their listing, and the tasks of all held locks."""
    tasks: set[str] = set()

    def matching(at: str, name: str) -> bool:
        found = task_of(name)
        if found is not None:
            tasks.add(found)
        return found == task

    listing = read(connection, matching)
    return [row for row in listing.rows if row.info.kind == "celery"], listing, tasks


def chosen(rows: list[Row], waiting: bool, pattern: str | None) -> list[Row]:
    """Return the locks of a task that match: of waiting messages, and by a pattern of key or arguments."""
    return [
        row
        for row in rows
        if (not waiting or is_waiting(row.info))
        and (pattern is None or fnmatchcase(key_of(row.held.name), pattern) or fnmatchcase(row.info.arguments, pattern))
    ]


def holder_of(lock: Lock) -> str:
    """Return who holds the lock, in words."""
    try:
        info = lock.owner()
    except LockBackendError as error:
        return f"an unknown holder ({error.cause})"
    return "nobody any more" if info is None else f"{info.holder} for {info.age:.0f} s"
