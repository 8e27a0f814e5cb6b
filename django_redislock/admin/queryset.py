"""The held locks for the admin's change list, with the methods of a QuerySet that it calls, and the list's filters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, overload

from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.translation import gettext, gettext_lazy as _

from ..connections import clients
from ..core import LockInfo
from ..core.keys import queue_name
from ..core.records import StoredLock
from ..exceptions import LockBackendError
from ..inventory import HeldLockRow, Listing, queue, read
from ..models import HeldLock, encode_key
from ..task_names import task_of
from ..texts import duration, visible

if TYPE_CHECKING:
    from django.contrib.admin.views.main import ChangeList


def renewal_is_late(lock: LockInfo | HeldLock) -> bool:
    """Return whether less than half of the expiry is left; a living holder renews its lock every third of it."""
    return lock.ttl < lock.expire / 2


STATES: dict[str, Callable[[LockInfo], bool]] = {
    "renewed": lambda lock: lock.auto_renewal and not renewal_is_late(lock),
    "expiring": renewal_is_late,
    "unrenewed": lambda lock: not lock.auto_renewal,
}


@dataclass(frozen=True)
class HeldLocks:
    """The held locks, narrowed and ordered. Redis is read at the first access."""

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
        """Narrow by a field of this class, or by `pk__in` (values of check boxes)."""
        if any(conditions):
            raise ValueError("Held locks can be filtered by their fields only.")
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
        """The tasks of all held locks, when the list shows one task: then the locks of other tasks are not read."""
        return {self.task or ""}

    @cached_property
    def rows(self) -> list[HeldLockRow]:
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
        """The hosts of all locks that were read, and the wanted host."""
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
        queues = {(row.connection, queue_name(row.held.name)): row.held.waiting for row in self.rows}
        return len(held), sum(queues.values()), max((lock.age for lock in held), default=0.0)

    def count(self) -> int:
        return len(self.rows)

    __len__ = count

    def __iter__(self) -> Iterator[HeldLock]:
        return iter(self[:])

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


def _sort_key(field: str) -> Callable[[HeldLockRow], Any]:
    if field == "pk":
        return lambda row: (row.connection, row.held.name)
    if field == "connection":
        return lambda row: row.connection
    if field in StoredLock.__slots__:
        return lambda row: getattr(row.held, field)
    return lambda row: getattr(row.info, field)


def read_waiters(lock: HeldLock) -> HeldLock:
    """Fill in the first waiters of the lock, if there are any. If Redis does not answer, only their number is known."""
    if lock.waiting:
        with suppress(ImproperlyConfigured, LockBackendError):
            lock.queue = queue(lock.connection, lock.name)
    return lock


class FieldFilter(admin.SimpleListFilter):
    """Filters by the field of `HeldLocks` that its parameter names."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(**{str(self.parameter_name): self.value()})


class KindFilter(FieldFilter):
    title = _("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return HeldLock._meta.get_field("kind").choices


class ConnectionFilter(FieldFilter):
    title = _("connection")
    parameter_name = "connection"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        try:
            found, failed = clients()
        except ImproperlyConfigured:  # reading the locks reports it
            return []
        names = [*found, *failed]
        return [(name, name) for name in names] if len(names) > 1 else []

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        # Only what is offered: an address of this page must not read every cache that has a client.
        return super().queryset(request, queryset) if self.value() in dict(self.lookup_choices) else queryset


class StateFilter(FieldFilter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [("renewed", _("renewing")), ("expiring", _("expiring soon")), ("unrenewed", _("not renewed"))]


class AgeFilter(admin.SimpleListFilter):
    title = _("age")
    parameter_name = "older"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [
            (str(seconds), gettext("more than %(time)s") % {"time": duration(seconds)})
            for seconds in (60, 600, 3600, 86400)
        ]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        seconds = self.value()
        return queryset.filter(older=float(seconds)) if seconds and seconds in dict(self.lookup_choices) else queryset


class FoundFilter(FieldFilter):
    """Offers the values of the locks that were read for the page, so that Redis is read only once."""

    found: str
    """The property of `HeldLocks` with these values."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return []

    def has_output(self) -> bool:
        return True

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        self.lookup_choices = [(value, visible(value)) for value in sorted(getattr(changelist.queryset, self.found))]
        return super().choices(changelist)


class TaskFilter(FoundFilter):
    title = _("task")
    parameter_name = "task"
    found = "tasks"


class HostFilter(FoundFilter):
    title = _("host")
    parameter_name = "host"
    found = "hosts"
