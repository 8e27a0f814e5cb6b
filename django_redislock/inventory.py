"""The held locks of all connections, for the admin and the command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, overload

from django.core.exceptions import ImproperlyConfigured
from django.utils.formats import number_format
from django.utils.functional import cached_property
from django.utils.translation import gettext
from redis import Redis

from . import conf
from .connections import connection_names, get_client
from .core import Lock, LockInfo
from .core.driver.place import place_of
from .core.listing import QueuedWaiter, list_locks, read_locks, read_queue
from .core.records import StoredLock
from .exceptions import LockBackendError
from .models import HeldLock, encode_key
from .task_names import task_of

LIMIT = 10_000
"""Locks read of one connection at most."""
RETRY_FOR = 0.5
"""Seconds for which a connection that is down holds up the page of the others."""


class Row(NamedTuple):
    """A held lock and the connection that it was read from."""

    connection: str
    held: StoredLock

    @property
    def info(self) -> LockInfo:
        """Everything that is known of it; not kept, for most of a long list is never shown."""
        return self.held.info


class Listing(NamedTuple):
    """What was read, and what was not."""

    rows: list[Row]
    failed: dict[str, str]
    """By connection: why it could not be read."""
    cut: list[str]
    """Connections that hold more than `LIMIT` locks."""


def clients(connection: str | None = None) -> tuple[dict[str, Redis], dict[str, str]]:
    """Return the client of each connection (or of that one only), and why others have none.

    A database that several connections lead to comes once. Raises ImproperlyConfigured for wrong settings.
    """
    settings = conf.get()
    names = connection_names() if settings.enabled else []
    found: dict[str, Redis] = {}
    failed = {}
    places = set()
    for name in names:
        if connection not in (None, name):
            continue
        try:
            client = get_client(name)
        except ImproperlyConfigured as error:
            failed[name] = str(error)
            continue
        place = place_of(client.connection_pool)
        if place not in places:
            places.add(place)
            found[name] = client
    return found, failed


def several_connections() -> bool:
    """Return whether locks are held on more than one connection."""
    try:
        found, failed = clients()
    except ImproperlyConfigured:  # the reading of the locks reports it
        return False
    return len(found) + len(failed) > 1


def read(connection: str | None = None, matching: Callable[[str, str], object] | None = None) -> Listing:
    """Read the held locks of this connection, of all with None; what cannot be read is told, not raised.

    `matching(connection, name)` picks which.
    """
    try:
        found, failed = clients(connection)
    except ImproperlyConfigured as error:
        return Listing([], {conf.NAME: str(error)}, [])
    listing = Listing([], failed, [])
    for at, client in found.items():
        picked = (lambda name, at=at: matching(at, name)) if matching else None
        locks = list_locks(client, conf.get().key_prefix, matching=picked, retry_for=RETRY_FOR)
        try:
            found_here = list(islice(locks, LIMIT + 1))
        except LockBackendError as error:
            failed[at] = reason(error)
            continue
        if len(found_here) > LIMIT:
            found_here.pop()
            listing.cut.append(at)
        listing.rows.extend(Row(at, held) for held in found_here)
    return listing


def find(connection: str, names: Iterable[str]) -> dict[str, Row]:
    """Return who holds these locks of a connection now, by name.

    Raises ImproperlyConfigured and LockBackendError.
    """
    client = get_client(connection)
    found = read_locks(client, names, conf.get().key_prefix, retry_for=RETRY_FOR)
    return {held.name: Row(connection, held) for held in found}


def queue(connection: str, name: str) -> list[QueuedWaiter]:
    """Return the first of those who wait for a lock. Raises ImproperlyConfigured and LockBackendError."""
    return read_queue(get_client(connection), name, conf.get().key_prefix, retry_for=RETRY_FOR)


def look_at_queue(lock: HeldLock) -> HeldLock:
    """Read the first waiters of the lock, if there are any. Without an answer only their number is known."""
    if lock.waiting:
        with suppress(ImproperlyConfigured, LockBackendError):
            lock.queue = queue(lock.connection, lock.name)
    return lock


def force_release(connection: str, name: str, fence: int, by: object, reason: str = "") -> bool:
    """Take the lock from the acquisition with that fence, if it still holds it.

    `by` (who) and `reason` are reported to the former holder, in the log and the signal.
    """
    return Lock(get_client(connection), name, prefix=conf.get().key_prefix).reset(fence=fence, by=by, reason=reason)


def reason(error: ImproperlyConfigured | LockBackendError) -> str:
    """Return why a connection could not be read, in words."""
    return error.cause if isinstance(error, LockBackendError) else str(error)


def expiring(lock: LockInfo | HeldLock) -> bool:
    """Return whether less than half of the life is left: a living holder renews every third of it."""
    return lock.ttl < lock.expire / 2


STATES: dict[str, Callable[[LockInfo], bool]] = {
    "renewed": lambda lock: lock.auto_renewal and not expiring(lock),
    "expiring": expiring,
    "unrenewed": lambda lock: not lock.auto_renewal,
}


@dataclass(frozen=True)
class HeldLocks:
    """The held locks with as much of a QuerySet's face as the admin's list looks at. Read once, when first needed."""

    order: tuple[str, ...] = ()
    connection: str | None = None
    kind: str | None = None
    host: str | None = None
    task: str | None = None
    state: str | None = None
    older: float = 0
    term: str = ""
    keys: frozenset[str] | None = None

    model = HeldLock
    ordered = True
    totally_ordered = True
    query = SimpleNamespace(order_by=(), select_related=False)

    def filter(self, *conditions: object, **lookups: Any) -> HeldLocks:
        """Narrow by a field of this class or by `pk__in` (values of check boxes)."""
        if any(conditions):
            raise ValueError("Held locks cannot be filtered by this.")
        if "pk__in" in lookups:
            lookups["keys"] = frozenset(value.partition(".")[0] for value in lookups.pop("pk__in"))
        return replace(self, **lookups)

    def order_by(self, *fields: str) -> HeldLocks:
        return replace(self, order=fields)

    @cached_property
    def listing(self) -> Listing:
        return read(self.connection, self._matching)

    @property
    def _matching(self) -> Callable[[str, str], bool] | None:
        term, keys, task, seen = self.term.casefold(), self.keys, self.task, self._tasks_seen
        if not term and keys is None and task is None:
            return None

        def matches(connection: str, name: str) -> bool:
            if task is not None:
                found = task_of(name)
                seen.add(found or "")
                if found != task:
                    return False
            return (keys is None or encode_key(connection, name) in keys) and term in name.casefold()

        return matches

    @cached_property
    def _tasks_seen(self) -> set[str]:
        """All tasks, when the locks of one task are wanted, because the locks of the others are not read."""
        return {self.task or ""}

    @cached_property
    def rows(self) -> list[Row]:
        rows = [row for row in self.listing.rows if self._picks(row.held)]
        for field in reversed(self.order):
            rows.sort(key=_sort_key(field.removeprefix("-")), reverse=field.startswith("-"))
        return rows

    def _picks(self, lock: StoredLock) -> bool:
        if self.host not in (None, lock.host) or lock.age < self.older:
            return False
        if self.kind is None and self.state is None:
            return True
        info = lock.info
        return self.kind in (None, info.kind) and (
            self.state is None or (self.state in STATES and STATES[self.state](info))
        )

    @property
    def hosts(self) -> set[str]:
        """The hosts of all that was read, and the one that is asked for."""
        return {host for host in (self.host, *(row.held.host for row in self.listing.rows)) if host}

    @property
    def tasks(self) -> set[str]:
        """The tasks of all locks that were read, and the wanted task."""
        read = self.listing.rows if self.task is None else []
        return {task for task in (*self._tasks_seen, *(task_of(row.held.name) for row in read)) if task}

    @property
    def summary(self) -> tuple[int, int, float]:
        """The number of locks, the number of waiters, and the age of the oldest lock in seconds."""
        held = [row.held for row in self.rows]
        return len(held), sum(lock.waiting for lock in held), max((lock.age for lock in held), default=0.0)

    def count(self) -> int:
        return len(self.rows)

    __len__ = count

    def __iter__(self) -> Iterator[HeldLock]:
        return (HeldLock.of(row.connection, row.info) for row in self.rows)

    @overload
    def __getitem__(self, index: int) -> HeldLock: ...
    @overload
    def __getitem__(self, index: slice) -> list[HeldLock]: ...
    def __getitem__(self, index: int | slice) -> HeldLock | list[HeldLock]:
        if isinstance(index, slice):
            return [HeldLock.of(row.connection, row.info) for row in self.rows[index]]
        row = self.rows[index]
        return HeldLock.of(row.connection, row.info)

    def _clone(self) -> HeldLocks:
        return self


def _sort_key(field: str) -> Callable[[Row], Any]:
    if field == "pk":
        return lambda row: (row.connection, row.held.name)
    if field == "connection":
        return lambda row: row.connection
    if field in StoredLock.__slots__:
        return lambda row: getattr(row.held, field)
    return lambda row: getattr(row.info, field)


def duration(seconds: float) -> str:
    """Return a length of time in at most two units, for people."""
    if seconds < 9.95:
        return gettext("%(seconds)s s") % {"seconds": number_format(round(seconds, 1), 1)}  # which itself only cuts
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [
        (days, gettext("%(days)d d") % {"days": days}),
        (hours, gettext("%(hours)d h") % {"hours": hours}),
        (minutes, gettext("%(minutes)d min") % {"minutes": minutes}),
        (whole, gettext("%(seconds)s s") % {"seconds": whole}),
    ]
    first = next(index for index, (number, _) in enumerate(parts) if number)
    return " ".join(text for number, text in parts[first : first + 2] if number)
