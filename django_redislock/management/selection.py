"""The held locks that the command's arguments select: by a name, a unique beginning of a name, or a task."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from django.core.management.base import CommandError

from ..connections import clients
from ..core.validation import check_name
from ..exceptions import LockBackendError
from ..inventory import HeldLockRow, Listing, find, read
from ..task_names import is_waiting, key_of, task_of

SUGGESTED = 5
"""Similar names that are suggested at most."""
COMPARED = 10_000
"""Names that are compared at most, so that the answer comes soon."""


def find_lock(wanted: str, connection: str | None, *, whole: bool = False) -> list[HeldLockRow]:
    """Return a row for each connection on which the lock is held; at least one.

    A unique beginning stands for the name, unless `whole`. Raises CommandError when no such lock is held.
    """
    try:
        check_name(wanted)
    except ValueError as error:
        raise CommandError(str(error)) from error
    rows = _rows(wanted, connection)
    if rows:
        return rows
    names, failed = held_names(connection)
    raise_if_unread(failed)
    similar = near(wanted, names)
    if len(similar) == 1 and similar[0].startswith(wanted) and not whole:
        rows = _rows(similar[0], connection)
    if not rows:
        raise CommandError(
            f"The lock {wanted!r} is not held now.{did_you_mean(similar)} 'redislock list' shows the held locks."
        )
    return rows


def _rows(name: str, connection: str | None) -> list[HeldLockRow]:
    rows: list[HeldLockRow] = []
    found, failed = clients(connection)
    for at in found:
        try:
            rows += find(at, [name]).values()
        except LockBackendError as error:
            failed[at] = error.cause
    if not rows:
        raise_if_unread(failed)
    return rows


def raise_if_unread(failed: dict[str, str]) -> None:
    """Raise CommandError when there are connections that could not be read."""
    if failed:
        raise CommandError("\n".join(unread(failed)))


def unread(failed: dict[str, str]) -> list[str]:
    return [f"Connection {connection!r} could not be read: {why}" for connection, why in failed.items()]


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
    return (beginning or containing or difflib.get_close_matches(wanted, names[:COMPARED], n=SUGGESTED))[:SUGGESTED]


def did_you_mean(names: list[str]) -> str:
    """Return a question to put after a sentence; without names an empty text."""
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


def of_task(connection: str | None, task: str) -> tuple[list[HeldLockRow], Listing, set[str]]:
    """Return the held locks of a task, the listing from which they come, and the tasks of all held locks."""
    tasks: set[str] = set()

    def matching(at: str, name: str) -> bool:
        found = task_of(name)
        if found is not None:
            tasks.add(found)
        return found == task

    listing = read(connection, matching)
    return [row for row in listing.rows if row.info.kind == "celery"], listing, tasks


def chosen(rows: list[HeldLockRow], waiting: bool, pattern: str | None) -> list[HeldLockRow]:
    """Return the locks of a task that match: of waiting messages, and by a pattern of key or arguments."""
    return [
        row
        for row in rows
        if (not waiting or is_waiting(row.info))
        and (pattern is None or fnmatchcase(key_of(row.held.name), pattern) or fnmatchcase(row.info.arguments, pattern))
    ]
