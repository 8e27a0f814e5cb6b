"""``redislock release``: show the selected locks, ask, and force-release them."""

from __future__ import annotations

import getpass
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ..exceptions import LockBackendError
from ..inventory import HeldLockRow, force_release
from ..task_names import is_waiting
from ..texts import visible
from .output import counted, missing, record, sentence, table
from .selection import chosen, did_you_mean, find_lock, near, of_task, raise_if_unread

WARNING = "The holder is not stopped. If it still runs, two holders will overlap."
MESSAGES = "No message is deleted. A message that is still in its queue will run, and another one may be published now."
SHOWN = 20
"""Locks that are shown at most before the question whether to release them."""


def release_lock(command: BaseCommand, options: dict[str, Any]) -> None:
    """Release the lock of the name, or of a unique beginning of it."""
    if options["name"] is None:
        raise CommandError("Give the name of a lock, or --task NAME.")
    if options["waiting"] or options["match"] is not None:
        raise CommandError("--waiting and --match choose among the locks of a task; give --task NAME.")
    # Without a question only the whole name counts, because a free lock's name may begin another name.
    rows = find_lock(options["name"], options["connection"], whole=options["yes"] and options["id"] is None)
    if options["id"] is not None:
        rows = [row for row in rows if row.held.id == options["id"]]
        if not rows:
            raise CommandError("The lock is held by another id; nothing was released. See 'redislock show --id'.")
    if len(rows) > 1:
        where = ", ".join(row.connection for row in rows)
        raise CommandError(f"A lock of this name is held on several connections: {where}. Choose with --connection.")
    command.stderr.write(record(rows, False))
    if options["dry_run"]:
        command.stdout.write("Dry run: nothing was released.")
        return
    command.stderr.write(command.style.WARNING(WARNING))
    _confirm(command, options, "it")
    try:
        released = _release(rows[0], options["reason"])
    except LockBackendError as error:
        raise CommandError(
            f"It is unknown whether the lock was released: {sentence(error.cause)} See 'redislock show'."
        ) from error
    if not released:
        raise CommandError("The holder changed or the lock ended meanwhile; nothing was released.")
    command.stdout.write(command.style.SUCCESS(f"Released {visible(rows[0].held.name)}."))


def release_task(command: BaseCommand, options: dict[str, Any]) -> None:
    """Release the locks of a task that match the options."""
    task = options["task"]
    if options["name"] is not None or options["id"] is not None:
        raise CommandError("Give the name of a lock or --task NAME, not both; --id goes with a name.")
    held, listing, tasks = of_task(options["connection"], task)
    rows = chosen(held, options["waiting"], options["match"])
    if not rows:
        raise_if_unread(listing.failed)
        if held:
            raise CommandError(f"The task {task!r} holds {counted(len(held))}, and none of them matches the options.")
        raise CommandError(f"No lock of the task {task!r} is held.{did_you_mean(near(task, tasks - {task}))}")
    command.stderr.write(table(rows if options["dry_run"] else rows[:SHOWN], False, arguments=True))
    if len(rows) > SHOWN and not options["dry_run"]:
        command.stderr.write(f"… and {len(rows) - SHOWN} more")
    for remark in missing(listing):
        command.stderr.write(remark)
    if options["dry_run"]:
        command.stdout.write(f"Dry run: nothing was released of {counted(len(rows))}.")
        raise_if_unread(listing.failed)
        return
    if not all(is_waiting(row.info) for row in rows):
        command.stderr.write(command.style.WARNING(WARNING))
    command.stderr.write(command.style.WARNING(MESSAGES))
    _confirm(command, options, counted(len(rows)))
    released = 0
    try:
        for row in rows:
            released += _release(row, options["reason"])
    except LockBackendError as error:
        raise CommandError(
            f"Released {counted(released)}, then Redis failed: {sentence(error.cause)} Try again."
        ) from error
    left = len(rows) - released
    if left:
        command.stderr.write(f"Not released, because the holder changed or the lock ended meanwhile: {counted(left)}.")
    if not released:
        raise CommandError("Nothing was released.")
    command.stdout.write(command.style.SUCCESS(f"Released {counted(released)} of {visible(task)}."))
    raise_if_unread(listing.failed)


def _confirm(command: BaseCommand, options: dict[str, Any], what: str) -> None:
    if options["yes"]:
        return
    command.stderr.write(f"Force-release {what}? [y/N] ", ending="")
    command.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("Not confirmed; nothing was released.")


def _release(row: HeldLockRow, reason: str) -> bool:
    return force_release(row.connection, row.held.name, row.held.fence, _user(), reason)


def _user() -> str:
    try:
        return f"command line ({getpass.getuser()})"
    except (OSError, KeyError):  # the user of a container may have no name
        return "command line"
