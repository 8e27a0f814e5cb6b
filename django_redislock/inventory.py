"""The held locks of all connections, for the admin and the command: read, find, and force-release them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from django.core.exceptions import ImproperlyConfigured

from . import conf
from .connections import clients, get_client
from .core import LockInfo, listing
from .core.listing import QueuedWaiter, list_locks, read_locks, read_queue
from .core.records import StoredLock
from .exceptions import LockBackendError

LIMIT = 10_000
"""Locks read of one connection at most."""
RETRY_FOR = 0.5
"""Seconds for which a command is tried again; short, so that a dead server does not delay the page of the others."""


class HeldLockRow(NamedTuple):
    """A held lock and the connection that it was read from."""

    connection: str
    held: StoredLock

    @property
    def info(self) -> LockInfo:
        """The whole record; parsed at each access, because most rows of a long list are never shown."""
        return self.held.info


class Listing(NamedTuple):
    """The locks that were read, and the connections of which locks are missing."""

    rows: list[HeldLockRow]
    failed: dict[str, str]
    """By connection, or by node of a connection to a Cluster: the reason why its locks could not be read."""
    cut: list[str]
    """Connections that hold more than `LIMIT` locks."""
    foreign: dict[str, list[str]]
    """By connection: the names of the locks whose value no lock wrote, so that they are not among the rows."""


def read(connection: str | None = None, matching: Callable[[str, str], object] | None = None) -> Listing:
    """Read the held locks of this connection, with None of all connections. Errors are returned and not raised.

    Only the locks for which `matching(connection, name)` is true are read.
    """
    try:
        found, failed = clients(connection)
    except ImproperlyConfigured as error:
        return Listing([], {conf.NAME: str(error)}, [], {})
    found_locks = Listing([], failed, [], {})
    for at, client in found.items():
        picked = (lambda name, at=at: matching(at, name)) if matching else None
        missing: dict[str, str] = {}
        foreign: dict[str, str] = {}
        locks = list_locks(
            client, conf.get().key_prefix, matching=picked, retry_for=RETRY_FOR, missing=missing, foreign=foreign
        )
        try:
            rows = [HeldLockRow(at, held) for held in islice(locks, LIMIT + 1)]
        except LockBackendError as error:
            failed[at] = cause_of(error)
            continue
        failed |= of_nodes(at, missing)
        if foreign:
            found_locks.foreign[at] = sorted(foreign)
        if len(rows) > LIMIT:
            rows.pop()
            found_locks.cut.append(at)
        found_locks.rows.extend(rows)
    return found_locks


def find(connection: str, names: Iterable[str]) -> dict[str, HeldLockRow]:
    """Return by name those of these locks of a connection that are held now.

    Raises ImproperlyConfigured and LockBackendError.
    """
    client = get_client(connection)
    found = read_locks(client, names, conf.get().key_prefix, retry_for=RETRY_FOR)
    return {held.name: HeldLockRow(connection, held) for held in found}


def queue(connection: str, name: str) -> list[QueuedWaiter]:
    """Return the first waiters in the queue of a lock. Raises ImproperlyConfigured and LockBackendError."""
    return read_queue(get_client(connection), name, conf.get().key_prefix, retry_for=RETRY_FOR)


def force_release(connection: str, name: str, fence: int, by: object, reason: str = "", recalls: bool = False) -> bool:
    """Take the lock from the acquisition with that fence, or with `recalls` ask for it back, and return whether that
    acquisition still held it.

    The holder, the log and the signal get the user or the words `by`, and the `reason`.
    Raises ImproperlyConfigured and LockBackendError.
    """
    return listing.force_release(get_client(connection), name, conf.get().key_prefix, fence, by, reason, recalls)


def of_nodes(connection: str, missing: dict[str, str]) -> dict[str, str]:
    """Return the reasons why nodes of a connection could not be read, by the name of the node."""
    return {f"{connection} (node {node})": why for node, why in missing.items()}


def cause_of(error: ImproperlyConfigured | LockBackendError) -> str:
    """Return in words why a connection failed."""
    return error.cause if isinstance(error, LockBackendError) else str(error)
