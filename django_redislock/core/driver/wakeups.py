"""Waiters and their wake-ups: the common part of the waiting rooms of threads and of event loops.

A waiter sleeps until a message with its id arrives on the channel of its process. A message can be lost: the
connection breaks, or the process that was served first is frozen. So for each lock one waiter of the process polls: it
also tries when the lock expires, and twice a second. Where many processes wait, each of them tries more rarely.

A user of Redis may lack the right to subscribe, or a proxy may refuse it. Then no message arrives, and each waiter
looks: it tries again and again, after pauses that grow.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Generator
from errno import EMFILE, ENFILE
from itertools import count
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from weakref import ref

from redis.exceptions import ConnectionError, RedisError, ResponseError

from .. import events
from ..clock import monotonic
from . import process
from .effects import is_temporary
from .resp import check_role, encode_command

REFUSED_FOR = 60.0
"""Seconds after which another try to subscribe is made: the user may have got the right."""
REFUSED = (
    "Redis, or a proxy before it, refuses SUBSCRIBE (%s). So waiters try for locks and values again and again, and get "
    "them later. Grant +subscribe and the channels &redislock:wake:*; 'manage.py redislock doctor --acl' prints all "
    "rights. A proxy must know channels, or locks must bypass it."
)

UNOPENED = (
    "No connection for wake-ups can be opened (%s). So waiters try for locks and values again and again, and get them "
    "later. Raise the limit of open files of this process (ulimit -n), or find what keeps so many open."
)
CLOSED = "it closes the connection"
"""What a proxy does that knows no SUBSCRIBE, as twemproxy."""


class Refusal:
    """The refusal of a server to let its clients subscribe, shared by all waiting rooms of that server."""

    def __init__(self) -> None:
        self._until = -math.inf
        self._reported = False

    @property
    def stands(self) -> bool:
        """Whether the server refused SUBSCRIBE a short time ago."""
        return monotonic() < self._until

    def note(self, cause: str, message: str = REFUSED) -> None:
        """Note the refusal; the first one is logged."""
        self._until = monotonic() + REFUSED_FOR
        if not self._reported:
            self._reported = True
            events.log.warning(message, cause)


POLL_INTERVAL = 0.5
"""Seconds between two tries without a wake-up."""
POLLERS = 16
"""All processes that wait for one lock poll together as often as this many would with that pause; many processes poll
more often, because of the longest pause."""
MAX_POLL_INTERVAL = 4.0
"""Seconds between two polls of one process at most, because a long queue may become short meanwhile."""
QUIET = 10.0
"""Seconds without data after which a subscription is checked by a PING."""
PONG_WITHIN = 1.0
"""Seconds for the reply to it."""
FIRST_LOOK, LONGEST_LOOK = 0.02, 0.4
"""Seconds until the first look of a waiter without wake-ups, and at most between two; a reservation lasts longer."""


class Waiter:
    """One thread or task that waits for one lock."""

    __slots__ = (
        *("__weakref__", "channel", "home", "id", "lock", "message", "number", "room"),
        *("called", "look_pause", "queue_length", "tried_at", "woken"),
    )

    home: Any
    """In a Cluster: the node in whose waiting room it waits."""

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        self.lock = lock
        self.id = id
        self.channel = channel
        self.number = 0
        """Distinguishes waiters with the same id."""
        self.tried_at = 0.0
        """When it tried for the lock last."""
        self.queue_length = 0
        """The number of waiters for the lock at that time, in all processes; 0 when it is unknown."""
        self.look_pause = FIRST_LOOK
        """For how long it sleeps next if no wake-ups arrive."""
        self.woken = False
        """Whether there is a reason to try for the lock again."""
        self.called = False
        """Whether it was woken since its last try by more than a poll: perhaps it has left the queue by that."""
        self.message: bytes | None = None
        """The part of the message after the id."""

    def wake(self, message: bytes | None = None, polls: bool = False) -> None:
        """Let the waiter try for its lock, or take the message."""
        if message is not None:
            self.message = message
        self.called = self.called or not polls
        self.woken = True
        self.interrupt()

    def next_look(self) -> float:
        """Return when it tries again if no wake-ups arrive: all waiters together as often as the pollers do."""
        share = min(POLL_INTERVAL * self.queue_length / POLLERS, MAX_POLL_INTERVAL)
        pause, self.look_pause = self.look_pause, min(2 * self.look_pause, LONGEST_LOOK)
        return monotonic() + (share if share > POLL_INTERVAL else pause)

    room: Any
    """The waiting room in which it waits."""

    def leave(self) -> None:
        """Leave the room."""
        self.room.unregister(self)

    def interrupt(self) -> None:
        """End its sleep."""
        raise NotImplementedError

    def take_message(self) -> bytes | None:
        """Be ready to be woken again, and return the message if there was one."""
        self.woken = False
        message, self.message = self.message, None
        return message


W = TypeVar("W", bound=Waiter)


class Waiters(Generic[W]):
    """The waiters of a waiting room, in the order in which they came. Several may wait under one given id.

    They are referenced weakly: a waiter whose thread was interrupted before it could unregister disappears with its
    object. Plain references, because a WeakValueDictionary slows every wake-up. Each change is a single operation of a
    dict, so there is no lock that a signal handler or a destructor could find taken by its own thread. A copy is a
    single operation, too. A list of the items is none: each of its tuples may start a collection, and so destructors.
    """

    def __init__(self) -> None:
        self._by_id: dict[tuple[bytes, int], ref[W]] = {}
        """By owner id and number."""
        self._numbers: dict[bytes, dict[int, None]] = {}
        """By owner id: the numbers above 0 that were ever used. Few ids are shared, so they stay."""
        self._pollers: dict[bytes, ref[W]] = {}
        """By lock: the waiter that polls for it."""

    def __len__(self) -> int:
        return len(self._by_id)

    def is_alone(self, waiter: W) -> bool:
        """Whether there is no other waiter."""
        return len(self._by_id) == self._has(waiter)

    def add(self, waiter: W) -> None:
        """Add a waiter."""
        reference = ref(waiter)
        for number in count():
            # Before the entry, because the waiter may be woken or removed as soon as it is there.
            if number:
                self._numbers.setdefault(waiter.id, {})[number] = None
            waiter.number = number
            if self._by_id.setdefault((waiter.id, number), reference)() is waiter:
                break

    def remove(self, waiter: W) -> None:
        """Remove a waiter."""
        if self._has(waiter):
            self._by_id.pop((waiter.id, waiter.number), None)
        self.stop_polling(waiter)

    def stop_polling(self, waiter: W) -> None:
        """Let another waiter poll for its lock."""
        poller = self._pollers.get(waiter.lock)
        if poller is not None and poller() is waiter:
            self._pollers.pop(waiter.lock, None)

    def _has(self, waiter: W) -> bool:
        found = self._by_id.get((waiter.id, waiter.number))
        return found is not None and found() is waiter

    def all(self) -> list[W]:
        """Return all waiters."""
        return [waiter for waiter in [found() for found in list(self._by_id.values())] if waiter is not None]

    def dispatch(self, reply: Any) -> None:
        """Wake the waiters of this message: it consists of their id and perhaps, after a newline, of data for them.

        Without an id the data is a lock whose queue was lost: all waiters for it come back.
        """
        kind, *_, data = reply
        id, newline, message = data.partition(b"\n") if kind == b"message" else (b"", b"", b"")
        if newline and not id:
            for one in self.all():
                if one.lock == message:
                    one.wake()
            return
        for number in [0, *list(self._numbers.get(id, ()))]:
            found = self._by_id.get((id, number))
            waiter = None if found is None else found()
            if waiter is not None:
                waiter.wake(message if newline else None)

    def polls(self, waiter: W) -> bool:
        """Whether this waiter polls for its lock: it does if no other waiter does."""
        return self._poller(waiter) is waiter

    def wake_pollers(self) -> None:
        """Wake one waiter for each lock, as a rule the same each time, and forget waiters that are gone.

        A process polls in proportion to its share of all waiters. So the polls do not grow with the queue, and they go
        on when the first processes of the queue are frozen.
        """
        for key, found in self._by_id.copy().items():
            if found() is None:
                self._by_id.pop(key, None)
        for lock, found in self._pollers.copy().items():
            if found() is None:
                self._pollers.pop(lock, None)
        by_lock: dict[bytes, list[W]] = {}
        for waiter in self.all():
            by_lock.setdefault(waiter.lock, []).append(waiter)
        for lock, waiters in by_lock.items():
            poller = self._poller(waiters[0])
            pause = min(POLL_INTERVAL * poller.queue_length / (POLLERS * len(waiters)), MAX_POLL_INTERVAL)
            if pause > POLL_INTERVAL and monotonic() < poller.tried_at + pause:
                continue
            if poller.woken:  # and has not tried since it was woken last: it was interrupted, or is busy
                poller = next((waiter for waiter in waiters if not waiter.woken), poller)
                self._pollers[lock] = ref(poller)
            poller.wake(polls=True)

    def wake_all(self, but: W | None = None) -> None:
        """Wake all waiters, except perhaps for one."""
        for waiter in self.all():
            if waiter is not but:
                waiter.wake()

    def _poller(self, waiter: W) -> W:
        """Return the waiter that polls for this waiter's lock: this one if there was none that still waits."""
        poller = self._pollers.setdefault(waiter.lock, ref(waiter))()
        if poller is None or (poller is not waiter and not self._has(poller)):
            poller = waiter
            self._pollers[waiter.lock] = ref(waiter)
        return poller


def new_channel() -> bytes:
    """Return the name of a channel of this process alone, which says where the process runs."""
    return f"redislock:wake:{secrets.token_hex(8)}:{os.getpid()}:{quote(process.HOST)}".encode()


class BaseWaitingRoom(Generic[W]):
    """The waiters of this process for the locks of one server, and the channel on which they are woken."""

    def __init__(self, patience: float, refusal: Refusal) -> None:
        self.channel = new_channel()
        self._patience = patience
        self._refusal = refusal
        self._waiters: Waiters[W] = Waiters()
        self._asks = False
        """Whether SUBSCRIBE was sent by the current attempt."""
        self._closed = 0
        """How often in a row the connection was closed in reply to it."""
        self._distrusted = False
        """Whether the server was found to be no primary since the last subscription."""
        self._last_waited = 0.0
        """When a waiter left for the last time."""

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive."""
        raise NotImplementedError

    @property
    def deaf(self) -> bool:
        """Whether no wake-ups arrive, because SUBSCRIBE is refused: then the waiters look."""
        return not self.open and self._refusal.stands

    def _note_failure(self, error: Exception) -> None:
        """Note the error of an attempt to subscribe as a refusal, if the next attempt would end in the same way.

        A server that ends closes connections, too, but not two new ones after each other in reply to SUBSCRIBE.
        """
        asked, self._asks = self._asks, False
        self._closed = self._closed + 1 if asked and isinstance(error, ConnectionError) else 0
        cause = error.__cause__ or error.__context__
        if self._closed > 1:
            self._refusal.note(CLOSED)
        elif isinstance(cause, OSError) and cause.errno in (EMFILE, ENFILE):
            self._refusal.note(str(cause), UNOPENED)

    def _subscribing(self) -> Generator[bytes, Any, None]:
        """Yield the requests that begin a subscription; the driver sends each reply, or the error reply, into it."""
        self._asks = False  # an attempt may have been interrupted after it had asked
        distrusted, self._distrusted = self._distrusted, False
        try:
            if distrusted:
                check_role((yield encode_command(b"HELLO")))
            self._asks = True
            reply = yield encode_command(b"SUBSCRIBE", self.channel)
            self._asks, self._closed = False, 0
            if isinstance(reply, RedisError):
                # NOPERM, or whatever a proxy answers that knows no channels; a server that is busy will serve again.
                if isinstance(reply, ResponseError) and not is_temporary(reply):
                    self._refusal.note(str(reply))  # the error itself would keep frames alive
                try:
                    raise reply
                finally:
                    del reply  # it refers to this frame
        except BaseException:  # also when the driver closes the generator because the connection broke
            self._distrusted = self._distrusted or distrusted
            raise


class Keepalive:
    """Decides when a subscription is checked: if a router forgot the connection, no wake-up arrives."""

    def __init__(self) -> None:
        self._received_at = monotonic()
        self._ping_at = -math.inf

    def received(self) -> None:
        """Note that data arrived."""
        self._received_at = monotonic()

    def ping_due(self) -> bool:
        """Return whether to send a PING now. Raises ConnectionError when the last one was not answered in time."""
        now = monotonic()
        if now < self._received_at + QUIET:
            return False
        if self._ping_at < self._received_at:
            self._ping_at = now
            return True
        if now > self._ping_at + PONG_WITHIN:
            raise ConnectionError("The subscription is dead.")
        return False
