"""One acquisition of a quorum lock: its part on each of the servers, and whether most of them still hold it."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..exceptions import LockBackendError, LossCode, LossRecord
from . import events, operations
from .acquirers import holders
from .base import BaseLock
from .clock import monotonic
from .driver import os_threads, process
from .driver.effects import Operation
from .driver.os_threads import Slot
from .driver.server import Server
from .driver.side_by_side import LEFT_OUT, in_background, on_servers
from .lease import Lease
from .loss import find_cause
from .quorum_attempt import QuorumAttempt
from .quorum_parts import Part
from .watchdog import watchdog

MENDED = {"server_lost_data", "no_answer", "expired"}
"""The losses after which a part is taken anew; after a forced release it is not."""


class QuorumLease(QuorumAttempt):
    """One acquisition, from the first attempt to the release. The loss is reported to `lock`, the quorum lock."""

    def __init__(self, servers: list[Server], template: BaseLock, acquirer: Any, lock: Any) -> None:
        super().__init__(servers, template, acquirer)
        self._lock = weakref.ref(lock)
        self._pid = process.pid
        self._acquired = 0.0
        self._released = 0
        self._upkeep: asyncio.TimerHandle | None = None
        self._loss: Slot[LossRecord] = Slot()

    @property
    def inherited_by_fork(self) -> bool:
        """Whether the acquisition belongs to the process that this one was forked from."""
        return self._pid != process.pid

    async def acquire(self, until: float) -> bool:
        """Acquire most of the parts; see `QuorumAttempt.acquire`."""
        acquired = await super().acquire(until)
        if acquired:
            self._plan_upkeep()
        return acquired

    def _hold(self, part: Part) -> None:
        lease = part.lease
        if lease is not None:
            self._acquired = lease.acquired = self._acquired or lease.acquired
            watchdog.add(lease, self._template.auto_renewal)
            holders.add(lease)

    def _plan_upkeep(self) -> None:
        """Ask again later for parts that are not held."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        if self.loop is not None and len(self._held()) < len(self.parts):
            self._upkeep = self.loop.call_later(min(self.expire / 3, LEFT_OUT), _mend, weakref.ref(self))

    def mend(self) -> None:
        """Ask for the parts that are not held, if the lock is held and renewed."""
        if self._ended or not any(part.lease is not None and part.lease.renewing for part in self._held()):
            return
        for part in self.parts:
            loss = None if part.lease is None else part.lease.loss
            left_out = part.server.left_out_until > monotonic()
            if part.task is None and not part.held and not left_out and (loss is None or loss.code in MENDED):
                self._start(part, 0.0)
        self._plan_upkeep()

    async def extend(self, seconds: float | None) -> None:
        """Set the expiry of every part.

        Raises LockBackendError when too many servers cannot answer, and the lock was not lost.
        """
        leases = [part.lease for part in self._held() if part.lease is not None]
        if seconds is not None:
            self.expire = seconds
            for lease in leases:
                lease.change(seconds)
                watchdog.reschedule(lease)
        renewals = {lease.server: self._renew(lease) for lease in leases}
        renewed, cause = await on_servers(renewals, lambda renewed, _: sum(renewed.values()) >= self._needed)
        # Without a cause all have answered, and parts that were found lost have been taken anew.
        if cause and self.loss is None and sum(renewed.values()) < self._needed:
            raise LockBackendError(self.name, cause)

    def _renew(self, lease: Lease) -> Operation[bool]:
        if (yield from operations.renew(lease)):
            return True
        watchdog.remove(lease)
        lease.lose((yield from find_cause(lease)))
        return False

    async def release(self) -> None:
        """Release every part; a part whose server does not answer stays, so that the release may be repeated.

        Raises LockBackendError when too many servers cannot answer, and the lock was not lost.
        """
        if self.loss is not None:
            await self._give_back()
            return
        self._stop()
        leases = {part: part.lease for part in self._held() if part.lease is not None}
        # A renewal that arrived late may have kept a part whose expiry is over here; its server is not waited for.
        over = [part.lease for part in self.parts if part.lease is not None and part not in leases]
        if over:
            in_background(asyncio.ensure_future(self._release_leases(over)))
        releases = {lease.server: self._release(lease) for lease in leases.values()}
        replies, cause = await on_servers(
            releases, lambda replies, _: self._released + sum(replies.values()) >= self._needed
        )
        for part in leases:
            # `_released` first, so that a thread that reads the loss meanwhile counts the part at least once.
            self._released += replies.get(part.server, False)
            if replies.get(part.server):
                part.lease = None
        if self._released < self._needed and self.loss is None:
            raise LockBackendError(self.name, cause)

    def _release(self, lease: Lease) -> Operation[bool]:
        released = yield from operations.release(lease)
        if not released:
            lease.lose((yield from find_cause(lease)))
        return released

    def _stop(self) -> None:
        super()._stop()
        if self._upkeep is not None:
            self._upkeep.cancel()

    def _abandon(self) -> None:
        in_background(asyncio.ensure_future(self._give_back()))

    def abandon(self) -> None:
        """Give everything back, without waiting for it. Any thread may call this."""
        self._ended = True
        self._stop_renewing()
        self._call_in_loop(self._abandon)

    def _call_in_loop(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the parts end by their expiry
            if self.loop is not None:
                self.loop.call_soon_threadsafe(function)

    # The loss: any thread may call the methods below.

    @property
    def loss(self) -> LossRecord | None:
        """Why and when the quorum lock was lost, or None while it is held; sends no command."""
        if self._loss.value is None and not self.inherited_by_fork:
            self._report_loss()
        return self._loss.value

    @property
    def held_count(self) -> int:
        """The number of servers on which it is held, as far as this process knows."""
        return len(self._held())

    def note_lost_part(self) -> None:
        """Report the loss of the quorum lock, or take the part anew."""
        if self._complete and not self._ended and self.loss is None:
            self._call_in_loop(self.mend)

    def _report_loss(self) -> None:
        """Report the loss of the quorum lock, once, if too few servers hold it."""
        # `held_count` may report, so it is read before the slot is used. It is read before `_released`, so that one of
        # the two counts a part that is released meanwhile.
        lost = self._complete and self.held_count + self._released < self._needed
        if not lost:
            return
        leases = [part.lease for part in self.parts if part.lease is not None]
        losses = [loss for loss in [lease.loss for lease in leases] if loss is not None]
        reason = f"fewer than {self._needed} of its servers still hold it"
        code: LossCode = "too_few_servers"
        if len({loss.code for loss in losses}) == 1:  # all for the same cause
            code, reason = losses[0].code, f"{reason}: {losses[0].reason}"
        record = LossRecord(self.name, self.id, 0, reason, time.time(), code)
        if self._loss.put_if_empty(record) is not record:
            return
        self.abandon()
        if asyncio._get_running_loop() is None:
            self._notify_of_loss(record)
        else:  # listeners may take long, and may use a quorum lock, which must not wait for this loop
            os_threads.start(partial(self._notify_of_loss, record), "redislock-loss")

    def _notify_of_loss(self, record: LossRecord) -> None:
        message = "Quorum lock %r was lost: %s."
        events.emit("lost", message, self.name, record.reason, name=self.name, fence=0, record=record)
        lock = self._lock()
        if lock is not None:
            lock._call_on_lost(self)


def _mend(whole: weakref.ref[QuorumLease]) -> None:
    found = whole()
    if found is not None:
        found.mend()
