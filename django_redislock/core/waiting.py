"""The waiting room of a process: one subscription per server, however many threads wait for however many locks.

A waiter sleeps until a message with its id arrives on the process's own channel. There is no thread for this: one of the
waiters reads the connection for all, and passes that duty on when it leaves. Messages can be lost (a broken connection, a
frozen process that was served first), so the first waiter for each lock also looks by itself twice a second, and when what
holds the lock ends.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote
from weakref import ref

from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from . import owner
from .native import Alarm
from .wire import Wire, pack

if TYPE_CHECKING:
    from .protocol import Call

LOOK_EVERY = 0.5
QUIET = 10.0
"""Seconds after which a subscription on which nothing came is asked whether it is alive."""
ANSWER_WITHIN = 1.0
"""Seconds that it has for the answer."""


class Waiter:
    """One thread or task that waits for one lock."""

    __slots__ = ("__weakref__", "channel", "id", "lock", "said", "woken", "word")

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        self.lock = lock
        self.id = id
        self.channel = channel
        self.woken = False
        """Whether there is a reason to try for the lock again."""
        self.word: bytes | None = None
        """What the message said beyond the id."""
        self.said: Any = None
        """The reply to what was sent along with the subscription; None when nothing was."""

    def wake(self, word: bytes | None = None) -> None:
        """Let the waiter try for its lock, or take what was sent along."""
        if word is not None:
            self.word = word
        self.woken = True
        self.stir()

    def stir(self) -> None:
        """End its sleep."""
        raise NotImplementedError

    def heed(self) -> bytes | None:
        """Be ready to be woken again, and return what it was told."""
        self.woken = False
        word, self.word = self.word, None
        return word


W = TypeVar("W", bound=Waiter)


class Waiters(Generic[W]):
    """Who waits here for which lock, by id and in the order of their coming.

    One whom a signal interrupted on the way in or out is forgotten by himself, hence the references: plain ones, for those of
    a WeakValueDictionary cost a good part of a wake-up.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_lock: dict[bytes, dict[bytes, ref[W]]] = {}
        self._by_id: dict[bytes, ref[W]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def none_but(self, waiter: W) -> bool:
        """Whether nobody else waits."""
        count = len(self._by_id)
        return count == 0 or (count == 1 and waiter.id in self._by_id)

    def add(self, waiter: W) -> None:
        """Take in who comes to wait."""
        with self._mutex:
            self._by_id[waiter.id] = self._by_lock.setdefault(waiter.lock, {})[waiter.id] = ref(waiter)

    def remove(self, waiter: W) -> None:
        """Let go who does not wait any more."""
        with self._mutex:
            self._remove(waiter.lock, waiter.id)

    def _remove(self, lock: bytes, id: bytes) -> None:
        self._by_id.pop(id, None)
        same = self._by_lock.get(lock)
        if same is not None:
            same.pop(id, None)
            if not same:
                del self._by_lock[lock]

    def find(self, wanted: Callable[[W], bool]) -> W | None:
        """Return the first that is wanted."""
        with self._mutex:
            there = (waiter() for waiter in self._by_id.values())
            return next((waiter for waiter in there if waiter is not None and wanted(waiter)), None)

    def hear(self, reply: Any) -> None:
        """Wake whom a message is for; it is an id, and perhaps a word after it."""
        kind, *_, message = reply
        id, told, word = message.partition(b"\n") if kind == b"message" else (b"", b"", b"")
        found = self._by_id.get(id)
        waiter = None if found is None else found()
        if waiter is not None:
            waiter.wake(word if told else None)

    def is_first(self, waiter: W) -> bool:
        """Whether nobody waits longer for the same lock."""
        with self._mutex:
            return self._first(waiter.lock) is waiter

    def _first(self, lock: bytes) -> W | None:
        """Return who waits longest for the lock, and forget those before him who are gone."""
        while same := self._by_lock.get(lock):
            id, first = next(iter(same.items()))
            waiter = first()
            if waiter is not None:
                return waiter
            self._remove(lock, id)
        return None

    def wake_first(self) -> None:
        """Wake the first waiter for each lock."""
        with self._mutex:
            for lock in list(self._by_lock):
                first = self._first(lock)
                if first is not None:
                    first.wake()

    def wake_all(self, but: W | None = None) -> None:
        """Wake everybody."""
        with self._mutex:
            for waiter in [found() for found in self._by_id.values()]:
                if waiter is not None and waiter is not but:
                    waiter.wake()


class Pulse:
    """Tells when a subscription is to be asked whether it is alive: a router may have forgotten it, and then nobody is told."""

    def __init__(self) -> None:
        self._heard = time.monotonic()
        self._asked = -math.inf

    def beat(self) -> None:
        """Note that something came."""
        self._heard = time.monotonic()

    def check(self) -> bool:
        """Tell whether to send a PING now; raises ConnectionError when the last one was not answered in time."""
        now = time.monotonic()
        if now < self._heard + QUIET:
            return False
        if self._asked < self._heard:
            self._asked = now
            return True
        if now > self._asked + ANSWER_WITHIN:
            raise ConnectionError("The subscription is dead.")
        return False


def new_channel() -> bytes:
    """Return the name of a channel that nobody else listens on; it tells whoever looks at a queue where the process runs."""
    return f"redislock:wake:{secrets.token_hex(8)}:{os.getpid()}:{quote(owner.HOST)}".encode()


def withdrawal(call: Call) -> bytes:
    """Return what undoes a call and the subscription that it was sent along with."""
    undo = b"" if call.undo is None else call.undo().whole
    return pack(b"UNSUBSCRIBE") + undo


class WaitingThread(Waiter):
    """One thread that waits for one lock."""

    __slots__ = ("alarm", "asleep")

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        super().__init__(lock, id, channel)
        self.alarm = Alarm(threading.Lock())
        """Rings when it is woken, and to hand on the reading."""
        self.asleep = False
        """Whether it would notice to be stirred soon."""

    def stir(self) -> None:
        """End its sleep, or its turn to read."""
        self.alarm.ring()


class WaitingRoom:
    """All threads of this process that wait for locks of one server."""

    def __init__(self, connect: Callable[[], Wire]) -> None:
        self.channel = new_channel()
        self._connect = connect
        self._wire: Wire | None = None
        self._subscribing = threading.Lock()
        self._reader: WaitingThread | None = None
        self._turn = threading.Lock()  # guards who becomes the reader
        self._waiters: Waiters[WaitingThread] = Waiters()
        self._pulse = Pulse()
        self._next_look = 0.0

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive."""
        return self._wire is not None

    def join(self, lock: bytes, id: bytes, along: Callable[[bytes], Call] | None = None) -> WaitingThread:
        """Enter; raises redis-py's errors when the subscription cannot be had."""
        waiter = WaitingThread(lock, id, self.channel)
        if not self._waiters:  # nobody looked while the room was empty, and there is no need to look at once
            self._next_look = time.monotonic() + LOOK_EVERY
        self._waiters.add(waiter)  # first: the reply to what is sent along may make somebody tell it something
        if self._wire is None:
            try:
                self._subscribe(waiter, None if along is None else along(self.channel))
            except BaseException:
                self._waiters.remove(waiter)
                raise
        return waiter

    def leave(self, waiter: WaitingThread) -> None:
        """Leave, and see to it that somebody reads on."""
        self._waiters.remove(waiter)
        self._stop_reading(waiter)
        self._pass_on(waiter)

    def wait(self, waiter: WaitingThread, until: float, look: float) -> bytes | None:
        """Sleep until the waiter is woken, at most until this time on the monotonic clock; return what it was told.

        The first waiter for a lock sleeps until `look` at most.
        """
        if look < until and self._waiters.is_first(waiter):
            until = look
        while not waiter.woken and (left := until - time.monotonic()) > 0:
            waiter.asleep = True  # before the attempt to read: who stops reading later, looks for a sleeper
            if self._may_read(waiter):
                try:
                    self._read(waiter, until)
                finally:
                    self._stop_reading(waiter)
            else:
                waiter.alarm.sleep(left)
        waiter.asleep = False
        waiter.alarm.silence()
        word = waiter.heed()
        self._pass_on(waiter)
        return word

    # A signal may interrupt the reader anywhere, so its turn is a name rather than a lock: `leave` takes it back in any case.

    def _may_read(self, waiter: WaitingThread) -> bool:
        with self._turn:
            if self._reader is None:
                self._reader = waiter
            return self._reader is waiter

    def _stop_reading(self, waiter: WaitingThread) -> None:
        if self._reader is waiter:
            self._reader = None

    def _pass_on(self, waiter: WaitingThread) -> None:
        """Let one of the sleepers read, if nobody does."""
        if self._reader is not None or self._waiters.none_but(waiter):
            return
        sleeper = self._waiters.find(lambda waiter: waiter.asleep)
        if sleeper is not None:
            sleeper.stir()

    def _read(self, waiter: WaitingThread, until: float) -> None:
        """Read messages until one is for this waiter, and wake those whom the others are for."""
        try:
            wire = self._wire or self._subscribe()
            while not waiter.woken and (now := time.monotonic()) < until:
                if now >= self._next_look:
                    self._next_look = now + LOOK_EVERY
                    self._waiters.wake_first()
                    continue
                if self._pulse.check():
                    wire.send(pack(b"PING"))
                # Reading with a timeout is a system call less than asking first whether there is something to read.
                wire.wait(min(until, self._next_look) - now)
                try:
                    reply = wire.receive()
                except TimeoutError:
                    continue
                self._pulse.beat()
                self._waiters.hear(reply)
        except (RedisError, OSError):
            # The scripts that the waiters call say what is wrong with the server; here it only means to look more often.
            self._close()
            self._waiters.wake_all(but=waiter)
            waiter.alarm.sleep(max(0.0, min(until - time.monotonic(), LOOK_EVERY)))
            waiter.woken = True
        except BaseException:  # interrupted in the middle of a message, perhaps
            self._close()
            self._waiters.wake_all()
            raise

    def _subscribe(self, waiter: WaitingThread | None = None, call: Call | None = None) -> Wire:
        with self._subscribing:
            if self._wire is not None:
                return self._wire
            wire = self._connect()
            try:
                wire.send((b"" if call is None else call.request) + pack(b"SUBSCRIBE", self.channel))
                if waiter is not None and call is not None:
                    with suppress(ResponseError):  # the server does not know the script: the waiter will tell it
                        waiter.said = wire.receive()
                wire.receive()
            except BaseException as error:
                if call is not None and wire.open and not isinstance(error, ConnectionError):
                    with suppress(RedisError):
                        wire.send(withdrawal(call))
                wire.close()
                raise
            self._pulse = Pulse()
            self._wire = wire
        self._next_look = time.monotonic() + LOOK_EVERY
        self._waiters.wake_all(but=waiter)  # what was said meanwhile went unheard
        return wire

    def _close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
