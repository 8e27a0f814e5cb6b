"""The waiting room of a process's threads: one subscription per server, however many of them wait for however many locks.

There is no thread for this: one of the waiters reads the connection for all, and passes that duty on when it leaves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from .clock import monotonic
from .native import Alarm
from .waiters import LOOK_EVERY, Pulse, Waiter, Waiters, new_channel, withdrawal
from .wire import HELLO, Wire, check_role, pack

if TYPE_CHECKING:
    from .steps import Call


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
        self._distrusted = False
        self._left = 0.0
        """When somebody left for the last time."""

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive."""
        return self._wire is not None

    def join(self, lock: bytes, id: bytes, along: Callable[[bytes], Call] | None = None) -> WaitingThread:
        """Enter; raises redis-py's errors when the subscription cannot be had."""
        waiter = WaitingThread(lock, id, self.channel)
        if not self._waiters:  # nobody looked while the room was empty, and there is no need to look at once
            self._next_look = monotonic() + LOOK_EVERY
        self._waiters.add(waiter)  # first: the reply to what is sent along may make somebody tell it something
        if self._wire is None:
            try:
                self._subscribe(waiter, None if along is None else along(self.channel))
            except BaseException:
                self._waiters.remove(waiter)
                raise
        return waiter

    def distrust(self) -> None:
        """Subscribe anew, and at a primary: a call has found that the server is none any more."""
        self._distrusted = True

    def close_idle(self, before: float) -> float:
        """Close the subscription if nobody has waited since then; return when somebody did, or inf when there is none."""
        if self._wire is None:
            return math.inf
        if self._waiters.find(lambda _: True) is not None:
            return monotonic()
        if self._left > before:
            return self._left
        self._close()  # who comes at this moment subscribes anew, because reading fails
        return math.inf

    def leave(self, waiter: WaitingThread) -> None:
        """Leave, and see to it that somebody reads on."""
        self._left = monotonic()
        self._waiters.remove(waiter)
        self._stop_reading(waiter)
        self._pass_on(waiter)

    def wait(self, waiter: WaitingThread, until: float, look: float) -> bytes | None:
        """Sleep until the waiter is woken, at most until this time on the monotonic clock; return what it was told.

        The first waiter for a lock sleeps until `look` at most.
        """
        if look < until and self._waiters.is_first(waiter):
            until = look
        while not waiter.woken and (left := until - monotonic()) > 0:
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
            while not waiter.woken and (now := monotonic()) < until:
                if self._distrusted:
                    self._close()
                    wire = self._subscribe()
                    continue
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
            waiter.alarm.sleep(max(0.0, min(until - monotonic(), LOOK_EVERY)))
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
            distrusted, self._distrusted = self._distrusted, False
            try:
                if distrusted:
                    wire.send(HELLO)
                    with suppress(ResponseError):
                        check_role(wire.receive())
                wire.send((b"" if call is None else call.request) + pack(b"SUBSCRIBE", self.channel))
                if waiter is not None and call is not None:
                    with suppress(ResponseError):  # the server does not know the script: the waiter will tell it
                        waiter.said = wire.receive()
                wire.receive()
            except BaseException as error:
                self._distrusted = self._distrusted or distrusted
                if call is not None and wire.open and not isinstance(error, ConnectionError):
                    with suppress(RedisError):
                        wire.send(withdrawal(call))
                wire.close()
                raise
            self._pulse = Pulse()
            self._wire = wire
        self._next_look = monotonic() + LOOK_EVERY
        self._waiters.wake_all(but=waiter)  # what was said meanwhile went unheard
        return wire

    def _close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
