"""The watchdog: one thread per process and server that renews all locks held there, and tells of those that are lost.

After Redisson's: a lock is renewed every third of its life, and the watchdog dies with its process. Beyond it, all that are
due go out in one call; no answer is not yet a loss (it is tried again until the deadline); losses are reported, also of locks
that nobody renews.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from redis.exceptions import ClusterCrossSlotError

from . import events
from .clock import monotonic
from .driver import os_threads
from .driver.fork import after_in_child
from .lease import Cause, Lease
from .loss import cause_call, causes_of
from .operations import renewal

if TYPE_CHECKING:
    from .driver.server import Server

BATCH = 250
"""Locks renewed in one call at most, so that the server is not kept busy for long: 2 ms or less."""
SOONEST = 0.05
"""Seconds between two tries for an unanswered renewal."""
SHORTEST_PATIENCE, LONGEST_PATIENCE = 0.25, 5.0
"""Seconds given to a reply: a quarter of the lock's life, but within these, and no more than the client's own timeout."""
LONGEST_SLEEP = 10.0
"""Seconds after which it looks in any case: a sleep does not count the time for which the host is suspended."""


class Post:
    """The place of the thread that keeps watch: it keeps it, or is away at the server, or has left it for good."""

    __slots__ = ("alarm", "away", "next", "relief", "server")

    def __init__(self, away: bool = False) -> None:
        self.alarm = os_threads.OsEvent()
        self.away = away
        self.next = math.inf
        """When it is looked again from here; set by its own thread alone, so that an interrupted `add` leaves no false belief."""
        self.relief: dict[None, Post] = {}
        """The post of who keeps watch meanwhile; one at most."""
        self.server: Server | None = None
        """Where its thread has been."""


class ServerWatchdog:
    """Watches the leases of one server that are added to it until they are removed or lost.

    The thread renews by itself. If it might be away when there is something else to do (the server is slow, or a name is
    being resolved), or if it is missed meanwhile, another thread keeps watch until it is back.
    """

    def __init__(self) -> None:
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self._abandoned: deque[tuple[str, int]] = deque()
        """Locks whose objects were garbage-collected while they were held."""
        self._post = Post(away=True)
        self._wish = 0.0
        """When it was last asked to look."""

    def add(self, lease: Lease, renew: bool) -> None:
        """Watch the lease from now on, and renew it if asked to; called by the thread or task that acquired it."""
        key, name, fence = id(lease), lease.name, lease.fence

        def abandoned(_: object) -> None:
            if self._leases.pop(key, None) is not None and renew:
                # It is told by the thread: a destructor may come at any point, where nobody expects what listeners do.
                self._abandoned.append((name, fence))
                self._post.alarm.set()

        lease.renewing = renew
        lease.watch_acquirer()
        self._leases[key] = weakref.ref(lease, abandoned)
        try:
            self._hurry(lease)
        except RuntimeError as error:
            if renew and "shutdown" not in str(error):
                self.remove(lease)
                raise
            # Python 3.12 starts no thread when the program ends. The work that is left then is short, and is done here.
            if renew:
                _not_renewed(name, fence, f"the program ends ({error})")

    def hurry(self, lease: Lease) -> None:
        """Look in time for the lease, if it is watched at all; what is next to do for it was brought forward."""
        if id(lease) in self._leases:
            self._hurry(lease)

    def _hurry(self, lease: Lease) -> None:
        post, look = self._post, lease.next_look
        if look < post.next:
            self._wish = look
            if not post.away:
                post.alarm.set()
            if post.away:  # if it went just now, it may not have heard
                self._relieve(post)

    def remove(self, lease: Lease) -> bool:
        """Do not watch the lease any more; whether it was watched until now."""
        return self._leases.pop(id(lease), None) is not None

    def _relieve(self, away: Post) -> None:
        """Have another thread keep watch, unless there is one already."""
        post = Post()
        if away.relief.setdefault(None, post) is not post:
            return
        try:
            self._post = post
            os_threads.start(partial(self._serve, post), "redislock-watchdog")
        except BaseException:  # a signal, perhaps after the thread started: then it ends at once
            self._post = away
            away.relief.clear()
            raise

    def _serve(self, post: Post) -> None:
        try:
            self._watch(post)
        finally:
            if post.server is not None:
                post.server.leave()

    def _watch(self, post: Post) -> None:
        rung = True
        while self._post is post:
            post.next = math.inf  # whoever adds a lease from now on rings
            while self._abandoned:
                _not_renewed(*self._abandoned.popleft(), "its lock object was garbage-collected while it was held")
            now = monotonic()
            leases = [lease for lease in [ref() for ref in list(self._leases.values())] if lease is not None]
            # Without leases it still waits for the time it was asked for: else each short hold would have to start it.
            soonest = min((lease.next_look for lease in leases), default=self._wish)
            if not leases and (soonest <= now or not rung):
                post.away = True
                if self._leases:  # of somebody who came this moment
                    self._relieve(post)
                return
            if soonest > now:
                leases.clear()  # nobody is kept alive by the sleeping watchdog
                post.next = soonest
                rung = post.alarm.wait(min(soonest - now, LONGEST_SLEEP))
                continue
            try:
                self._look(post, now, leases)
            except Exception:  # the thread that keeps all locks must survive whatever one of them does
                events.log.exception("The watchdog failed; it goes on.")
                post.alarm.wait(SOONEST)
            leases.clear()

    def _look(self, post: Post, now: float, leases: list[Lease]) -> None:
        due = sorted(filter(partial(self._is_due, now), leases), key=_patience)
        if not due:
            return
        # Who has little time asks first, and does not cut the patience of those who have more.
        groups = [due[:1]]
        for lease in due[1:]:
            if _patience(lease) > 2 * _patience(groups[-1][0]) or len(groups[-1]) == BATCH:
                groups.append([])
            groups[-1].append(lease)
        for lease in due:
            lease.asked = True
        server = post.server = due[0].server
        post.away = True
        try:
            while groups:
                group = groups.pop(0)
                post.next = monotonic() + _patience(group[-1])
                missed = any(lease.next_look < post.next for lease in leases if id(lease) in self._leases)
                if missed or not server.ready or post.alarm.clear():
                    with suppress(RuntimeError):  # no further thread is to be had
                        self._relieve(post)
                self._renew(server, group)
        finally:
            for lease in chain.from_iterable(groups):  # of whom an error let nobody ask
                lease.asked = False
            relief = post.relief.pop(None, None)
            if relief is not None and self._post is relief:
                self._post = post
                relief.alarm.set()
            post.away = False

    def _is_due(self, now: float, lease: Lease) -> bool:
        """Whether the lease is to be renewed now; one that is not renewed any more, or whose life has ended, is told of."""
        if now >= lease.deadline:
            if self.remove(lease):
                _lost(lease, lease.ending)
            return False
        # Those that are due soon go along, so that many locks settle into few calls.
        if lease.asked or not lease.renewing or lease.next_renewal > now + lease.expire / 6:
            return False
        if acquirer_ended(lease):
            reason = "the thread or task that acquired it ended without releasing it"
        elif lease.max_hold is not None and now >= lease.acquired + lease.max_hold:
            reason = f"it has been held for max_hold = {lease.max_hold:g} s"
        else:
            return True
        lease.renewing = False
        if id(lease) in self._leases:
            _not_renewed(lease.name, lease.fence, reason)
        return False

    def _renew(self, server: Server, leases: list[Lease]) -> None:
        lives = [lease.expire for lease in leases]
        sent = monotonic()
        try:
            try:
                try:
                    replies = server.renew(renewal(leases), _patience(leases[-1]))
                except ClusterCrossSlotError:  # a server in cluster mode takes a script for one slot only
                    replies = [server.renew(renewal([lease]), _patience(lease))[0] for lease in leases]
            except Exception as error:  # of Redis, or of what gives the address or the password
                self._unanswered(leases, error)
                return
            gone = []
            for lease, life, renewed in zip(leases, lives, replies, strict=True):
                if renewed:
                    lease.renewed(sent, life)
                elif self.remove(lease):  # else it was released meanwhile, and nothing is wrong
                    gone.append(lease)
            if gone:
                self._lose(server, gone)
        finally:
            for lease in leases:
                lease.asked = False

    def _lose(self, server: Server, leases: list[Lease]) -> None:
        """Report the loss of these leases, with the cause that the server knows."""
        in_time = [monotonic() < lease.deadline for lease in leases]
        try:
            replies = server.renew(cause_call(leases), _patience(leases[-1]))
        except Exception:
            replies = None
        for lease, cause in zip(leases, causes_of(leases, in_time, replies), strict=True):
            _lost(lease, cause)

    def _unanswered(self, leases: list[Lease], error: Exception) -> None:
        """Try again soon, until the deadline."""
        now = monotonic()
        for lease in leases:
            if not lease.failures:
                events.log.warning("Renewal of lock %r is not answered (%s); trying again.", lease.name, error)
            lease.failures += 1
            pause = min(SOONEST * 2**lease.failures, lease.expire / 10)
            lease.next_renewal = min(now + pause, lease.deadline)


class Watchdog:
    """Watches the leases that are added to it, each with those of the same server."""

    def __init__(self) -> None:
        self.of_servers: weakref.WeakSet[ServerWatchdog] = weakref.WeakSet()

    def add(self, lease: Lease, renew: bool = True) -> None:
        """Watch the lease from now on, and renew it if asked to; called by the thread or task that acquired it."""
        try:
            of_server = lease.server.watchdog
        except AttributeError:
            of_server = vars(lease.server).setdefault("watchdog", ServerWatchdog())
            self.of_servers.add(of_server)
        of_server.add(lease, renew)

    def hurry(self, lease: Lease) -> None:
        """Look in time for the lease, if it is watched at all; what is next to do for it was brought forward."""
        if hasattr(lease.server, "watchdog"):
            lease.server.watchdog.hurry(lease)

    def remove(self, lease: Lease) -> bool:
        """Do not watch the lease any more; whether it was watched until now."""
        try:
            of_server: ServerWatchdog = lease.server.watchdog
        except AttributeError:
            return False
        return of_server.remove(lease)


def _patience(lease: Lease) -> float:
    return min(max(SHORTEST_PATIENCE, lease.expire / 4), LONGEST_PATIENCE)


_unknown: set[type] = set()
"""Kinds of owners of which was said that they cannot be asked."""


def acquirer_ended(lease: Lease) -> bool:
    try:
        return lease.acquirer_ended
    except Exception as error:
        kind = type(lease.acquirer)
        if kind not in _unknown:
            _unknown.add(kind)
            message = (
                "Whether the holder of lock %r has ended is not known (%s: %s). It is renewed until it is released."
            )
            events.log.warning(message, lease.name, type(error).__name__, error)
        return False


def _lost(lease: Lease, cause: Cause) -> None:
    """Note the loss at once, and report it from another thread, because listeners may take long."""
    if lease.note_loss(cause):
        try:
            os_threads.start(lease.report_loss, "redislock-loss")
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
    for each in watchdog.of_servers:
        each.__init__()  # type: ignore[misc]  # a child owns nothing of its parent's


after_in_child("watchdogs", _after_fork)
