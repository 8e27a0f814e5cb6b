"""Who holds a lock: the record that a holder leaves in Redis, and what is read back from it."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from ..exceptions import LockBackendError
from .driver import process


@dataclass(frozen=True)
class LockInfo:
    """One lock as Redis knows it; times are the server's."""

    name: str
    kind: str
    """"lock", "cache", "celery", "command" or "leader"."""
    id: str
    """The right to extend and release: do not show it to people."""
    fence: int
    host: str
    pid: int
    thread: str
    label: str
    acquired_at: datetime
    age: float
    """Seconds since it was acquired."""
    expire: float
    """Its life in seconds, without renewal."""
    auto_renewal: bool
    ttl: float
    """Seconds left, unless it is renewed."""
    waiting: int
    """How many wait for it and live; of more than a thousand, an upper bound."""
    arguments: str = ""
    """What a task was called with, shortened, and without what should not be shown."""
    worker: str = ""
    """The name of the Celery worker; none while the task waits in its queue."""
    result_ignored: bool = False
    """Whether nobody will be given the task's result."""

    @property
    def holder(self) -> str:
        """The holder in one line: its label, if it has one, and where it runs."""
        place = f"{self.host} pid {self.pid} {self.thread}".strip()
        return f"{self.label} on {place}" if self.label else place


def new_id() -> str:
    """Return a random owner id."""
    return os.urandom(16).hex()


@lru_cache(maxsize=1024)
def _static(pid: int, thread: str, kind: str, label: str, expire: float, auto_renewal: bool) -> bytes:
    fields = {"host": process.HOST, "pid": pid, "thread": thread, "kind": kind, "label": label}
    return json.dumps(fields | {"expire": expire, "auto_renewal": auto_renewal}, separators=(",", ":")).encode()


def record(kind: str, label: str, expire: float, auto_renewal: bool) -> bytes:
    """Return what this thread writes of itself into a lock that it takes."""
    return _static(process.pid, threading.current_thread().name, kind, label, expire, auto_renewal)


class Held:
    """A lock as the server told of it. `info` reads what its holder says of itself: in a long list, only of those shown."""

    __slots__ = ("_acquired_ms", "_record", "age", "fence", "id", "name", "ttl", "waiting")

    def __init__(self, name: str, value: bytes, ttl_ms: int, waiting: int, now_ms: int) -> None:
        try:
            self.id, fence, acquired, self._record = value.decode().split("\n", 3)
            self.fence, self._acquired_ms = int(fence), int(acquired)
        except ValueError as error:
            cause = f"the key of lock {name!r} holds what no lock of this version wrote ({error})"
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
        """The host alone: a list is narrowed by it."""
        found = _HOST_FIELD.match(self._record)
        return found[1] if found else self.info.host

    @property
    def info(self) -> LockInfo:
        """Everything; of a record that cannot be read, as little as without one."""
        try:
            fields = json.loads(self._record or "{}")
        except ValueError:
            fields = {}
        if type(fields) is not dict:
            fields = {}
        return LockInfo(
            name=self.name,
            kind=fields.get("kind", "lock"),
            id=self.id,
            fence=self.fence,
            host=fields.get("host", ""),
            pid=fields.get("pid", 0),
            thread=fields.get("thread", ""),
            label=fields.get("label", ""),
            acquired_at=datetime.fromtimestamp(self._acquired_ms / 1000, UTC),
            age=self.age,
            expire=fields.get("expire", 0.0),
            auto_renewal=fields.get("auto_renewal", False),
            ttl=self.ttl,
            waiting=self.waiting,
            arguments=fields.get("arguments", ""),
            worker=fields.get("worker", ""),
            result_ignored=fields.get("result_ignored", False),
        )


_HOST_FIELD = re.compile(r'\{"host":"([^"\\]*)"')


def parse(name: str, value: bytes | None, ttl_ms: int, waiting: int, now_ms: int) -> Held | None:
    """Return what the value of a lock key says, or None when nobody holds the lock.

    Raises LockBackendError when something else wrote it.
    """
    if value is None:
        return None
    held = Held(name, value, ttl_ms, waiting, now_ms)
    return held if held.fence else None
