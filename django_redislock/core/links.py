"""How many connections for calls there may be, and the threads that wait until one of them is free.

There is no lock, so that a signal handler or a destructor may come in at any point; nor does it wait for its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from weakref import ref

from redis.exceptions import TimeoutError

from .clock import monotonic
from .link import Link
from .native import Alarm
from .seat import Seat


class Links:
    """The connections that there are, those in use too, and who waits for one.

    `take` returns a free one, or raises IndexError; `make` returns a further one. A thread waits for `timeout` seconds at most.
    """

    def __init__(self, limit: int, timeout: float, take: Callable[[], Link], make: Callable[[], Link]) -> None:
        self._timeout = timeout
        self._take = take
        self._make = make
        self._seats: list[Seat[ref[Link]]] = [Seat() for _ in range(limit)]
        """One for each connection; one that is lost to a signal leaves its seat."""
        self._seekers: list[_Seeker] = []

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a connection."""
        return bool(self._seekers)

    def wait(self) -> Link:
        """Return a connection, as soon as there is one.

        Raises TimeoutError when none becomes free in time, and what another thread got that tried to connect meanwhile.
        """
        seeker = _Seeker()
        give_up = monotonic() + self._timeout
        try:
            while True:
                self._queue(seeker)  # before the look, or a connection could come back unseen
                try:
                    return self._take()
                except IndexError:
                    pass
                link = self._further()
                if link is not None:
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

    def _further(self) -> Link | None:
        mine = threading.get_ident()
        for seat in self._seats:
            other = seat.taken_by
            link = None if other is None else other()
            if other is None:
                link = self._make()
                taken = ref(link, seat.leave)
                if seat.take(taken) is taken:
                    return link
            elif link is not None and link.thread == mine:  # a handler does not wait for what its own thread uses
                return self._make()
        return None


class _Seeker:
    """A thread that waits for a connection."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.alarm = Alarm(threading.Lock())
        self.told = False
        self.error: Exception | None = None
