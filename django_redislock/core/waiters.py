"""Who waits in a process, and how they are told: what the waiting rooms of threads and of event loops have in common.

A waiter sleeps until a message with its id arrives on the process's own channel. Messages can be lost (a broken connection, a
frozen process that was served first), so the first waiter for each lock also looks by itself twice a second, and when what
holds the lock ends.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote
from weakref import ref

from redis.exceptions import ConnectionError

from . import owner
from .clock import monotonic
from .wire import pack

if TYPE_CHECKING:
    from .steps import Call

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
    """Who waits here: by lock, and by owner id, in the order of their coming. Several may wait under one id that was given.

    One whom a signal interrupted on the way in or out is forgotten by himself, hence the references: plain ones, for those of
    a WeakValueDictionary cost a good part of a wake-up.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_lock: dict[bytes, dict[int, ref[W]]] = {}
        self._by_id: dict[bytes, dict[int, ref[W]]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def none_but(self, waiter: W) -> bool:
        """Whether nobody else waits."""
        same = self._by_id.get(waiter.id, {})
        return len(self._by_id) == (len(same) == 1 and id(waiter) in same)

    def add(self, waiter: W) -> None:
        """Take in who comes to wait."""
        with self._mutex:
            for table, name in ((self._by_lock, waiter.lock), (self._by_id, waiter.id)):
                table.setdefault(name, {})[id(waiter)] = ref(waiter)

    def remove(self, waiter: W) -> None:
        """Let go who does not wait any more."""
        with self._mutex:
            for table, name in ((self._by_lock, waiter.lock), (self._by_id, waiter.id)):
                same = table.get(name)
                if same is not None:
                    same.pop(id(waiter), None)
                    if not same:
                        del table[name]

    def find(self, wanted: Callable[[W], bool]) -> W | None:
        """Return the first that is wanted."""
        with self._mutex:
            return next(filter(wanted, self._all()), None)

    def hear(self, reply: Any) -> None:
        """Wake whom a message is for; it is an id, and perhaps a word after it."""
        kind, *_, message = reply
        id, told, word = message.partition(b"\n") if kind == b"message" else (b"", b"", b"")
        for found in list(self._by_id.get(id, {}).values()):
            waiter = found()
            if waiter is not None:
                waiter.wake(word if told else None)

    def is_first(self, waiter: W) -> bool:
        """Whether nobody waits longer for the same lock."""
        with self._mutex:
            return self._first(waiter.lock) is waiter

    def wake_first(self) -> None:
        """Wake the first waiter for each lock, and forget whoever is gone."""
        with self._mutex:
            for table in (self._by_lock, self._by_id):
                for name, same in list(table.items()):
                    for key in [key for key, found in same.items() if found() is None]:
                        del same[key]
                    if not same:
                        del table[name]
            for lock in self._by_lock:
                first = self._first(lock)
                if first is not None:
                    first.wake()

    def wake_all(self, but: W | None = None) -> None:
        """Wake everybody."""
        with self._mutex:
            for waiter in self._all():
                if waiter is not but:
                    waiter.wake()

    def _first(self, lock: bytes) -> W | None:
        there = (found() for found in self._by_lock.get(lock, {}).values())
        return next((waiter for waiter in there if waiter is not None), None)

    def _all(self) -> Iterator[W]:
        for same in self._by_id.values():
            for found in same.values():
                waiter = found()
                if waiter is not None:
                    yield waiter


class Pulse:
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
    return f"redislock:wake:{secrets.token_hex(8)}:{os.getpid()}:{quote(owner.HOST)}".encode()


def withdrawal(call: Call) -> bytes:
    """Return what undoes a call and the subscription that it was sent along with."""
    undo = b"" if call.undo is None else call.undo().whole
    return pack(b"UNSUBSCRIBE") + undo
