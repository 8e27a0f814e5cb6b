"""The watchdog: one thread per process that renews all held locks.

After Redisson's: a lock is renewed every third of its life, and the watchdog dies with its process. Beyond it, all that are
due go out in one call per server, to all servers at once; no answer is not yet a loss (it is tried again until the deadline);
losses are reported.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from functools import partial

from redis.exceptions import RedisError

from . import events, native
from .clock import monotonic
from .lease import GONE, Lease
from .protocol import renewal
from .server import Server

BATCH = 250
"""Locks renewed in one call at most, so that the server is not kept busy for long: 2 ms or less."""
SOONEST = 0.05
"""Seconds between two tries for an unanswered renewal, and the shortest time given to a reply."""


class Watchdog:
    """Renews the leases that are added to it until they are removed, lost or not to be renewed any more."""

    def __init__(self) -> None:
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self._alarm = native.Alarm()
        self._starting = threading.Lock()
        self._next = math.inf
        """When the thread looks again; set by the thread alone, so that an interrupted `add` leaves no false belief."""
        self._wish = 0.0
        """When it was last asked to look."""
        self._running: object = None
        """What the running thread knows that it is the one by."""

    def add(self, lease: Lease) -> None:
        """Renew the lease from now on."""
        key, name, fence = id(lease), lease.name, lease.fence

        def abandoned(_: object) -> None:
            if self._leases.pop(key, None) is not None:
                _not_renewed(name, fence, "its lock object was garbage-collected while it was held")

        self._leases[key] = weakref.ref(lease, abandoned)
        if self._running is None:
            self._start()
        self._hurry(lease)

    def hurry(self, lease: Lease) -> None:
        """Look in time for the lease, if it is renewed at all; its next renewal was brought forward."""
        if id(lease) in self._leases:
            self._hurry(lease)

    def _hurry(self, lease: Lease) -> None:
        if lease.next_renewal < self._next:
            self._wish = lease.next_renewal
            self._alarm.ring()

    def remove(self, lease: Lease) -> bool:
        """Do not renew the lease any more; whether it was renewed until now."""
        return self._leases.pop(id(lease), None) is not None

    def _start(self) -> None:
        with self._starting:
            if self._running is not None:
                return
            mine = object()
            self._running = mine
            try:
                native.start(lambda: self._run(mine), "redislock-watchdog")
            except BaseException:  # a signal, perhaps after the thread started: then it ends at once
                self._running = None
                raise

    def _run(self, mine: object) -> None:
        while self._running is mine:
            self._next = math.inf  # whoever adds a lease from now on rings
            now = monotonic()
            leases = [lease for lease in [ref() for ref in list(self._leases.values())] if lease is not None]
            # Without leases it still wakes at the time it was asked for: else each short hold would have to wake it.
            idle = self._wish if self._wish > now else math.inf
            soonest = min((lease.next_renewal for lease in leases), default=idle)
            if soonest > now:
                leases.clear()  # nobody is kept alive by the sleeping watchdog
                self._next = soonest
                self._alarm.sleep(soonest - now)
                continue
            try:
                self._tick(now, leases)
            except Exception:  # the thread that keeps all locks must survive whatever one of them does
                events.log.exception("The watchdog failed; it goes on.")
                time.sleep(SOONEST)
            leases.clear()

    def _tick(self, now: float, leases: list[Lease]) -> None:
        shortest = min(lease.expire for lease in leases)
        # Those that are due soon go along, so that many locks settle into few calls.
        due = [lease for lease in leases if lease.next_renewal <= now + lease.expire / 6 and self._wanted(lease, now)]
        patience = max(SOONEST, shortest / 4)
        by_server: dict[Server, list[Lease]] = {}
        for lease in due:
            by_server.setdefault(lease.server, []).append(lease)
        native.together([partial(self._renew_all, server, mine, patience) for server, mine in by_server.items()])

    def _wanted(self, lease: Lease, now: float) -> bool:
        """Whether the lease is to be renewed; if not, it is dropped, with a word why."""
        reason = None
        if lease.owner_ended:
            reason = "the thread or task that acquired it ended without releasing it"
        elif lease.max_hold is not None and now >= lease.acquired + lease.max_hold:
            reason = f"it has been held for max_hold = {lease.max_hold:g} s"
        elif lease.loss is None:
            return True
        if self.remove(lease) and reason:
            _not_renewed(lease.name, lease.fence, reason)
        return False

    def _renew_all(self, server: Server, leases: list[Lease], patience: float) -> None:
        for start in range(0, len(leases), BATCH):
            self._renew(server, leases[start : start + BATCH], patience)

    def _renew(self, server: Server, leases: list[Lease], patience: float) -> None:
        lives = [lease.expire for lease in leases]
        sent = monotonic()
        try:
            replies = server.renew(renewal(leases), patience)
        except (RedisError, OSError) as error:
            self._unknown(leases, error)
            return
        for lease, life, renewed in zip(leases, lives, replies, strict=True):
            if renewed:
                lease.renewed(sent, life)
            elif self.remove(lease):  # else it was released meanwhile, and nothing is wrong
                _lost(lease, GONE)

    def _unknown(self, leases: list[Lease], error: Exception) -> None:
        """No answer: try again soon, and give up at the deadline only."""
        now = monotonic()
        for lease in leases:
            if not lease.failures:
                events.log.warning("Renewal of lock %r is not answered (%s); trying again.", lease.name, error)
            lease.failures += 1
            if now < lease.deadline:
                pause = min(SOONEST * 2**lease.failures, lease.expire / 10)
                lease.next_renewal = min(now + pause, lease.deadline)
            elif self.remove(lease):
                _lost(lease, f"no answer from Redis until its life of {lease.expire:g} s ended ({error})")


def _lost(lease: Lease, reason: str) -> None:
    """Note the loss at once, and tell of it from another thread: those who are told may take their time."""
    if lease.note_loss(reason):
        try:
            native.start(lease.report_loss, "redislock-loss")
        except RuntimeError:  # no further thread is to be had
            lease.report_loss()


def _not_renewed(name: str, fence: int, reason: str) -> None:
    events.emit(
        "not_renewed",
        "Lock %r (fence %d) is not renewed any more: %s. It ends by its expiry.",
        name,
        fence,
        reason,
        name=name,
        fence=fence,
        reason=reason,
    )


watchdog = Watchdog()


def _after_fork() -> None:
    watchdog.__init__()  # type: ignore[misc]  # a child owns nothing of its parent's


os.register_at_fork(after_in_child=_after_fork)
