"""The connections for calls: the free ones, how many there may be, and the threads that wait for one.

There is no lock, so that a signal handler or a destructor may interrupt any function here. It may release a lock and
ask for one, and does not wait for its own thread either.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from copy import copy
from weakref import ref

from redis.exceptions import TimeoutError

from ..clock import monotonic
from . import idle, os_threads
from .connection import Connection
from .os_threads import Slot


class ConnectionPool:
    """Lends connections to threads, `limit` of them at the same time.

    `connect` makes a further connection. A thread waits for a free one for `timeout` seconds at most.
    """

    def __init__(self, limit: int, timeout: float, connect: Callable[[], Connection]) -> None:
        self.free: list[Connection] = []
        """The last one is lent next, so that the first ones become idle."""
        self._timeout = timeout
        self._connect = connect
        self._slots: list[Slot[ref[Connection]]] = [Slot() for _ in range(limit)]
        """One for each connection; a connection that is lost to a signal empties its slot."""
        self._extra: Slot[ref[Connection]] = Slot()
        self._era = object()
        """The era of the connections that may be used; `distrust` begins another one."""
        self._waiters: list[_PoolWaiter] = []
        self._of_thread = threading.local()

    def take(self) -> Connection:
        """Return a free connection; raises IndexError when there is none."""
        thread, free = os_threads.ident(), self.free
        free[-1].thread = thread  # before it is taken, because a handler that runs just then asks for it
        connection = free.pop()
        connection.thread = thread  # another thread may have taken that one in between
        if self._is_outdated(connection):
            connection.close()
            connection.era = self._era
        return connection

    def _is_outdated(self, connection: Connection) -> bool:
        # A router on the way may have forgotten one that was not used for long: nothing that is sent there arrives.
        if connection.made_in is not None and connection.made_in != os_threads.system_ident():
            return True
        return connection.era is not self._era or connection.idle_since < monotonic() - idle.IDLE

    def take_extra(self) -> Connection:
        """Return a connection without waiting, if necessary one more than the limit; with greenlets, the thread's own.

        Only the thread that made a socket can use it among greenlets, so that one is not to be given back.
        """
        if os_threads.green_sockets():
            own: Connection | None = vars(self._of_thread).get("connection")
            if own is None:
                own = self._of_thread.connection = self._connect()
            return own
        try:
            return self.take()
        except IndexError:
            return self._new_in(self._extra) or self._new()

    def give_back(self, connection: Connection) -> None:
        """Take the connection back; close it if it is not one of the pool's own."""
        connection.idle_since = monotonic()
        if connection.pooled:
            self.free.append(connection)
        else:
            connection.close()
        if self._waiters:
            self.notify()

    def leave(self) -> None:
        """Close the connection that only the calling thread, which ends, could use."""
        own: Connection | None = vars(self._of_thread).pop("connection", None)
        if own is not None:
            own.close()

    @property
    def ready(self) -> bool:
        """Whether `take_extra` returns an open connection."""
        if os_threads.green_sockets():
            own: Connection | None = vars(self._of_thread).get("connection")
            return own is not None and own.open
        return any(found.open and not self._is_outdated(found) for found in self.free[-1:])

    def distrust(self) -> None:
        """Have all connections closed before they are used again, also those in use now: their server is no primary."""
        self._era = object()

    def close_idle(self, before: float, keep: int) -> float:
        """Close the free connections that were last used before this time, all but `keep`.

        Return when the next one to be closed was last used, inf when there is none.
        """
        while len(self.free) > keep:
            try:
                connection = self.free.pop(0)  # the one that would be lent last
            except IndexError:
                break
            since = connection.idle_since
            if since > before:
                self.free.insert(0, connection)
            else:
                connection.close()
            del connection  # so that its slot is empty before a waiter is notified
            self.notify()
            if since > before:
                return since
        return math.inf

    def wait(self) -> Connection:
        """Return a connection as soon as there is one.

        Raises TimeoutError when no connection becomes free in time, and the error of another thread that could not
        connect meanwhile.
        """
        waiter = _PoolWaiter()
        give_up = monotonic() + self._timeout
        try:
            while True:
                self._enqueue(waiter)  # before it takes one, or a connection could come back unnoticed
                try:
                    return self.take()
                except IndexError:
                    pass
                connection = self._further()
                if connection is not None:
                    return connection
                if self._waits_for_itself(waiter):
                    connection = self._new()
                    # Otherwise the caller could wait for a thread that has to wait until the caller has returned.
                    connection.pooled = True
                    return connection
                left = give_up - monotonic()
                if left <= 0:
                    raise TimeoutError(f"no connection was free within {self._timeout:g} s")
                waiter.event.wait(left)
                if waiter.error is not None:
                    raise copy(waiter.error)
        finally:
            try:
                self._waiters.remove(waiter)
            except ValueError:  # it was notified of a connection that it perhaps leaves to the next waiter
                self.notify()

    def notify(self, error: Exception | None = None) -> None:
        """Wake the first waiter, because a connection is free; with an error, wake all, because none can be opened."""
        try:
            while True:
                waiter = self._waiters.pop(0)
                waiter.notified, waiter.error = True, error
                waiter.event.set()
                if error is None:
                    break
        except IndexError:
            pass

    def _enqueue(self, waiter: _PoolWaiter) -> None:
        if waiter not in self._waiters:
            self._waiters.insert(0 if waiter.notified else len(self._waiters), waiter)

    def _waits_for_itself(self, waiter: _PoolWaiter) -> bool:
        """Whether its thread has a connection already, or waits for one: it has sent a call ahead, or is in a signal
        handler or a destructor amid a call, and that one goes on only when this one has ended."""
        used = [found() for slot in self._slots if (found := slot.value) is not None]
        others = [each for each in (*used, *self._waiters) if each is not None and each is not waiter]
        return any(each.thread == waiter.thread for each in others)

    def _further(self) -> Connection | None:
        for slot in self._slots:
            connection = self._new_in(slot)
            if connection is not None:
                return connection
        return None

    def _new_in(self, slot: Slot[ref[Connection]]) -> Connection | None:
        """Return a new connection that takes this slot, None when the slot is taken."""
        if slot.value is not None:
            return None
        connection = self._new()
        reference = ref(connection, slot.remove)
        connection.pooled = slot.put_if_empty(reference) is reference
        return connection if connection.pooled else None

    def _new(self) -> Connection:
        connection = self._connect()
        connection.era, connection.thread = self._era, os_threads.ident()
        return connection


class _PoolWaiter:
    """A thread that waits for a connection."""

    def __init__(self) -> None:
        self.thread = os_threads.ident()
        self.event = os_threads.event()
        self.notified = False
        self.error: Exception | None = None
