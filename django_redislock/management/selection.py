"""``redislock release``, and the held locks that the arguments of a command select: by a name, a unique beginning of a
name, or a task."""

from __future__ import annotations

import difflib
import getpass
import sys
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ..connections import clients
from ..core.keys import split_slot
from ..core.validation import check_name
from ..exceptions import LockBackendError
from ..inventory import HeldLockRow, Listing, find, force_release, read
from ..run_once.command_line import sentence
from ..task_names import is_waiting, key_of, task_of
from ..texts import visible
from .output import counted, lines_of, missing, table

SUGGESTED = 5
"""Similar names that are suggested at most."""
COMPARED = 10_000
"""Names that are compared at most, so that the answer comes soon."""
WARNING = "The holder is not stopped. If it still runs, two holders will overlap."
GENTLY = "The holder is told at its next renewal. Nobody else gets the lock before it is released, or expires."
MESSAGES = "No message is deleted. A message that is still in its queue will run, and another one may be published now."
SHOWN = 20
"""Locks that are shown at most before the question whether to release them."""


def find_lock(wanted: str, connection: str | None, *, whole: bool = False) -> tuple[list[HeldLockRow], dict[str, str]]:
    """Return a row for each connection on which the lock is held, and for each held slot of a semaphore; at least one.
    Return also the connections that could not be read, and why.

    A unique beginning stands for the name, unless `whole`. Raises CommandError when no such lock is held.
    """
    try:
        check_name(wanted)
    except ValueError as error:
        raise CommandError(str(error)) from error
    names: set[str] = set()

    def is_slot(at: str, name: str) -> bool:
        names.add(name)
        return name != wanted and split_slot(name)[0] == wanted

    rows, failed, *_ = read(connection, is_slot)  # in any case, because a semaphore may have the name of a lock
    for at in [at for at in clients(connection)[0] if at not in failed]:
        try:  # by its name, too, because an index may have lost it
            rows += find(at, [wanted]).values()
        except LockBackendError as error:
            failed[at] = error.cause
    if rows:
        return rows, failed
    raise_if_unread(failed)
    similar = near(wanted, names)
    if len(similar) == 1 and similar[0].startswith(wanted) and not whole:
        return find_lock(similar[0], connection, whole=True)
    raise CommandError(
        f"The lock {wanted!r} is not held now.{did_you_mean(similar)} 'redislock list' shows the held locks."
    )


def raise_if_unread(failed: dict[str, str]) -> None:
    """Raise CommandError when there are connections that could not be read."""
    if failed:
        raise CommandError("\n".join(unread(failed)))


def unread(failed: dict[str, str]) -> list[str]:
    return [f"Connection {connection!r} could not be read: {why}" for connection, why in failed.items()]


def near(wanted: str, names: Iterable[str]) -> list[str]:
    """Return similar names: those with this beginning, else those that contain it, else the nearest ones."""
    names = sorted({split_slot(name)[0] for name in names})
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


def group_of(task: str) -> str | None:
    """Return the group of a Celery task of this project; None if it has none, or there is no such task."""
    state = sys.modules.get("celery._state")
    if state is None:
        return None
    for app in state._get_active_apps():
        try:
            app.loader.import_default_modules()  # as a worker does
            options = getattr(app.tasks.get(task), "_given_options", {})
        except Exception:  # noqa: S112 - the error of any task; the system checks report it
            continue
        if options.get("group"):
            return str(options["group"])
    return None


def about_group(task: str) -> str:
    """Return a sentence about the locks that a task shares; an empty text if it is in no group."""
    group = group_of(task)
    if group is None:
        return ""
    return f"The task is in the group {group!r}, and its runs hold the locks of that: see --task {group}."


def chosen(rows: list[HeldLockRow], waiting: bool, pattern: str | None) -> list[HeldLockRow]:
    """Return the locks of a task that match: of waiting messages, and by a pattern of key or arguments."""
    pattern = pattern and pattern.replace("[", "[[]")  # arguments with lists, as `show` prints them, are no sets
    return [
        row
        for row in rows
        if (not waiting or is_waiting(row.info))
        and (pattern is None or fnmatchcase(key_of(row.held.name), pattern) or fnmatchcase(row.info.arguments, pattern))
    ]


def release_lock(command: BaseCommand, options: dict[str, Any]) -> None:
    """Release the lock of the name, or of a unique beginning of it; with ``--gently`` ask its holder for it."""
    if options["name"] is None:
        raise CommandError("Give the name of a lock, or --task NAME.")
    if options["waiting"] or options["match"] is not None:
        raise CommandError("--waiting and --match choose among the locks of a task; give --task NAME.")
    # Without a question only the whole name counts, because a free lock's name may begin another name.
    rows, failed = find_lock(options["name"], options["connection"], whole=options["yes"] and options["id"] is None)
    for remark in unread(failed):  # a lock of this name may be held there, too
        command.stderr.write(remark)
    if options["id"] is not None:
        rows = [row for row in rows if row.held.id == options["id"]]
        if not rows:
            raise CommandError("The lock is held by another id; nothing was released. See 'redislock show --id'.")
    if any(row.info.slot for row in rows) and len(rows) > 1:
        raise CommandError(
            f"{len(rows)} locks and slots of this name are held. Choose one with --id; 'list --id' shows the ids."
        )
    if len(rows) > 1:
        where = ", ".join(row.connection for row in rows)
        raise CommandError(f"A lock of this name is held on several connections: {where}. Choose with --connection.")
    command.stderr.write(lines_of(rows, False))
    if options["dry_run"]:
        command.stdout.write("Dry run: nothing was released.")
        return
    command.stderr.write(command.style.WARNING(GENTLY if options["gently"] else WARNING))
    _confirm(command, options, "it")
    try:
        released = _release(rows[0], options)
    except LockBackendError as error:
        raise CommandError(
            f"It is unknown whether the lock was released: {sentence(error.cause)} See 'redislock show'."
        ) from error
    if not released:
        raise CommandError("The holder changed or the lock ended meanwhile; nothing was released.")
    command.stdout.write(command.style.SUCCESS(f"{_done(options)} {visible(rows[0].held.name)}."))


def release_task(command: BaseCommand, options: dict[str, Any]) -> None:
    """Release the locks of a task that match the options."""
    rows, listing = _matching(options)
    shown = rows if options["dry_run"] else rows[:SHOWN]
    command.stderr.write(table(shown, False, arguments=True))
    if len(rows) > len(shown):
        command.stderr.write(f"… and {len(rows) - len(shown)} more")
    for remark in [*missing(listing), *filter(None, [about_group(options["task"])])]:
        command.stderr.write(remark)
    if options["dry_run"]:
        command.stdout.write(f"Dry run: nothing was released of {counted(len(rows))}.")
    else:
        if not all(is_waiting(row.info) for row in rows):
            command.stderr.write(command.style.WARNING(GENTLY if options["gently"] else WARNING))
        command.stderr.write(command.style.WARNING(MESSAGES))
        _confirm(command, options, counted(len(rows)))
        _release_all(command, rows, options)
    raise_if_unread(listing.failed)


def _matching(options: dict[str, Any]) -> tuple[list[HeldLockRow], Listing]:
    """Return the locks of the task that match the options, at least one, and the listing from which they come."""
    task = options["task"]
    if options["name"] is not None or options["id"] is not None:
        raise CommandError("Give the name of a lock or --task NAME, not both; --id goes with a name.")
    held, listing, tasks = of_task(options["connection"], task)
    rows = chosen(held, options["waiting"], options["match"])
    if rows:
        return rows, listing
    raise_if_unread(listing.failed)
    if held:
        raise CommandError(f"The task {task!r} holds {counted(len(held))}, and none of them matches the options.")
    hint = f" {about}" if (about := about_group(task)) else did_you_mean(near(task, tasks - {task}))
    raise CommandError(f"No lock of the task {task!r} is held.{hint}")


def _release_all(command: BaseCommand, rows: list[HeldLockRow], options: dict[str, Any]) -> None:
    released = 0
    try:
        for row in rows:
            released += _release(row, options)
    except LockBackendError as error:
        raise CommandError(
            f"{_done(options)} {counted(released)}, then Redis failed: {sentence(error.cause)} Try again."
        ) from error
    left = len(rows) - released
    if left:
        command.stderr.write(f"Not released, because the holder changed or the lock ended meanwhile: {counted(left)}.")
    if not released:
        raise CommandError("Nothing was released.")
    command.stdout.write(command.style.SUCCESS(f"{_done(options)} {counted(released)} of {visible(options['task'])}."))


def _confirm(command: BaseCommand, options: dict[str, Any], what: str) -> None:
    if options["yes"]:
        return
    command.stderr.write(f"{'Recall' if options['gently'] else 'Force-release'} {what}? [y/N] ", ending="")
    command.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("Not confirmed; nothing was released.")


def _done(options: dict[str, Any]) -> str:
    return "Recalled" if options["gently"] else "Released"


def _release(row: HeldLockRow, options: dict[str, Any]) -> bool:
    user = "command line"
    with suppress(OSError, KeyError):  # the user of a container may have no name
        user = f"command line ({getpass.getuser()})"
    return force_release(
        row.connection, row.held.name, row.held.fence, user, options["reason"], recalls=options["gently"]
    )
