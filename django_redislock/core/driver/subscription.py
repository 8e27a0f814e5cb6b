"""A thread that waits, the subscription that one such thread reads for all, and an attempt to subscribe."""

from __future__ import annotations

import threading
from weakref import ref

from ..clock import monotonic
from .connection import Connection
from .os_threads import OsEvent, Slot
from .wakeups import Keepalive, Waiter


class WaitingThread(Waiter):
    """A thread that waits for one lock."""

    __slots__ = ("asleep", "event", "reads", "thread")

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        super().__init__(lock, id, channel)
        self.event = OsEvent(threading.Lock())
        """Set when it is woken, and when it is to become the reader."""
        self.asleep = False
        """Whether it sleeps or is about to, so that it can become the reader."""
        self.reads: Subscription | None = None
        """The subscription that it reads for all, or tried to read."""
        self.thread = threading.get_ident()

    def interrupt(self) -> None:
        """End its sleep, or its turn to read."""
        self.event.set()


class Subscription:
    """A connection on which wake-ups arrive, and the waiter that reads it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.reader: Slot[WaitingThread] = Slot()
        self.keepalive = Keepalive()
        self.since = monotonic()


class Attempt:
    """One thread's attempt to subscribe, whose outcome other threads wait for and share."""

    def __init__(self, leader: WaitingThread) -> None:
        self.thread = leader.thread
        self.error: Exception | None = None
        self.followers: list[WaitingThread] = []
        self._leader = ref(leader)
        self._ended = False

    @property
    def over(self) -> bool:
        """Whether it has ended; also when its leader was interrupted and nothing is left of it."""
        return self._ended or self._leader() is None

    def end(self, error: Exception | None = None) -> None:
        """Share the outcome with all followers; without an error they check for themselves."""
        self.error = error
        self._ended = True
        for follower in list(self.followers):
            follower.interrupt()
