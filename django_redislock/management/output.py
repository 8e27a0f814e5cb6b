"""Held locks in the output of the command: as a table, as lines, and as JSON data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from .. import inventory
from ..core import LockInfo
from ..core.listing import QueuedWaiter
from ..exceptions import LockBackendError
from ..inventory import HeldLockRow, Listing
from ..texts import duration, visible


def table(rows: list[HeldLockRow], ids: bool, *, arguments: bool = False) -> str:
    if not rows:
        return "No held locks found."
    words = [words_of(row, ids) | ({"arguments": visible(row.info.arguments)} if arguments else {}) for row in rows]
    lines = [[heading.upper() for heading in words[0]], *(list(line.values()) for line in words)]
    widths = [min(60, max(map(len, column))) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def lines_of(rows: list[HeldLockRow], ids: bool) -> str:
    return "\n\n".join("\n".join(f"{key:<11} {text}" for key, text in _all(row, ids).items()) for row in rows)


def counted(locks: int) -> str:
    return "1 lock" if locks == 1 else f"{locks} locks"


def missing(listing: Listing) -> list[str]:
    """Return a remark for each connection about the locks that are not in the listing although they may be held."""
    text = "Connection {!r} holds more than {} locks; the others were not read."
    remarks = [text.format(name, inventory.LIMIT) for name in listing.cut]
    text = "Connection {!r} has {} whose value no lock wrote: {}."
    for name, locks in listing.foreign.items():
        shown = ", ".join(map(repr, locks[:5])) + (", …" if len(locks) > 5 else "")
        remarks.append(text.format(name, counted(len(locks)), shown))
    return remarks


def words_of(row: HeldLockRow, ids: bool) -> dict[str, str]:
    """Return the columns of a lock in the table, by heading; its owner id only on request."""
    info = row.info
    words = {
        "name": visible(info.name) + (f" [{info.slot} of {info.limit}]" if info.slot else ""),
        "kind": visible(info.kind),
        "held for": duration(info.age),
        "expires in": duration(info.ttl) + _renewal(info),
        "waiting": str(info.waiting),
        "holder": visible(info.holder),
        "fence": str(info.fence),
        "connection": row.connection,
    }
    return words | ({"id": visible(info.id)} if ids else {})


def _renewal(info: LockInfo) -> str:
    """Return why the lock is not renewed."""
    return ", recalled" if info.recalled else "" if info.auto_renewal else ", not renewed"


def _all(row: HeldLockRow, ids: bool) -> dict[str, str]:
    """Return the columns with the first waiters, and for a task's lock also its arguments and its worker."""
    info = row.info
    task = {"arguments": info.arguments, "worker": info.worker}
    words = words_of(row, ids) | {key: visible(text) for key, text in task.items() if text}
    waiters = [f"{waiter.host or '?'} pid {waiter.pid} for {duration(waiter.seconds)}" for waiter in _queue_of(row)]
    if waiters:
        words["waiting"] += ": " + visible(", ".join(waiters)) + (", …" if info.waiting > len(waiters) else "")
    return words


def _queue_of(row: HeldLockRow) -> list[QueuedWaiter]:
    """Return the first waiters for the lock; none when there are none, or when Redis does not answer any more."""
    if row.info.waiting:
        with suppress(LockBackendError):
            return inventory.queue(row.connection, row.held.name)
    return []


def plain(row: HeldLockRow, ids: bool) -> dict[str, Any]:
    """Return the JSON data of a lock: times in seconds, its owner id only on request."""
    info = row.info
    lock = {"connection": row.connection} | vars(info) | {"acquired_at": info.acquired_at.isoformat()}
    if not ids:
        del lock["id"]
    return lock


def plain_with_queue(row: HeldLockRow, ids: bool) -> dict[str, Any]:
    """Return the JSON data of a lock and of its first waiters, the next holder first."""
    return plain(row, ids) | {"queue": [waiter._asdict() for waiter in _queue_of(row)]}
