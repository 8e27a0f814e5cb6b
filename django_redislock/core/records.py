"""The description of a lock, as it is read back from the record that its holder wrote."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from ..exceptions import LockBackendError
from .keys import new_id, split_slot


@dataclass(frozen=True)
class LockInfo:
    """One held lock as Redis knows it; times are the server's."""

    name: str
    kind: str
    """The part of the package that took the lock: "lock", "semaphore", "cache", "celery", "command" or "leader"."""
    id: str
    """The owner id: the right to extend and release, so do not show it to people."""
    fence: int
    host: str
    pid: int
    thread: str
    label: str
    acquired_at: datetime
    age: float
    """Seconds since it was acquired."""
    expire: float
    """Its expiry in seconds, without renewal."""
    auto_renewal: bool
    ttl: float
    """Seconds until its expiry, unless it is renewed."""
    waiting: int
    """The number of its waiters whose processes are alive; above a thousand, an upper bound."""
    arguments: str = ""
    """The arguments of a task, shortened, and without those that should not be shown."""
    worker: str = ""
    """The name of the worker that runs the task; none while the task waits in its queue."""
    result_ignored: bool = False
    """Whether the task's result is not stored."""
    slot: int = 0
    """The number of the slot of a semaphore; of a lock 0."""
    limit: int = 0
    """The limit that the holder of a slot gave; of a lock 0."""
    recalled: bool = False
    """Whether its holder was asked to give it back: it is not renewed any more."""

    @property
    def holder(self) -> str:
        """The holder in one line: its label, if it has one, its host, process and thread."""
        place = f"{self.host} pid {self.pid} {self.thread}".strip()
        return f"{self.label} on {place}" if self.label else place


def new_mark() -> bytes:
    """Return a random mark for the record of an acquisition by an id that others may use, too."""
    return b',"by":"%b"' % new_id().encode()


def marked(record: bytes, mark: bytes) -> bytes:
    """Return the record with this mark."""
    return record[:-1] + mark + record[-1:]


RECALLED = "recalled "
"""In front of the id of a lock whose holder was asked to give it back, as in lib.lua."""
MAX_SECONDS = 32_503_680_000
"""Longer times are of no lock; since 1970, they end in the year 3000."""


class StoredLock:
    """A lock as it is stored in Redis. `info` parses the record: in a long list, only for the locks that are shown.

    `name` is the listed name: that of a slot has its number, too, which `split_slot` finds.
    """

    __slots__ = ("_acquired_ms", "_record", "age", "fence", "id", "name", "recalled", "ttl", "waiting")

    def __init__(self, name: str, value: bytes, ttl_ms: int, waiting: int, now_ms: int) -> None:
        try:
            id, fence, acquired, self._record = value.decode().split("\n", 3)
            self.recalled, self.id = id.startswith(RECALLED), id.removeprefix(RECALLED)
            self.fence, self._acquired_ms = int(fence), int(acquired)
            if not 0 <= self._acquired_ms < MAX_SECONDS * 1000:
                raise ValueError(f"acquired at {self._acquired_ms} ms")
        except ValueError as error:
            cause = f"the key of lock {name!r} has a value that no lock of this version wrote ({error})"
            raise LockBackendError(name, cause) from error
        self.name = name
        self.age = max(0.0, (now_ms - self._acquired_ms) / 1000)
        self.ttl = max(0.0, ttl_ms / 1000)
        self.waiting = waiting

    @property
    def record(self) -> bytes:
        """The record that its holder wrote."""
        return self._record.encode()

    @property
    def host(self) -> str:
        """The holder's host, read without the rest of the record, because lists are filtered by it."""
        found = _HOST_FIELD.match(self._record)
        return found[1] if found else self.info.host

    @property
    def info(self) -> LockInfo:
        """The whole description; what cannot be read of a record counts as empty.

        The record of another program may have any types, and times before or after all that Python has.
        """
        try:
            fields = json.loads(self._record or "{}")
        except (ValueError, RecursionError):
            fields = {}
        if type(fields) is not dict:
            fields = {}

        def text(key: str, default: str = "") -> str:
            value = fields.get(key)
            # An argument of a process that is not UTF-8 has characters that no page and no terminal can write.
            return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else default

        pid, expire, limit = fields.get("pid"), fields.get("expire"), fields.get("limit")
        name, slot = split_slot(self.name)
        return LockInfo(
            name=name,
            kind=text("kind", "lock"),
            id=self.id,
            fence=self.fence,
            host=text("host"),
            pid=pid if type(pid) is int and abs(pid) < 1 << 63 else 0,
            thread=text("thread"),
            label=text("label"),
            acquired_at=datetime.fromtimestamp(self._acquired_ms / 1000, UTC),
            age=self.age,
            expire=float(expire) if isinstance(expire, int | float) and 0 <= expire < MAX_SECONDS else 0.0,
            auto_renewal=fields.get("auto_renewal") is True,
            ttl=self.ttl,
            waiting=self.waiting,
            arguments=text("arguments"),
            worker=text("worker"),
            result_ignored=fields.get("result_ignored") is True,
            slot=slot,
            limit=limit if slot and type(limit) is int else 0,
            recalled=self.recalled,
        )


_HOST_FIELD = re.compile(r'\{"host":"([^"\\]*)"')


def parse(name: str, value: bytes | None, ttl_ms: int, waiting: int, now_ms: int) -> StoredLock | None:
    """Return the lock that the value of a lock key describes, or None when nobody holds the lock.

    Raises LockBackendError when something other than a lock wrote the value.
    """
    if value is None:
        return None
    stored = StoredLock(name, value, ttl_ms, waiting, now_ms)
    return stored if stored.fence else None
