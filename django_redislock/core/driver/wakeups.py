"""Who waits in a process, and how they are told: what the waiting rooms of threads and of event loops have in common.

A waiter sleeps until a message with its id arrives on the process's own channel. Messages can be lost (a broken connection, a
frozen process that was served first), so the first waiter for each lock also looks by itself twice a second, and when what
holds the lock ends.
"""

from __future__ import annotations

import math
import os
import secrets
from itertools import count
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from weakref import ref

from redis.exceptions import ConnectionError

from ..clock import monotonic
from . import process

LOOK_EVERY = 0.5
QUIET = 10.0
"""Seconds after which a subscription on which nothing came is asked whether it is alive."""
ANSWER_WITHIN = 1.0
"""Seconds that it has for the answer."""


class Waiter:
    """One thread or task that waits for one lock."""

    __slots__ = ("__weakref__", "channel", "id", "lock", "number", "sleeper", "told", "woken", "word")

    def __init__(self, lock: bytes, id: bytes, channel: bytes) -> None:
        self.lock = lock
        self.id = id
        self.channel = channel
        self.number = 0
        """Tells it from others with the same id."""
        self.woken = False
        """Whether there is a reason to try for the lock again."""
        self.word: bytes | None = None
        """What the message said beyond the id."""
        self.sleeper: Waiter | None = None
        """The waiter that sleeps for it, and for others of the same thread or task."""
        self.told: Any = ()
        """The woken ones of the waiters for which it sleeps."""

    def wake(self, word: bytes | None = None) -> None:
        """Let the waiter try for its lock, or take the message."""
        if word is not None:
            self.word = word
        self.woken = True
        if self.sleeper is not None:
            self.sleeper.told.append(self)
            self.sleeper.wake()
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
    """Who waits here, in the order of their coming. Several may wait under one id that was given.

    They are referenced weakly: a waiter whose thread was interrupted before it could leave disappears with its object. Plain
    references, because a WeakValueDictionary slows every wake-up. Each change is a single operation of a dict, so there is
    no lock that a signal handler or a destructor could find taken by its own thread.
    """

    def __init__(self) -> None:
        self._by_id: dict[tuple[bytes, int], ref[W]] = {}
        """By owner id, and a number that tells those of one id apart."""
        self._numbers: dict[int, None] = {0: None}
        """All such numbers that were ever used."""
        self._first: dict[bytes, ref[W]] = {}
        """By lock: who looks for all."""

    def __len__(self) -> int:
        return len(self._by_id)

    def none_but(self, waiter: W) -> bool:
        """Whether nobody else waits."""
        return len(self._by_id) == self._has(waiter)

    def add(self, waiter: W) -> None:
        """Take in who comes to wait."""
        me = ref(waiter)
        for number in count():
            self._numbers[number] = (
                None  # first, and the waiter's own, too: the waiter may be called or removed at once
            )
            waiter.number = number
            if self._by_id.setdefault((waiter.id, number), me)() is waiter:
                break

    def remove(self, waiter: W) -> None:
        """Let go who does not wait any more."""
        if self._has(waiter):
            self._by_id.pop((waiter.id, waiter.number), None)
        self.step_back(waiter)

    def step_back(self, waiter: W) -> None:
        """Let another one look for all who wait for the same lock."""
        first = self._first.get(waiter.lock)
        if first is not None and first() is waiter:
            self._first.pop(waiter.lock, None)

    def _has(self, waiter: W) -> bool:
        found = self._by_id.get((waiter.id, waiter.number))
        return found is not None and found() is waiter

    def all(self) -> list[W]:
        """Return everybody."""
        return [waiter for waiter in [found() for found in list(self._by_id.values())] if waiter is not None]

    def hear(self, reply: Any) -> None:
        """Wake whom a message is for; it is an id, and perhaps a word after it."""
        kind, *_, message = reply
        id, told, word = message.partition(b"\n") if kind == b"message" else (b"", b"", b"")
        for number in list(self._numbers):
            found = self._by_id.get((id, number))
            waiter = None if found is None else found()
            if waiter is not None:
                waiter.wake(word if told else None)

    def is_first(self, waiter: W) -> bool:
        """Whether it is this one that looks for all who wait for the same lock."""
        return self._looking(waiter) is waiter

    def wake_first(self) -> None:
        """Wake one waiter for each lock, the first as a rule, and forget whoever is gone."""
        for key, found in list(self._by_id.items()):
            if found() is None:
                self._by_id.pop(key, None)
        for lock, found in list(self._first.items()):
            if found() is None:
                self._first.pop(lock, None)
        waiting: dict[bytes, list[W]] = {}
        for waiter in self.all():
            waiting.setdefault(waiter.lock, []).append(waiter)
        for lock, same in waiting.items():
            first = self._looking(same[0])
            if first.woken:  # and it has not come since the last look: it was interrupted, or is busy
                first = next((waiter for waiter in same if not waiter.woken), first)
                self._first[lock] = ref(first)
            first.wake()

    def wake_all(self, but: W | None = None) -> None:
        """Wake everybody."""
        for waiter in self.all():
            if waiter is not but:
                waiter.wake()

    def _looking(self, waiter: W) -> W:
        """Return who looks for the waiter's lock: this one, if nobody did who still waits."""
        first = self._first.setdefault(waiter.lock, ref(waiter))()
        if first is None or (first is not waiter and not self._has(first)):
            first = waiter
            self._first[waiter.lock] = ref(waiter)
        return first


class Keepalive:
    """Tells when a subscription is to be asked whether it is alive: a router may have forgotten it, and then nobody is told."""

    def __init__(self) -> None:
        self._heard = monotonic()
        self._asked = -math.inf

    def beat(self) -> None:
        """Note that something came."""
        self._heard = monotonic()

    def check(self) -> bool:
        """Tell whether to send a PING now; raises ConnectionError when the last one was not answered in time."""
        now = monotonic()
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
    return f"redislock:wake:{secrets.token_hex(8)}:{os.getpid()}:{quote(process.HOST)}".encode()
