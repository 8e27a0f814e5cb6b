"""The watchdog: one thread per process and server that renews all locks held there, and reports those that are lost.

It works like Redisson's: a lock is renewed every third of its expiry, and the watchdog dies with its process. Beyond
that, all locks that are due are renewed in one call; a missing answer is not yet a loss, because the renewal is tried
again until the deadline; a loss is reported, also of a lock that is not renewed.
"""

from __future__ import annotations

import atexit
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from redis.exceptions import ClusterCrossSlotError, NoScriptError, RedisError, TryAgainError

from . import chance, events
from .clock import monotonic
from .driver import os_threads
from .driver.cluster.by_slot import is_crossing, split
from .driver.effects import ScriptBatch, ScriptCall
from .driver.os_threads import Slot
from .driver.process import after_in_child
from .lease import Cause, Lease, cause_call, causes_of
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
    _share = 0.0
    """The share of the jitter of all leases that are renewed together. With one for each of them, 1,000 locks that were
    acquired within 0.7 seconds stayed in two groups, and most were renewed twice as often as they had to be."""

    def remove(self, lease: Lease) -> bool:
        """Stop watching the lease; return whether it was watched until now."""
        return self._leases.pop(id(lease), None) is not None

    def due_groups(self, now: float, leases: Iterable[Lease]) -> list[list[Lease]]:
        """Return the leases that are due, in groups for one call each.

        Leases of short patience come first, and are not in a group with leases of much longer patience.
        """
        groups: list[list[Lease]] = []
        self._share = chance.random()
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
        elif lease.renewal.max_hold is not None and now >= lease.acquired + lease.renewal.max_hold:
            reason = f"it has been held for max_hold = {lease.renewal.max_hold:g} s"
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
                elif renewed > 0:
                    lease.renewed(sent, expire, self._share)
                    lease.may_outlive |= lease.noted_loss is not None
                elif self.remove(lease) and not lease.ends_quietly():  # else it was released, and nothing is wrong
                    lease.refused(renewed)
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
        except (ClusterCrossSlotError, TryAgainError) as error:
            is_crossing(error, server)
    groups = list(split(leases, lambda lease: lease.keys.lock).values())
    found: dict[int, Any] = {}
    while groups:
        replies = server.renew(ScriptBatch(tuple(map(call_for, groups))), patience)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            replies = server.renew(ScriptBatch(tuple(call_for(group).with_text() for group in groups)), patience)
        alone: list[list[Lease]] = []
        for group, reply in zip(groups, replies, strict=True):
            # In a slot that moves, the missing key of one lock that was force-released stopped the renewals of all.
            if len(group) > 1 and isinstance(getattr(reply, "__cause__", None) or reply, TryAgainError):
                alone += [[lease] for lease in group]
            else:
                each = [reply] * len(group) if isinstance(reply, RedisError) else reply
                found.update(zip(map(id, group), each, strict=True))
        groups = alone
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


def _log_failures(names: list[str], error: str) -> None:
    for name in names:
        message = "The renewal of lock %r failed (%s). It is tried again until the lock's deadline."
        events.log.warning(message, name, error)


def report_not_renewed(name: str, fence: int, reason: str) -> None:
    """Report that a lock is still held, but is no longer renewed."""
    message = "Lock %r (fence %d) is not renewed any more: %s. It ends by its expiry."
    events.emit("not_renewed", message, name, fence, reason, name=name, fence=fence, reason=reason)


WATCHER = "redislock-watchdog"
"""The name of the threads that watch."""
LONGEST_END = 1.0
"""Seconds for which a process that ends waits for its threads."""
PAUSE_AFTER_ERROR = 0.05
"""Seconds."""
LONGEST_SLEEP = 10.0
"""Seconds after which the leases are checked in any case, because a sleep does not count a suspension of the host."""


class WatchThread:
    """The state of a thread that watches: it sleeps until `wakes_at`, or is `busy` with the server, or has ended."""

    __slots__ = ("busy", "event", "server", "substitute", "wakes_at")

    def __init__(self, busy: bool = False) -> None:
        self.event = os_threads.OsEvent()
        self.busy = busy
        self.wakes_at = math.inf
        """Set by the thread itself alone, so that an interrupted `add` cannot leave it wrong."""
        self.substitute: Slot[WatchThread] = Slot()
        """The thread that watches while this one is busy."""
        self.server: Callable[[], Server | None] = lambda: None
        """Return the server whose connection this thread used: a weak reference, because the server refers to this."""


class ServerWatchdog(Renewals):
    """Watches the leases of one server that are added to it until they are removed or lost.

    Its thread sends the renewals itself. If the next check might come before the reply (the server is slow, or a name
    is being resolved), a substitute watches until that thread is back.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all leases and the thread: a forked child has none of its parent's."""
        self._leases = {}
        self._abandoned: deque[tuple[str, int]] = deque()
        """The locks whose objects were garbage-collected while they were held."""
        self._thread = WatchThread(busy=True)
        self._last_request = 0.0
        """The time for which a check was requested last."""

    def add(self, lease: Lease, renew: bool) -> None:
        """Watch the lease from now on, and renew it if `renew`."""
        key, name, fence = id(lease), lease.name, lease.fence

        def abandoned(_: object) -> None:
            if self._leases.pop(key, None) is not None and renew:
                # The thread reports it: a destructor may run at any point, where no code expects what listeners do.
                self._abandoned.append((name, fence))
                self._thread.event.set()

        lease.renewing = renew
        self._leases[key] = weakref.ref(lease, abandoned)
        try:
            self._wake_for(lease)
        except RuntimeError as error:
            if renew and "shutdown" not in str(error):
                self.remove(lease)
                raise
            # Python 3.12 starts no thread when the program ends. The lock is then held for a short time, without
            # renewal.
            if renew:
                report_not_renewed(name, fence, f"the program ends ({error})")

    def reschedule(self, lease: Lease) -> None:
        """Check the lease in time, if it is watched: its next check was moved to an earlier time."""
        if id(lease) in self._leases:
            self._wake_for(lease)

    def _wake_for(self, lease: Lease) -> None:
        thread, check = self._thread, lease.next_check
        if check < thread.wakes_at:
            self._last_request = check
            if not thread.busy:
                thread.event.set()
            if thread.busy:  # if it became busy just now, it may have missed the event
                self._start_substitute(thread)

    def _start_substitute(self, busy: WatchThread) -> None:
        """Start a thread that watches in place of the busy one, unless there is one already."""
        thread = WatchThread()
        try:
            if busy.substitute.put_if_empty(thread) is not thread:
                return
            self._thread = thread
            os_threads.start(partial(self._run, thread), WATCHER)
        except BaseException as error:
            # Perhaps a signal, at any point. A thread that never started would keep the place for ever, and then no
            # lock of the server was renewed any more. One that has started ends at once.
            if self._thread is thread:
                self._thread = busy
            busy.substitute.remove(thread)
            if not isinstance(error, RuntimeError):  # leases of other threads may rely on the thread
                self._start_substitute(busy)
            raise

    def _run(self, thread: WatchThread) -> None:
        try:
            self._watch(thread)
        finally:
            server = thread.server()
            if server is not None:
                server.leave()

    def _watch(self, thread: WatchThread) -> None:
        rung = True
        while self._thread is thread:
            thread.wakes_at = math.inf  # from now on, each added lease sets the event
            while self._abandoned:
                reason = "its lock object was garbage-collected while it was held"
                report(partial(report_not_renewed, *self._abandoned.popleft(), reason))
            now = monotonic()
            leases = [lease for lease in [ref() for ref in list(self._leases.values())] if lease is not None]
            # Without leases it still sleeps until the requested time: otherwise each short hold would have to start a
            # thread.
            soonest = min((lease.next_check for lease in leases), default=self._last_request)
            if not leases and (soonest <= now or not rung or self.ending):
                thread.busy = True
                if self._leases:  # a lease was added at this moment
                    self._start_substitute(thread)
                return
            if soonest > now:
                leases.clear()  # the sleeping watchdog keeps no lease alive
                thread.wakes_at = soonest
                rung = thread.event.wait(min(soonest - now, LONGEST_SLEEP))
                self.late = max(0.0, monotonic() - soonest)
                continue
            try:
                self._check(thread, now, leases)
            except Exception as error:  # the thread that renews all locks must survive an error of one of them
                message = "The watchdog of locks failed. It goes on; please report this error."
                report(partial(events.log.error, message, exc_info=error))
                thread.event.wait(PAUSE_AFTER_ERROR)
            leases.clear()

    def _check(self, thread: WatchThread, now: float, leases: list[Lease]) -> None:
        """Renew the leases that are due; a substitute watches if this may take too long."""
        groups = self.due_groups(now, leases)
        if not groups:
            return
        for lease in chain.from_iterable(groups):
            lease.renewal_pending = True
        server = groups[0][0].server
        thread.server = weakref.ref(server)
        thread.busy = True
        try:
            while groups:
                group = groups.pop(0)
                thread.wakes_at = monotonic() + patience_of(group[-1])
                too_late = any(lease.next_check < thread.wakes_at for lease in leases if id(lease) in self._leases)
                if too_late or not server.ready or thread.event.clear():
                    with suppress(RuntimeError):  # no further thread can be started
                        self._start_substitute(thread)
                self.renew(server, group)
        finally:
            for lease in chain.from_iterable(groups):  # not sent, because of an error
                lease.renewal_pending = False
            substitute = thread.substitute.value
            if substitute is not None:
                thread.substitute.remove(substitute)
                if self._thread is substitute:
                    self._thread = thread
                    substitute.event.set()
            thread.busy = False


class Watchdog:
    """Watches the leases that are added to it, each with the leases of the same server."""

    def __init__(self) -> None:
        self.of_servers: weakref.WeakSet[ServerWatchdog] = weakref.WeakSet()

    def _of(self, server: Server) -> ServerWatchdog:
        try:
            return server.watchdog  # type: ignore[no-any-return]
        except AttributeError:
            of_server: ServerWatchdog = vars(server).setdefault("watchdog", ServerWatchdog())
            self.of_servers.add(of_server)
            return of_server

    def add(self, lease: Lease, renew: bool = True) -> None:
        """Watch the lease from now on, and renew it if `renew`."""
        self._of(lease.server).add(lease, renew)

    def reschedule(self, lease: Lease) -> None:
        """Check the lease in time, if it is watched: its next check was moved to an earlier time."""
        self._of(lease.server).reschedule(lease)

    def remove(self, lease: Lease) -> bool:
        """Stop watching the lease; return whether it was watched until now."""
        return self._of(lease.server).remove(lease)


watchdog = Watchdog()


def _after_fork() -> None:
    _reports.clear()  # a child has none of its parent's threads
    _reporters.clear()
    for of_server in watchdog.of_servers:
        of_server.reset()


after_in_child("watchdogs", _after_fork)


@atexit.register
def _wait_for_threads() -> None:
    """Wait for the threads that report, and for those that watch no lock: these end now.

    While Python finalizes, it stops each daemon thread as soon as that continues, at any line. A thread that was
    writing to stderr made Python abort. So did one that woke after the last release: gevent's sockets had left a state
    of greenlet in it, whose destructor Python 3.13 runs without the GIL.
    """
    Renewals.ending = True
    servers = list(watchdog.of_servers)
    for of_server in servers:
        of_server._thread.event.set()
    give_up = monotonic() + LONGEST_END
    while monotonic() < give_up and (
        os_threads.running(REPORTER) or os_threads.running(WATCHER) > sum(bool(each._leases) for each in servers)
    ):
        time.sleep(0.001)
