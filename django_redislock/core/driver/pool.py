"""The connections for calls: those that are free, how many there may be, and the threads that wait until one is free.

There is no lock, so that a signal handler or a destructor may come in at any point; nor does it wait for its own thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from copy import copy
from weakref import ref

from redis.exceptions import TimeoutError

from ..clock import monotonic
from .connection import ScriptConnection
from .os_threads import OsEvent
from .seat import Seat


class ConnectionPool:
    """The connections that there are, those in use too, and who waits for one.

    `make` returns a further one. A thread waits for `timeout` seconds at most.
    """

    def __init__(self, limit: int, timeout: float, make: Callable[[], ScriptConnection]) -> None:
        self.free: list[ScriptConnection] = []
        """The last one is taken next, so that the first ones are not used for long."""
        self.users: set[int] = set()
        """The threads that have a connection, or are about to."""
        self._timeout = timeout
        self._make = make
        self._seats: list[Seat[ref[ScriptConnection]]] = [Seat() for _ in range(limit)]
        """One for each connection; one that is lost to a signal leaves its seat."""
        self._era = object()
        """What the connections have in common that were made since the last one was given up."""
        self._extra: Seat[ref[ScriptConnection]] = Seat()
        self._seekers: list[_Seeker] = []

    def take(self) -> ScriptConnection:
        """Return a free connection; raises IndexError when there is none."""
        link = self.free.pop()
        if link.era is not self._era:
            link.close()
            link.era = self._era
        return link

    def take_extra(self) -> ScriptConnection:
        """Return a connection without waiting: one more than callers may have, if there is none."""
        try:
            return self.take()
        except IndexError:
            return self._seated(self._extra) or self._made()

    def give_back(self, link: ScriptConnection) -> None:
        """Let the next one have the connection; one that is too many is closed."""
        link.idle_since = monotonic()
        if link.seated:
            self.free.append(link)
        else:
            link.close()
        if self._seekers:
            self.tell()

    def distrust(self) -> None:
        """Close the connections before they are used again, also those in use now: they lead to the same server."""
        self._era = object()

    def close_idle(self, before: float, keep: int) -> float:
        """Close those that nobody has used since then, all but so many.

        Return since when nobody has used the next to be closed, inf when there is none.
        """
        while len(self.free) > keep:
            try:
                link = self.free.pop(0)  # the last to be taken
            except IndexError:
                break
            since = link.idle_since
            if since > before:
                self.free.insert(0, link)
            else:
                link.close()
            del link  # before somebody is told that there is room for another one
            self.tell()
            if since > before:
                return since
        return math.inf

    def wait(self, nested: bool = False) -> ScriptConnection:
        """Return a connection, as soon as there is one.

        `nested`: the caller interrupted its own thread, and must not wait for what that one uses. Raises TimeoutError when none becomes free in time, and what another thread got that tried to connect meanwhile.
        """
        seeker = _Seeker()
        give_up = monotonic() + self._timeout
        try:
            while True:
                self._queue(seeker)  # before the look, or a connection could come back unseen
                try:
                    return self.take()
                except IndexError:
                    pass
                link = self._further()
                if link is not None:
                    return link
                if nested:
                    link = self._made()
                    link.seated = (
                        True  # all others may have to wait until the caller has returned, and it for one of them
                    )
                    return link
                left = give_up - monotonic()
                if left <= 0:
                    raise TimeoutError(f"no connection was free within {self._timeout:g} s")
                seeker.alarm.sleep(left)
                if seeker.error is not None:
                    raise copy(seeker.error)
        finally:
            try:
                self._seekers.remove(seeker)
            except ValueError:  # it was told of a connection, which it leaves to the next one, perhaps
                self.tell()

    def tell(self, error: Exception | None = None) -> None:
        """Wake the first who waits, because a connection is free; or all, because none can be opened."""
        try:
            while True:
                seeker = self._seekers.pop(0)
                seeker.told, seeker.error = True, error
                seeker.alarm.ring()
                if error is None:
                    break
        except IndexError:
            pass

    def _queue(self, seeker: _Seeker) -> None:
        if seeker not in self._seekers:
            # What this thread interrupted cannot take a connection now, so it must not be told of one before.
            first = seeker.told or any(other.thread == seeker.thread for other in list(self._seekers))
            self._seekers.insert(0 if first else len(self._seekers), seeker)

    def _further(self) -> ScriptConnection | None:
        for seat in self._seats:
            link = self._seated(seat)
            if link is not None:
                return link
        return None

    def _seated(self, seat: Seat[ref[ScriptConnection]]) -> ScriptConnection | None:
        """Return a further connection that has the seat, unless another one has it."""
        if seat.taken_by is not None:
            return None
        link = self._made()
        taken = ref(link, seat.leave)
        link.seated = seat.take(taken) is taken
        return link if link.seated else None

    def _made(self) -> ScriptConnection:
        link = self._make()
        link.era = self._era
        return link


class _Seeker:
    """A thread that waits for a connection."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.alarm = OsEvent(threading.Lock())
        self.told = False
        self.error: Exception | None = None
