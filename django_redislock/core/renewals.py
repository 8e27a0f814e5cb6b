"""The renewal of the leases of one server: which of them are due, one call for many, and the meaning of the replies."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import ClusterCrossSlotError, NoScriptError, RedisError

from . import events
from .clock import monotonic
from .driver import os_threads
from .driver.cluster.by_slot import is_crossing, split
from .driver.effects import ScriptBatch, ScriptCall
from .lease import Cause, Lease
from .loss import cause_call, causes_of
from .operations import renew_call

if TYPE_CHECKING:
    from .driver.server import Server

BATCH = 250
"""Locks renewed in one call at most, so that the server is not kept busy for long: 2 ms or less."""
SHORTEST_RETRY = 0.05
"""Seconds between two tries for an unanswered renewal; it doubles with each try."""
REPORTER = "redislock-report"
"""The name of the threads that report."""
MAX_REPORTERS = 16
"""Threads that report at the same time. A server that lost its data ends thousands of locks at once: with a thread for
each, listeners opened as many connections to the database."""
SHORTEST_PATIENCE, LONGEST_PATIENCE = 0.25, 5.0
"""Seconds to wait for a reply: a quarter of the expiry, but within these and the client's own timeout."""


class Renewals:
    """The watched leases of one server: renewed until they are removed, lost, or not to be renewed any more."""

    ending = False
    """Whether the process ends; set for all."""
    _leases: dict[int, weakref.ref[Lease]]
    late = 0.0
    """Seconds between the time at which the watchdog meant to wake last, and the time at which it did."""

    def remove(self, lease: Lease) -> bool:
        """Stop watching the lease; return whether it was watched until now."""
        return self._leases.pop(id(lease), None) is not None

    def due_groups(self, now: float, leases: Iterable[Lease]) -> list[list[Lease]]:
        """Return the leases that are due, in groups for one call each.

        Leases of short patience come first, and are not in a group with leases of much longer patience.
        """
        groups: list[list[Lease]] = []
        for lease in sorted(filter(partial(self._is_due, now), leases), key=patience_of):
            if not groups or patience_of(lease) > 2 * patience_of(groups[-1][0]) or len(groups[-1]) == BATCH:
                groups.append([])
            groups[-1].append(lease)
        return groups

    def _is_due(self, now: float, lease: Lease) -> bool:
        """Return whether to renew the lease now; report a lease that has ended, or that is not renewed any more."""
        if now >= lease.deadline:
            if self.remove(lease):
                code, reason = lease.ending
                if code == "expired" and lease.renewing:
                    reason += f"; the watchdog woke {self.late:.1f} s late"
                _report_lost(lease, Cause(code, reason))
            return False
        # Leases that are due soon are renewed together with it, so that many locks settle into few calls.
        if lease.renewal_pending or not lease.renewing or lease.next_renewal > now + lease.expire / 6:
            return False
        if acquirer_ended(lease):
            reason = "the thread or task that acquired it ended without releasing it"
        elif lease.max_hold is not None and now >= lease.acquired + lease.max_hold:
            reason = f"it has been held for max_hold = {lease.max_hold:g} s"
        else:
            return True
        lease.renewing = False
        if id(lease) in self._leases:
            report(partial(report_not_renewed, lease.name, lease.fence, reason))
        return False

    def renew(self, server: Server, leases: list[Lease]) -> None:
        """Renew a group of leases, and note the replies."""
        expiries = [lease.expire for lease in leases]
        sent = monotonic()
        try:
            try:
                replies = ask(server, leases, renew_call)
            except Exception as error:  # of Redis, or of a function that provides the address or the password
                self._unanswered(leases, error)
                return
            lost = []
            for lease, expire, renewed in zip(leases, expiries, replies, strict=True):
                if isinstance(renewed, RedisError):
                    self._unanswered([lease], renewed)
                elif renewed:
                    lease.renewed(sent, expire)
                    lease.may_outlive |= lease.noted_loss is not None
                elif self.remove(lease) and not lease.ends_quietly():  # else it was released, and nothing is wrong
                    lost.append(lease)
            if lost:
                self._lose(server, lost)
        finally:
            for lease in leases:
                lease.renewal_pending = False

    def _lose(self, server: Server, leases: list[Lease]) -> None:
        """Report the loss of these leases, with the cause that the server knows."""
        in_time = [monotonic() < lease.deadline for lease in leases]
        try:
            replies = [None if isinstance(reply, RedisError) else reply for reply in ask(server, leases, cause_call)]
        except Exception:
            replies = None
        for lease, cause in zip(leases, causes_of(leases, in_time, replies), strict=True):
            _report_lost(lease, cause)

    def _unanswered(self, leases: list[Lease], error: Exception) -> None:
        """Schedule another try soon, until the deadline."""
        now = monotonic()
        if names := [lease.name for lease in leases if not lease.failures]:
            report(partial(_log_failures, names, str(error)))
        for lease in leases:
            lease.failures += 1
            pause = min(SHORTEST_RETRY * 2**lease.failures, lease.expire / 10)
            lease.next_renewal = min(now + pause, lease.deadline)


def ask(server: Server, leases: list[Lease], call_for: Callable[[list[Lease]], ScriptCall]) -> list[Any]:
    """Return the reply about each lease by one call, or by one for each slot; an error in place of a refused reply."""
    patience = patience_of(leases[-1])
    if not server.splits:
        try:
            return server.renew(call_for(leases), patience)  # type: ignore[no-any-return]
        except ClusterCrossSlotError as error:
            is_crossing(error, server)
    groups = list(split(leases, lambda lease: lease.keys.lock).values())
    replies = server.renew(ScriptBatch(tuple(map(call_for, groups))), patience)
    if any(isinstance(reply, NoScriptError) for reply in replies):
        replies = server.renew(ScriptBatch(tuple(call_for(group).with_text() for group in groups)), patience)
    found: dict[int, Any] = {}
    for group, reply in zip(groups, replies, strict=True):
        each = [reply] * len(group) if isinstance(reply, RedisError) else reply
        found.update(zip(map(id, group), each, strict=True))
    return [found[id(lease)] for lease in leases]


def patience_of(lease: Lease) -> float:
    """Return how many seconds a reply about the lease is waited for."""
    return min(max(SHORTEST_PATIENCE, lease.expire / 4), LONGEST_PATIENCE)


_unknown: set[type] = set()
"""Types of acquirers whose end cannot be detected, and for which the warning about that was logged."""


def acquirer_ended(lease: Lease) -> bool:
    """Return whether the lease's acquirer has ended; False, with one warning for each type, when that is unknown."""
    try:
        return lease.acquirer_ended
    except Exception as error:
        kind = type(lease.acquirer)
        if kind not in _unknown:
            _unknown.add(kind)
            message = (
                "Cannot find out whether the holder of lock %r has ended (%s: %s). It is renewed until its release."
            )
            report(partial(events.log.warning, message, lease.name, type(error).__name__, error))
        return False


def _report_lost(lease: Lease, cause: Cause) -> None:
    """Note the loss at once, and report it."""
    if not lease.ends_quietly() and lease.note_loss(cause):
        report(lease.report_loss)


_reports: deque[Callable[[], None]] = deque()
_reporters: set[object] = set()
"""A token of each thread that reports, until it has found no further report."""


def report(tell: Callable[[], None]) -> None:
    """Call the function from another thread, because handlers of log records and listeners may take long.

    A handler that waited for a lock of its own stopped the watchdog, and every lock of the server was lost. When the
    process ends, nothing more is reported.
    """
    _reports.append(tell)
    _start_reporter()


def _start_reporter() -> None:
    if not _reports or Renewals.ending or len(_reporters) >= MAX_REPORTERS:
        return
    token = object()
    _reporters.add(token)
    try:
        os_threads.start(partial(_tell_all, token), REPORTER)
    except RuntimeError:  # no further thread can be started
        _tell_all(token)


def _tell_all(token: object) -> None:
    try:
        while not Renewals.ending:
            try:
                tell = _reports.popleft()
            except IndexError:
                break
            tell()
    finally:
        _reporters.discard(token)
        _start_reporter()  # for one that came meanwhile and found enough threads, or after a listener that raised


def forget_reports() -> None:
    """Forget what is to be reported: a forked child has none of its parent's threads."""
    _reports.clear()
    _reporters.clear()


def _log_failures(names: list[str], error: str) -> None:
    for name in names:
        message = "The renewal of lock %r failed (%s). It is tried again until the lock's deadline."
        events.log.warning(message, name, error)


def report_not_renewed(name: str, fence: int, reason: str) -> None:
    """Report that a lock is still held, but is no longer renewed."""
    message = "Lock %r (fence %d) is not renewed any more: %s. It ends by its expiry."
    events.emit("not_renewed", message, name, fence, reason, name=name, fence=fence, reason=reason)
