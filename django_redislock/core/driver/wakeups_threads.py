"""The waiting room of a process's threads: one subscription per server, however many of them wait for however many locks.

There is no thread for this: one of the waiters reads the connection for all, and passes that duty on when it leaves.

A signal handler or a destructor may enter the room while its own thread connects or reads here. That one goes on only when the
handler has returned, so the handler does not wait for it: it connects, or connects anew, and reads itself. There is no lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from weakref import ref

from redis.exceptions import RedisError, ResponseError, TimeoutError

from ..clock import monotonic
from .connection import RespConnection
from .os_threads import OsEvent
from .resp import HELLO, check_role, pack
from .seat import Seat
from .wakeups import LOOK_EVERY, Keepalive, Waiter, Waiters, new_channel


class WaitingThread(Waiter):
    """One thread that waits for one lock."""

    __slots__ = ("alarm", "asleep", "reads", "thread")

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        super().__init__(lock, id, channel)
        self.alarm = OsEvent(threading.Lock())
        """Rings when it is woken, and to hand on the reading."""
        self.asleep = False
        """Whether it would notice to be stirred soon."""
        self.reads: Subscription | None = None
        """What it reads for all, or tried to."""
        self.thread = threading.get_ident()

    def stir(self) -> None:
        """End its sleep, or its turn to read."""
        self.alarm.ring()


class Subscription:
    """A connection on which wake-ups arrive, and who reads it."""

    def __init__(self, wire: RespConnection) -> None:
        self.wire = wire
        self.reader: Seat[WaitingThread] = Seat()
        self.pulse = Keepalive()
        self.since = monotonic()


class Attempt:
    """One thread's attempt to subscribe, whose outcome is that of all who wait for it."""

    def __init__(self, waiter: WaitingThread) -> None:
        self.thread = waiter.thread
        self.error: Exception | None = None
        self.followers: list[WaitingThread] = []
        self._leader = ref(waiter)
        self._ended = False

    @property
    def over(self) -> bool:
        """Whether nobody is to wait for it any more; of a leader that was interrupted nothing may be left."""
        return self._ended or self._leader() is None

    def end(self, error: Exception | None = None) -> None:
        """Tell everybody the outcome; without an error they look for themselves."""
        self.error = error
        self._ended = True
        for follower in list(self.followers):
            follower.stir()


class WaitingRoom:
    """All threads of this process that wait for locks of one server.

    A thread waits `patience` seconds at most for another one that subscribes.
    """

    def __init__(self, connect: Callable[[], RespConnection], patience: float) -> None:
        self.channel = new_channel()
        self._connect = connect
        self._patience = patience
        self._subscription: Seat[Subscription] = Seat()
        self._attempt: Seat[Attempt] = Seat()
        self._waiters: Waiters[WaitingThread] = Waiters()
        self._next_look = 0.0
        self._next_attempt = 0.0
        """When a lost subscription is renewed at the earliest."""
        self._distrusted = False
        self._left = 0.0
        """When somebody left for the last time."""

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive."""
        return self._subscription.taken_by is not None

    def join(self, lock: bytes, id: bytes) -> WaitingThread:
        """Enter; raises redis-py's errors when the subscription cannot be had."""
        waiter = WaitingThread(lock, id, self.channel)
        if not self._waiters:  # nobody looked while the room was empty, and there is no need to look at once
            self._next_look = monotonic() + LOOK_EVERY
        self._waiters.add(waiter)
        if not self.open:
            try:
                self._subscribe(waiter)
            except BaseException:
                self._waiters.remove(waiter)
                raise
        return waiter

    def distrust(self) -> None:
        """Subscribe anew, and at a primary: a call has found that the server is none any more."""
        self._distrusted = True

    def close_idle(self, before: float) -> float:
        """Close the subscription if nobody has waited since then; return when somebody did, or inf when there is none."""
        subscription = self._subscription.taken_by
        if subscription is None:
            return math.inf
        if any(True for _ in self._waiters.all()):
            return monotonic()
        if self._left > before:
            return self._left
        closer = WaitingThread(b"", b"", self.channel)
        if subscription.reader.take(closer) is not closer:
            return monotonic()
        self._subscription.leave(subscription)
        subscription.wire.close()
        self._waiters.wake_all()  # who came at this moment subscribes anew
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
            waiter.reads = subscription = self._subscription.taken_by
            if subscription is None:
                self._mend(waiter, left)
                continue
            reader = subscription.reader.take(waiter)
            if reader is waiter:
                try:
                    self._read(subscription, waiter, until)
                finally:
                    self._stop_reading(waiter)
            elif reader.thread == waiter.thread:  # interrupted, in the middle of a message perhaps
                self._subscription.leave(subscription)
            else:
                waiter.alarm.sleep(left)
        waiter.asleep = False
        waiter.alarm.silence()
        word = waiter.heed()
        self._pass_on(waiter)
        return word

    def _stop_reading(self, waiter: WaitingThread) -> None:
        if waiter.reads is not None:
            waiter.reads.reader.leave(waiter)

    def _pass_on(self, waiter: WaitingThread) -> None:
        """Let one of the sleepers read, if nobody does."""
        subscription = self._subscription.taken_by
        if (subscription and subscription.reader.taken_by) or self._waiters.none_but(waiter):
            return
        # What this thread interrupted goes on by itself. Of another thread, too, perhaps only the last one can wake up.
        sleepers = [other for other in self._waiters.all() if other.asleep and other.thread != waiter.thread]
        for sleeper in sleepers:
            if sleeper.thread == sleepers[0].thread:
                sleeper.stir()

    def _read(self, subscription: Subscription, waiter: WaitingThread, until: float) -> None:
        """Read messages until one is for this waiter, and wake those whom the others are for."""
        wire, pulse = subscription.wire, subscription.pulse
        try:
            while not waiter.woken and (now := monotonic()) < until and self._subscription.taken_by is subscription:
                if self._distrusted:
                    self._subscription.leave(subscription)
                    break
                if now >= self._next_look:
                    self._next_look = now + LOOK_EVERY
                    self._waiters.wake_first()
                    continue
                if pulse.check():
                    wire.send(pack(b"PING"))
                # Reading with a timeout is a system call less than asking first whether there is something to read.
                wire.wait(min(until, self._next_look) - now)
                try:
                    reply = wire.receive()
                except TimeoutError:
                    continue
                pulse.beat()
                self._waiters.hear(reply)
        except (RedisError, OSError):
            # The scripts that the waiters call say what is wrong with the server; here it only means to look more often.
            self._next_attempt = subscription.since + LOOK_EVERY
            self._subscription.leave(subscription)
            self._waiters.wake_all()
        except BaseException:  # interrupted in the middle of a message, perhaps
            self._subscription.leave(subscription)
            self._waiters.wake_all()
            raise
        finally:
            if self._subscription.taken_by is not subscription:
                wire.close()

    def _mend(self, waiter: WaitingThread, left: float) -> None:
        """Subscribe anew, or sleep while another one does; without a subscription the first waiters look by themselves."""
        with_retries = self._attempt.taken_by
        follows = with_retries is not None and not with_retries.over and with_retries.thread != waiter.thread
        if follows or monotonic() < self._next_attempt:
            waiter.alarm.sleep(min(left, LOOK_EVERY))
            if not self.open and self._waiters.is_first(waiter):
                waiter.woken = True
            return
        self._waiters.step_back(waiter)  # this may take long
        try:
            self._subscribe(waiter)
        except (RedisError, OSError):
            self._next_attempt = monotonic() + LOOK_EVERY
            self._waiters.wake_all()

    def _subscribe(self, waiter: WaitingThread) -> None:
        """See to it that there is a subscription: one thread connects, and the others wait for it."""
        give_up = monotonic() + self._patience
        while not self.open:
            mine = Attempt(waiter)
            other = self._attempt.take(mine)
            if other is mine or other.over or other.thread == waiter.thread:
                self._lead(mine, waiter)
                other.end()  # if this thread interrupted it: nobody has to wait for it any more
            else:
                self._follow(other, waiter, give_up)

    def _lead(self, with_retries: Attempt, waiter: WaitingThread) -> None:
        error = None
        try:
            subscription = Subscription(self._subscribed())
            if self._subscription.take(subscription) is not subscription:  # a handler was faster
                subscription.wire.close()
        except (RedisError, OSError) as failure:
            error = failure
            raise
        finally:
            with_retries.end(error)
            self._attempt.leave(with_retries)
        self._next_look = monotonic() + LOOK_EVERY
        # What was said meanwhile went unheard; to who has just come nothing was.
        self._waiters.wake_all(but=None if waiter.asleep else waiter)

    def _follow(self, with_retries: Attempt, waiter: WaitingThread, give_up: float) -> None:
        with_retries.followers.append(waiter)
        while not with_retries.over and not self.open:
            left = give_up - monotonic()
            if left <= 0:
                raise TimeoutError(f"no subscription within {self._patience:g} s")
            waiter.alarm.sleep(min(left, LOOK_EVERY))
        if with_retries.error is not None:
            raise copy(with_retries.error)

    def _subscribed(self) -> RespConnection:
        wire = self._connect()
        distrusted, self._distrusted = self._distrusted, False
        try:
            if distrusted:
                wire.send(HELLO)
                with suppress(ResponseError):
                    check_role(wire.receive())
            wire.send(pack(b"SUBSCRIBE", self.channel))
            wire.receive()
        except BaseException:
            self._distrusted = self._distrusted or distrusted
            wire.close()
            raise
        return wire
