"""The connections for calls: the free ones, how many there may be, and the threads that wait for one.

There is no lock, so that a signal handler or a destructor may interrupt any function here. It does not wait for its
own thread either.
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


class Use:
    """What a thread keeps while it has a connection, or is about to get one."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = os_threads.ident()


class ConnectionPool:
    """Lends connections to threads, `limit` of them at the same time.

    `connect` makes a further connection. A thread waits for a free one for `timeout` seconds at most.
    """

    def __init__(self, limit: int, timeout: float, connect: Callable[[], Connection]) -> None:
        self.free: list[Connection] = []
        """The last one is lent next, so that the first ones become idle."""
        self._uses: dict[int, ref[Use]] = {}
        self._timeout = timeout
        self._connect = connect
        self._slots: list[Slot[ref[Connection]]] = [Slot() for _ in range(limit)]
        """One for each connection; a connection that is lost to a signal empties its slot."""
        self._extra: Slot[ref[Connection]] = Slot()
        self._era = object()
        """The era of the connections that may be used; `distrust` begins another one."""
        self._waiters: list[_PoolWaiter] = []
        self._of_thread = threading.local()

    def begin_use(self) -> Use | None:
        """Note a use of this thread, until it ends or is forgotten; None if there is one already.

        Forgotten: a set of threads kept those that a soft time limit had interrupted before they took themselves out.
        They sent nothing ahead any more.
        """
        use = Use()
        before = self._uses.get(use.thread)
        if before is not None and before() is not None:
            return None
        self._uses[use.thread] = ref(use)
        return use

    def end_use(self, use: Use) -> None:
        """Note that the use has ended."""
        self._uses.pop(use.thread, None)

    def take(self) -> Connection:
        """Return a free connection; raises IndexError when there is none."""
        connection = self.free.pop()
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

    def wait(self, nested: bool = False) -> Connection:
        """Return a connection as soon as there is one.

        `nested`: the caller interrupted its own thread during a call, so it must not wait for the connection of that
        call. Raises TimeoutError when no connection becomes free in time, and the error of another thread that could
        not connect meanwhile.
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
                if nested:
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
            # A waiter that this thread interrupted cannot take a connection now, so it must not be notified first.
            first = waiter.notified or any(other.thread == waiter.thread for other in list(self._waiters))
            self._waiters.insert(0 if first else len(self._waiters), waiter)

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
        connection.era = self._era
        return connection


class _PoolWaiter:
    """A thread that waits for a connection."""

    def __init__(self) -> None:
        self.thread = os_threads.ident()
        self.event = os_threads.event()
        self.notified = False
        self.error: Exception | None = None
