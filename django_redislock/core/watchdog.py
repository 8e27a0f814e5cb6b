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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from . import events
from .clock import monotonic
from .driver import os_threads
from .driver.os_threads import Slot
from .driver.process import after_in_child
from .lease import Lease
from .renewals import REPORTER, Renewals, forget_reports, patience_of, report, report_not_renewed

if TYPE_CHECKING:
    from .driver.server import Server

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
    forget_reports()
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
