"""The waiting room of a process's threads: one subscription per server, for any number of waiters and locks.

No thread exists for this alone: one of the waiters reads the subscription for all, and hands the reading on when it
leaves.

A signal handler or a destructor may raise at any point here, so there is no lock. It should not wait for a lock: its
own thread, which perhaps reads for all, goes on only when the handler has returned. One that waits is served late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from copy import copy
from weakref import ref

from redis.exceptions import RedisError, TimeoutError

from ..clock import monotonic
from .connection import Connection
from .os_threads import Slot, event, ident
from .resp import encode_command
from .wakeups import MAX_POLL_INTERVAL, POLL_INTERVAL, BaseWaitingRoom, Keepalive, Refusal, Waiter


class WaitingThread(Waiter):
    """A thread that waits for one lock."""

    __slots__ = ("asleep", "event", "reads")

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        super().__init__(lock, id, channel)
        self.event = event()
        """Set when it is woken, and when it is to become the reader."""
        self.asleep = False
        """Whether it sleeps or is about to, so that it can become the reader."""
        self.reads: Subscription | None = None
        """The subscription that it reads for all, or tried to read."""

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
        self.thread = ident()
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


MAX_CHECKS = 100
"""How often in a second all sleepers of a room together look whether another thread still reads."""


class WaitingRoom(BaseWaitingRoom[WaitingThread]):
    """All threads of this process that wait for locks of one server.

    A thread waits for `patience` seconds at most for another one that subscribes.
    """

    def __init__(self, connect: Callable[[], Connection], patience: float, refusal: Refusal) -> None:
        super().__init__(patience, refusal)
        self._connect = connect
        self._subscription: Slot[Subscription] = Slot()
        self._attempt: Slot[Attempt] = Slot()
        self._next_poll = 0.0
        self._next_attempt = 0.0
        """The earliest time at which a lost subscription is renewed."""

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive."""
        return self._subscription.value is not None

    def register(self, lock: bytes, id: bytes) -> WaitingThread:
        """Return a new waiter of the calling thread. Raises redis-py's errors when it cannot subscribe."""
        waiter = WaitingThread(lock, id, self.channel)
        self.admit(waiter)
        if not self.open:
            try:
                self._subscribe(waiter)
            except BaseException:
                self._waiters.remove(waiter)
                raise
        return waiter

    def admit(self, waiter: WaitingThread) -> None:
        """Take in a waiter, without subscribing."""
        waiter.room = self
        if not self._waiters:  # no waiter polled while the room was empty, and there is no need to poll at once
            self._next_poll = monotonic() + POLL_INTERVAL
        self._waiters.add(waiter)

    def unregister(self, waiter: WaitingThread) -> None:
        """Remove the waiter, and let another one continue the reading."""
        self._last_waited = monotonic()
        self._waiters.remove(waiter)
        self._stop_reading(waiter)
        self._hand_on(waiter)

    def distrust(self) -> None:
        """Subscribe anew, at a primary: a call has found that the server is none."""
        self._distrusted = True

    def close_idle(self, before: float) -> float:
        """Close the subscription if no thread waited since then; return when one did, inf without a subscription."""
        subscription = self._subscription.value
        if subscription is None:
            return math.inf
        if self._waiters.all():
            return monotonic()
        if self._last_waited > before:
            return self._last_waited
        closer = WaitingThread(b"", b"", self.channel)
        if subscription.reader.put_if_empty(closer) is not closer:
            return monotonic()
        self._subscription.remove(subscription)
        subscription.connection.close()
        self._waiters.wake_all()  # a waiter that came at this moment subscribes anew
        return math.inf

    def wait(self, waiter: WaitingThread, until: float, poll_at: float) -> bytes | None:
        """Sleep until the waiter is woken, until this time on the monotonic clock at most; return the message, if any.

        The waiter that polls for the lock sleeps until `poll_at` at most.
        """
        if poll_at < until and self._waiters.polls(waiter):
            until = poll_at
        while not waiter.woken and (left := until - monotonic()) > 0:
            waiter.asleep = True  # before it tries to read: a reader that stops later looks for a sleeper
            waiter.reads = subscription = self._subscription.value
            if subscription is None:
                self._look_later(waiter, until) if self.deaf else self._resubscribe(waiter, left)
                continue
            reader = subscription.reader.put_if_empty(waiter)
            if reader is waiter:
                try:
                    self._read(subscription, waiter, until)
                finally:
                    self._stop_reading(waiter)
            else:
                self._sleep(subscription, waiter, left)
        waiter.asleep = False
        waiter.event.clear()
        message = waiter.take_message()
        self._hand_on(waiter)
        return message

    def _sleep(self, subscription: Subscription, waiter: WaitingThread, left: float) -> None:
        """Sleep while another waiter reads, and leave its subscription when that one reads no more.

        A signal handler may run in its thread, for minutes perhaps; then nobody would read and nobody would poll.
        """
        next_poll = self._next_poll
        pause = max(2 * POLL_INTERVAL, min(len(self._waiters) / MAX_CHECKS, MAX_POLL_INTERVAL))
        for seconds in (pause, POLL_INTERVAL):  # twice, because after a pause of the process all are late
            if waiter.event.wait(min(left, seconds)) or left <= seconds:
                return
            left -= seconds
            if self._next_poll != next_poll or subscription.reader.value is None:
                return
        self._subscription.remove(subscription)
        self._waiters.wake_all()

    def _look_later(self, waiter: WaitingThread, until: float) -> None:
        """Sleep until the waiter's next look."""
        waiter.asleep = False  # it is not to read
        until = min(until, waiter.next_look())
        while not waiter.woken and (left := until - monotonic()) > 0:
            waiter.event.wait(left)
        waiter.woken = True

    def _stop_reading(self, waiter: WaitingThread) -> None:
        if waiter.reads is not None:
            waiter.reads.reader.remove(waiter)

    def _hand_on(self, waiter: WaitingThread) -> None:
        """Let one of the sleepers read, if there is no reader."""
        subscription = self._subscription.value
        if (subscription and subscription.reader.value) or self._waiters.is_alone(waiter):
            return
        for sleeper in self._waiters.all():
            if sleeper.asleep:
                sleeper.interrupt()
                break

    def _read(self, subscription: Subscription, waiter: WaitingThread, until: float) -> None:
        """Read messages until one is for this waiter, and wake the waiters that the others are for."""
        connection, keepalive = subscription.connection, subscription.keepalive
        try:
            while not waiter.woken and (now := monotonic()) < until and self._subscription.value is subscription:
                if self._distrusted:
                    self._subscription.remove(subscription)
                    break
                if now >= self._next_poll:
                    self._next_poll = now + POLL_INTERVAL
                    self._waiters.wake_pollers()
                    continue
                if keepalive.ping_due():
                    connection.send(encode_command(b"PING"))
                # A read with a timeout takes one system call less than a check for data before the read.
                connection.set_read_timeout(min(until, self._next_poll) - now)
                try:
                    reply = connection.receive()
                except TimeoutError:
                    continue
                keepalive.received()
                self._waiters.dispatch(reply)
        except (RedisError, OSError):
            # The scripts that the waiters call report what is wrong; here it only means to poll more often.
            self._next_attempt = subscription.since + POLL_INTERVAL
            self._subscription.remove(subscription)
            self._waiters.wake_all()
        except BaseException:  # interrupted, perhaps in the middle of a message
            self._subscription.remove(subscription)
            self._waiters.wake_all()
            raise
        finally:
            if self._subscription.value is not subscription:
                connection.close()

    def _resubscribe(self, waiter: WaitingThread, left: float) -> None:
        """Subscribe anew, or sleep while another thread does; without a subscription the pollers poll by themselves."""
        attempt = self._attempt.value
        follows = attempt is not None and not attempt.over
        if follows or monotonic() < self._next_attempt:
            waiter.event.wait(min(left, POLL_INTERVAL))
            if not self.open and self._waiters.polls(waiter):
                waiter.woken = True
            return
        self._waiters.stop_polling(waiter)  # because this may take long
        try:
            self._subscribe(waiter)
        except (RedisError, OSError):
            self._next_attempt = monotonic() + POLL_INTERVAL
            self._waiters.wake_all()

    def _subscribe(self, waiter: WaitingThread) -> None:
        """Make sure that there is a subscription, if there may be one: one thread connects, the others wait for it."""
        give_up = monotonic() + self._patience
        while not (self.open or self.deaf):
            own = Attempt(waiter)
            attempt = self._attempt.put_if_empty(own)
            # Of its own thread, when a handler wants a value in the middle of it: that attempt waits for this one.
            if attempt is own or attempt.over or attempt.thread == own.thread:
                self._lead(own, waiter)
            else:
                self._follow(attempt, waiter, give_up)

    def _lead(self, attempt: Attempt, waiter: WaitingThread) -> None:
        error = None
        try:
            subscription = Subscription(self._subscribed_connection())
            if self._subscription.put_if_empty(subscription) is not subscription:  # a handler was faster
                subscription.connection.close()
        except (RedisError, OSError) as failure:
            self._note_failure(failure)
            if self.deaf:
                return
            error = copy(failure)  # without its traceback, which leads to this frame
            raise
        finally:
            attempt.end(error)
            self._attempt.remove(attempt)
        self._next_poll = monotonic() + POLL_INTERVAL
        # Messages that were sent meanwhile are lost. A waiter that has just come has missed none.
        self._waiters.wake_all(but=None if waiter.asleep else waiter)

    def _follow(self, attempt: Attempt, waiter: WaitingThread, give_up: float) -> None:
        attempt.followers.append(waiter)
        while not attempt.over and not self.open:
            left = give_up - monotonic()
            if left <= 0:
                raise TimeoutError(f"no subscription within {self._patience:g} s")
            waiter.event.wait(min(left, POLL_INTERVAL))
        if attempt.error is not None:
            raise copy(attempt.error)

    def _subscribed_connection(self) -> Connection:
        connection = self._connect()
        try:
            with closing(self._subscribing()) as requests:
                request = next(requests)
                while True:
                    connection.send(request)
                    request = requests.send(connection.receive_any())
        except StopIteration:
            return connection
        except BaseException:
            connection.close()
            raise
