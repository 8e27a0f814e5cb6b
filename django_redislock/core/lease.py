"""One acquisition of a lock: its id, its fence, its deadline, and whether it is still believed to be held."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..exceptions import LossRecord
from . import events
from .clock import monotonic
from .keys import LockKeys

if TYPE_CHECKING:
    from .server import Server
    from .steps import Call

GONE = "it expired, was force-released, or the server lost its data"


class Lease:
    """One acquisition, from the first attempt to the release.

    It is held until `deadline` on the monotonic clock, counted from when the last successful command was *sent*, so that
    the local belief always ends before the key does in Redis.
    """

    __slots__ = (
        *(
            "__weakref__",
            "server",
            "name",
            "keys",
            "id",
            "expire",
            "max_hold",
            "owner",
            "holder",
            "pid",
            "fence",
            "entries",
        ),
        *("acquired", "deadline", "next_renewal", "failures", "farewell", "_loss", "_losing"),
    )  # a thousand locks may be held at once

    def __init__(
        self,
        server: Server,
        name: str,
        keys: LockKeys,
        id: str,
        expire: float,
        owner: threading.Thread | asyncio.Task[Any],
        max_hold: float | None,
        holder: Callable[[], Any],
    ) -> None:
        self.server = server
        self.name = name
        self.keys = keys
        self.id = id
        self.expire = expire
        self.max_hold = max_hold
        self.owner = owner
        self.holder = holder
        self.pid = os.getpid()
        self.fence = 0
        self.entries = 1
        """How often its owner is inside; more than once through an RLock only."""
        self.acquired = 0.0
        self.deadline = 0.0
        self.next_renewal = 0.0
        self.failures = 0
        self.farewell: Call | None = None
        """The call that releases the lock, if it was packed ahead; of an id that nobody else acquires by."""
        self._loss: LossRecord | None = None
        self._losing = threading.Lock()

    def begin(self, fence: int, sent: float) -> None:
        """Note that the lock was acquired by a command sent at `sent`."""
        self.fence = fence
        self.acquired = sent
        self.renewed(sent, self.expire)

    def renewed(self, sent: float, life: float) -> None:
        """Note that the lock got a new life by a command sent at `sent`."""
        life = min(life, self.expire)  # which may have been shortened meanwhile
        self.failures = 0
        self.deadline = sent + life
        self.next_renewal = sent + life / 3
        if self.expire < life:  # shortened in another thread just now
            self.renewed(sent, self.expire)

    def change(self, expire: float) -> None:
        """Note that a command with another life is about to be sent: without an answer, count on the shorter of the two."""
        now = monotonic()
        self.expire = expire
        self.deadline = min(self.deadline, now + expire)
        self.next_renewal = min(self.next_renewal, now + expire / 3)

    @property
    def mark(self) -> bytes:
        """What the value of the lock begins with while it is held by this acquisition, or by the id that was given."""
        return f"{self.id}\n{self.fence}".encode() if self.fence else self.id.encode()

    @property
    def retry_for(self) -> float:
        """Seconds for which its server is tried again when it cannot be reached."""
        return self.server.retry_for

    @property
    def foreign(self) -> bool:
        """Whether the acquisition belongs to the process that this one was forked from."""
        return self.pid != os.getpid()

    @property
    def owner_ended(self) -> bool:
        """Whether the thread or task that acquired the lock ended without releasing it."""
        if isinstance(self.owner, asyncio.Task):
            return self.owner.done() or self.owner.get_loop().is_closed()
        return not self.owner.is_alive()

    @property
    def loss(self) -> LossRecord | None:
        """Why and when the lock was lost, or None while it is held; local and free."""
        if self._loss is None and monotonic() >= self.deadline and not self.foreign:
            self.lose(f"its life of {self.expire:g} s ended without a renewal")
        return self._loss

    def lose(self, reason: str) -> None:
        """Note that the lock was lost, and report it once, if it was acquired here at all."""
        if self.note_loss(reason) and self.fence:
            self.report_loss()

    def note_loss(self, reason: str) -> bool:
        """Note that the lock was lost; False when that is known."""
        with self._losing:
            if self._loss is not None:
                return False
            self._loss = LossRecord(self.name, self.id, self.fence, reason, time.time())
        return True

    def report_loss(self) -> None:
        """Tell everybody of the loss, which may take them any time."""
        if self._loss is None:
            return
        events.emit(
            "lost",
            "Lock %r (fence %d) was lost: %s.",
            self.name,
            self.fence,
            self._loss.reason,
            name=self.name,
            fence=self.fence,
            record=self._loss,
        )
        holder = self.holder()
        if holder is not None and holder.on_lost is not None:
            holder._call_on_lost(self)
