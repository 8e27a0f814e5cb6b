"""One acquisition of a quorum lock: its part on each of the servers, and whether most of them still hold it."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..exceptions import LockBackendError, LockError, LockLost, LossCode, LossRecord
from . import events
from .clock import monotonic
from .driver import process
from .driver.server import Server
from .driver.slot import Slot
from .lease import Lease
from .lock import Lock
from .records import new_id
from .validation import Seconds


class _PartLease(Lease):
    """The lease on one server. Its loss is not yet the loss of the quorum lock, and its server is not tried again."""

    retry_for = 0.0

    def report_loss(self) -> None:
        part = self.lock_ref()
        whole = None if part is None else part.whole()
        if whole is not None:
            whole.report_loss()


class _Part(Lock):
    """The lock on one of the servers, for one acquisition of the quorum lock."""

    _lease_kind = _PartLease
    whole: Callable[[], QuorumLease | None]
    shared_id: str

    def _new_lease(self, acquirer: Any, id: str) -> Lease:
        return super()._new_lease(acquirer, self.shared_id)

    def _report(self, event: str, lease: Lease) -> None:
        """Report nothing: the events of the quorum lock are reported."""


class QuorumLease:
    """One acquisition, from the first attempt to the release.

    `options` are those of the lock on each server; `lock` is a weak reference to the quorum lock, which learns of the
    loss.
    """

    def __init__(self, name: str, servers: list[Server], options: dict[str, Any], lock: weakref.ref[Any]) -> None:
        self.name = name
        self.id = new_id()
        self._servers = servers
        self._options = options
        self._lock = lock
        self._needed = majority(servers)
        self._pid = process.pid
        self._parts: list[_Part] = []
        """The parts that are acquired, and not released yet."""
        self._released = 0
        self._losses: list[LossRecord] = []
        """The losses of the parts that were found lost at the release."""
        self._complete = False
        self._loss: Slot[LossRecord] = Slot()

    @property
    def inherited_by_fork(self) -> bool:
        """Whether the acquisition belongs to the process that this one was forked from."""
        return self._pid != process.pid

    def acquire_majority(self, until: float) -> bool:
        """Acquire the part of each server in turn; False when one was not free in time, or too many were lost while
        waiting.

        Raises LockBackendError when too many servers cannot answer.
        """
        missing = 0
        for server in self._servers:
            part = _Part(server, self.name, **self._options)
            part.whole, part.shared_id = weakref.ref(self), self.id
            try:
                left = max(0.0, until - monotonic())
                acquired = part.acquire(timeout=None if left == math.inf else left)
            except LockBackendError as error:
                missing += 1
                if len(self._servers) - missing < self._needed:
                    cause = f"{missing} of {len(self._servers)} servers: {error.cause}"
                    raise LockBackendError(self.name, cause) from error
                continue
            if not acquired:
                return False
            self._parts.append(part)
        self._complete = self.held_count >= self._needed
        return self._complete

    def release_parts(self) -> None:
        """Release the parts of a lock that was not acquired."""
        for part in self._parts:
            with suppress(LockError):
                part.release()

    def release(self) -> None:
        """Release every part; a part whose server does not answer stays, so that the release may be repeated.

        Raises LockBackendError when too many servers cannot answer, and the lock was not lost.
        """
        cause = ""
        for part in list(self._parts):
            try:
                part.release()
                self._released += 1
            except LockLost as error:
                self._losses.append(error.record)
            except LockBackendError as error:
                cause = error.cause
                continue
            self._parts.remove(part)
        if self.loss is None and cause and self._released < self._needed:
            raise LockBackendError(self.name, cause)

    def extend(self, expire: Seconds | None) -> None:
        """Set the expiry of every part.

        Raises LockBackendError when too many servers cannot answer, and the lock was not lost.
        """
        extended, cause = 0, ""
        for part in self._parts:
            try:
                part.extend(expire)
                extended += 1
            except LockLost:
                continue
            except LockBackendError as error:
                cause = error.cause
        if self.loss is None and extended < self._needed:
            raise LockBackendError(self.name, cause)

    @property
    def loss(self) -> LossRecord | None:
        """Why and when the quorum lock was lost, or None while it is held; asks nobody."""
        if self._loss.value is None:
            self.report_loss()
        return self._loss.value

    @property
    def held_count(self) -> int:
        """The number of servers on which it is held, as far as this process knows."""
        return sum(part.lost is None for part in list(self._parts))

    def report_loss(self) -> None:
        """Report the loss of the quorum lock, once, if too few servers hold it."""
        # `held_count` may report, so it is read before the slot is used. It is read before `_released`: of a part that is
        # released meanwhile, one of the two counts it in any case.
        lost = self._complete and self.held_count + self._released < self._needed
        if not lost:
            return
        losses = [*self._losses, *filter(None, [part.lost for part in list(self._parts)])]
        reason = f"fewer than {self._needed} of its servers still hold it"
        code: LossCode = "too_few_servers"
        if len({loss.code for loss in losses}) == 1:  # all for the same cause
            code, reason = losses[0].code, f"{reason}: {losses[0].reason}"
        record = LossRecord(self.name, self.id, 0, reason, time.time(), code)
        if self._loss.put_if_empty(record) is not record:
            return
        events.emit("lost", "Quorum lock %r was lost: %s.", self.name, reason, name=self.name, fence=0, record=record)
        lock = self._lock()
        if lock is not None:
            lock._call_on_lost(self)


def majority(servers: list[Server]) -> int:
    """Return the smallest number of the servers that is more than half of them."""
    return len(servers) // 2 + 1
