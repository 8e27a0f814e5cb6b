"""The waiting room of a process: one subscription per server, however many threads wait for however many locks.

A waiter sleeps until a message with its id arrives on the process's own channel. There is no thread for this: one of the
waiters reads the connection for all, and passes that duty on when it leaves. Messages can be lost (a broken connection, a
frozen process that was served first), so the first waiter for each lock also looks by itself twice a second.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError, TimeoutError

LOOK_EVERY = 0.5


class Waiter:
    """One thread that waits for one lock."""

    __slots__ = ("asleep", "channel", "id", "lock", "stirred", "woken", "word")

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        self.lock = lock
        self.id = id
        self.channel = channel
        self.woken = False
        """Whether there is a reason to try for the lock again."""
        self.stirred = threading.Event()
        """Set together with `woken`, and to hand on the reading."""
        self.asleep = False
        """Whether it would notice to be stirred soon."""
        self.word: bytes | None = None
        """What the message said beyond the id."""

    def wake(self, word: bytes | None = None) -> None:
        """Let the waiter try for its lock, or take what was sent along."""
        if word is not None:
            self.word = word
        self.woken = True
        self.stirred.set()


class WaitingRoom:
    """All waiters of this process for locks of one server."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.channel = b"redislock:wake:" + secrets.token_hex(8).encode()
        self._connect = connect
        self._connection: Any = None
        self._mutex = threading.Lock()  # guards the table of waiters
        self._reading = threading.Lock()  # held by whoever uses the connection
        self._waiters: dict[bytes, dict[bytes, Waiter]] = {}  # by lock, in the order of their coming; by id
        self._ids: dict[bytes, Waiter] = {}
        self._next_look = 0.0

    @property
    def open(self) -> bool:
        """Whether wake-ups arrive."""
        return self._connection is not None

    def join(self, lock: bytes, id: bytes) -> Waiter:
        """Enter; raises redis-py's errors when the subscription cannot be had."""
        if self._connection is None:
            with self._reading:
                if self._connection is None:
                    self._subscribe()
        waiter = Waiter(lock, id, self.channel)
        with self._mutex:
            if not self._ids:  # nobody looked while the room was empty, and there is no need to look at once
                self._next_look = time.monotonic() + LOOK_EVERY
            self._waiters.setdefault(lock, {})[id] = waiter
            self._ids[id] = waiter
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Leave, and see to it that somebody reads on."""
        with self._mutex:
            self._ids.pop(waiter.id, None)
            same = self._waiters.get(waiter.lock, {})
            same.pop(waiter.id, None)
            if not same:
                self._waiters.pop(waiter.lock, None)
        self._pass_on()

    def wait(self, waiter: Waiter, until: float) -> bytes | None:
        """Sleep until the waiter is woken, at most until this time on the monotonic clock; return what it was told."""
        while not waiter.woken and (left := until - time.monotonic()) > 0:
            waiter.asleep = True  # before the attempt to read: who stops reading later, looks for a sleeper
            if self._reading.acquire(blocking=False):
                try:
                    self._read(waiter, until)
                finally:
                    self._reading.release()
            else:
                waiter.stirred.wait(left)
                waiter.stirred.clear()
        waiter.asleep = waiter.woken = False
        waiter.stirred.clear()
        word, waiter.word = waiter.word, None
        self._pass_on()
        return word

    def _pass_on(self) -> None:
        """Let one of the sleepers read, if nobody does."""
        if self._reading.locked():
            return
        with self._mutex:
            for waiter in self._ids.values():
                if waiter.asleep:
                    waiter.stirred.set()
                    return

    def _read(self, waiter: Waiter, until: float) -> None:
        """Read messages until one is for this waiter, and wake those whom the others are for."""
        try:
            if self._connection is None:
                self._subscribe()
                self._wake_all()  # what was said meanwhile went unheard
            while not waiter.woken and (now := time.monotonic()) < until:
                if now >= self._next_look:
                    self._next_look = now + LOOK_EVERY
                    self._wake_first()
                    continue
                # Reading with a timeout is a system call less than asking first whether there is something to read.
                self._connection._sock.settimeout(min(until, self._next_look) - now)
                try:
                    reply = self._connection.read_response(disable_decoding=True, disconnect_on_error=False)
                except TimeoutError:
                    continue
                kind, _, message = reply
                id, told, word = message.partition(b"\n") if kind == b"message" else (b"", b"", b"")
                found = self._ids.get(id)
                if found is not None:
                    found.wake(word if told else None)
        except (RedisError, OSError):
            # The scripts that the waiters call say what is wrong with the server; here it only means to look more often.
            self._close()
            self._wake_all(but=waiter)
            waiter.stirred.wait(max(0.0, min(until - time.monotonic(), LOOK_EVERY)))
            waiter.woken = True
        except BaseException:  # interrupted in the middle of a message, perhaps
            self._close()
            self._wake_all()
            raise

    def _subscribe(self) -> None:
        connection = self._connect()
        try:
            connection.connect()
            connection.send_command("SUBSCRIBE", self.channel, check_health=False)
            connection.read_response(disable_decoding=True)
        except BaseException:
            connection.disconnect()
            raise
        self._connection = connection
        self._next_look = time.monotonic() + LOOK_EVERY

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def _wake_first(self) -> None:
        with self._mutex:
            for same in self._waiters.values():
                next(iter(same.values())).wake()

    def _wake_all(self, but: Waiter | None = None) -> None:
        with self._mutex:
            for waiter in self._ids.values():
                if waiter is not but:
                    waiter.wake()
