"""A lock that goes from a message to the execution that the message brings about, and from there to a retry.

A message holds the lock under an id made from the task's id. Its execution takes it over under an id of its own, so that a copy
of the message does not pass for the execution that lives. The copies of a message may start in any order, and one of them runs:
each finds the lock of the run that lives, or the mark of the message. An execution leaves the mark with its release: "done", or,
when its message is acknowledged later, "ending", and "done" when the result is stored and all callbacks are sent. The mark also
tells in which version the message was published again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Self

from redis.exceptions import RedisError

from ..core import events, operations, records, scripts
from ..core.base import TOLD
from ..core.clock import monotonic
from ..core.driver.effects import Operation, ScriptCall
from ..core.driver.retry import with_retries
from ..core.driver.script import Script
from ..core.driver.server import Server
from ..core.keys import LockKeys, lock_keys, milliseconds
from ..core.lease import Lease
from ..core.lock import Lock
from ..core.loss import find_cause
from ..core.records import LockInfo
from ..core.watchdog import watchdog
from ..exceptions import LockBackendError

START = Script("start", "index", "take", "handover", "counts", "turns", "message", home=__package__)
LEAVE = Script("leave", "index", "receipts", "handover", home=__package__)
CLAIM = Script("claim", "message", home=__package__)
DONE = Script("done", home=__package__)
DUPLICATE = Script("duplicate", "counts", home=__package__)

_json = json.JSONEncoder().encode


class Delivery(NamedTuple):
    """A message as it came to a worker."""

    id: str
    """The id under which it may hold the lock while it waits."""
    message: str = ""
    """What all its copies have in common, and no other message has; "" for what cannot come twice."""
    known: bool = False
    """Whether its copies can be told from other messages."""
    version: int = 0
    """How often it was published again: of the copies, those of the last version count."""


class AfterRelease(NamedTuple):
    """What is left behind by an execution."""

    processed_for: float = 0.0
    """Seconds for which its message is marked as processed."""
    complete: bool = True
    """Whether nothing comes after the release that would still have to be done."""
    keep_id: str = ""
    """Who has the lock from now on; nobody: it is released."""
    keep: float = 0.0
    """The life of the lock then, in seconds."""


class ExecutionLock(Lock):
    """The lock of a message, or of its execution."""

    delivery: Delivery | None = None
    details: Mapping[str, Any] = {}
    """What more is told to those who ask who holds it."""
    ending = AfterRelease()
    """What `release` leaves behind."""
    processed = False
    """Whether the lock was refused because the message has been processed, or published again."""
    retry_in: float | None = None
    """Seconds until another look makes sense, when the lock was refused because a copy of the message runs or ends now."""

    def with_name(self, name: str, *, label: str = "", id: str | None = None, **changes: Any) -> Self:
        """Return a lock as this one, with a name of its own, and what else is given; nothing of that is checked again."""
        return self._copy(name=name, _keys=lock_keys(self._prefix, name), label=label, _given_id=id, **changes)

    @contextmanager
    def keep_alive(self, expire: float) -> Iterator[None]:
        """Give the lock of the given id a shorter life, renewed during the block, because the process may die there.

        After the block it is still held. Raises LockBackendError when Redis cannot answer.
        """
        mine = self._copy(expire=expire, auto_renewal=True)
        try:
            mine.acquire(blocking=False)
            for lease in mine._leases.values():
                lease.shared = False  # the message's own process: nobody else believes in its life
                self._server.run(mine._renew(lease))
            yield
        finally:
            for lease in mine._leases.values():
                watchdog.remove(lease)

    def take(self, *, fresh: bool = False) -> bool:
        """Acquire the lock for a message, without a wait, and tell whether it was acquired.

        This process does not watch or renew the lock. `fresh`: the given id is new. Raises LockBackendError when Redis
        cannot answer.
        """
        _, reply = self._server.run(with_retries(self.name, self._take_call(fresh), 0.0, self._server))
        return self._has_taken(reply)

    def take_ahead(self) -> Callable[[], bool | None] | None:
        """Send what `take` sends for a new id; None when no connection is free.

        The function returned waits for the answer: call it once, in this thread. It returns None when there is no answer;
        then `take` shall try again.
        """
        receive = self._server.send_ahead(self._take_call(fresh=True))
        return None if receive is None else partial(self._answer_of, receive)

    def _answer_of(self, receive: Callable[[], Any]) -> bool | None:
        try:
            return self._has_taken(receive())
        except RedisError:
            return None

    def _take_call(self, fresh: bool) -> ScriptCall:
        id, keys, name = (self._given_id or "").encode(), self._keys, self.name.encode()
        args = (id, milliseconds(self.expire), name, self._record(), b"", b"0", b"")
        return ScriptCall(scripts.ACQUIRE, keys[:4] if fresh else keys, args)

    def _has_taken(self, reply: object) -> bool:
        fence = abs(reply) if isinstance(reply, int) else 0
        if fence:
            events.emit("acquired", TOLD["acquired"], self.name, fence, name=self.name, fence=fence)
        return fence > 0

    def release_given_id(self) -> bool:
        """Release what the given id holds, and tell whether it held it. Raises LockBackendError when Redis cannot answer."""
        return self._server.run(operations.release(self._new_lease(self._given_id or "")))

    def count_duplicate(self) -> None:
        """Count, for the page about contention, that a duplicate was prevented; that this may fail is of no account."""
        count_duplicate(self._server, self.name, self._keys)

    def claim(self, life: float, state: Literal["ending", "done"]) -> bool:
        """Mark a message that will not run now, for so many seconds; False when a copy of it runs or has been processed.

        Raises LockBackendError when Redis cannot answer.
        """
        delivery = self.delivery
        if delivery is None or not delivery.known:
            if state == "done":
                self.mark_processed(life)
            return True
        args = (*_copies(delivery), os.urandom(4).hex().encode(), state.encode(), milliseconds(life))
        reply = self._server.run(
            self._write_marker(ScriptCall(CLAIM, (self._keys.lock, marker_key(self._keys, delivery)), args))
        )
        return self._note_reply(reply)

    def mark_processed(self, life: float, version: int | None = None, *, alone: bool = True) -> None:
        """Mark the message as processed, or as published again in this version, for so many seconds.

        `alone`: nobody else has it; else a mark that says more stays. Raises LockBackendError when Redis cannot answer.
        """
        if self.delivery is not None and self.delivery.message:
            state = b"done" if version is None else b"%d" % version
            args = (state, milliseconds(life), b"" if alone else b"1")
            self._server.run(self._write_marker(ScriptCall(DONE, (marker_key(self._keys, self.delivery),), args)))

    def _write_marker(self, call: ScriptCall) -> Operation[int]:
        _, reply = yield from with_retries(self.name, call, 0.0)
        return int(reply)

    @property
    def refused(self) -> bool:
        """Whether the lock was refused because of a copy of the message."""
        return self.processed or self.retry_in is not None

    def _note_reply(self, reply: int) -> bool:
        self.processed = reply == 0
        self.retry_in = (-1 - reply) / 1000 if reply < 0 else None
        return reply > 0

    def is_copy(self, holder: LockInfo | None) -> bool:
        """Tell whether the holder of the lock is an execution of the same message."""
        return holder is not None and self.delivery is not None and holder.id.startswith(f"{self.delivery.message}:")

    def _new_claim(self, timeout: float | None) -> operations.AcquireRequest:
        delivery = self.delivery
        if delivery is None:
            return super()._new_claim(timeout)
        lease = self._new_lease(self._given_id or f"{delivery.message or delivery.id}:{os.urandom(12).hex()}")
        keys = (marker_key(self._keys, delivery),)
        args = (delivery.id.encode(), b"1" if delivery.known else b"0", *_copies(delivery))
        return operations.AcquireRequest(lease, self._record(), timeout, self._given_id is not None, START, keys, args)

    def _begins(self, lease: Lease) -> bool:
        return self._note_reply(lease.fence)

    def _release(self) -> Operation[None]:
        delivery = self.delivery
        if delivery is None or self.ending == AfterRelease():
            yield from super()._release()
            return
        lease = self._own()
        self._stop(lease)
        if not (yield from self._leave(lease, delivery)) and lease.loss is None:
            lease.lose((yield from find_cause(lease)))
        self._forget(lease)
        self._raise_loss(lease)
        self._tell("released", lease)

    def _leave(self, lease: Lease, delivery: Delivery) -> Operation[bool]:
        keys, ending = lease.keys, self.ending
        id = lease.id.encode()
        call = ScriptCall(
            LEAVE,
            (keys.lock, keys.held, keys.queue, keys.receipts, marker_key(keys, delivery)),
            (
                id,
                lease.name.encode(),
                b"%d" % lease.fence,
                milliseconds(ending.processed_for) if ending.processed_for and delivery.message else b"",
                ending.keep_id.encode(),
                milliseconds(ending.keep),
                self._record() if ending.keep_id else b"",
                b"done" if ending.complete else b"ending",
            ),
        )
        # Also after a loss of the lock, because the message has been processed all the same.
        _, reply = yield from with_retries(lease.name, call, lease.deadline, lease)
        return bool(reply)

    def _record(self) -> bytes:
        # What differs from one task to the next is added to what is kept ready for all of them.
        general = records.record(self.kind, "", self.expire, self.auto_renewal)
        own = [f',"{name}":{"true" if value is True else _json(value)}' for name, value in self.details.items()]
        return b'%b,"label":%b}' % (general[:-1], "".join([_json(self.label), *own]).encode())


def marker_key(keys: LockKeys, delivery: Delivery) -> bytes:
    return keys.held.removesuffix(b"held") + b"done:" + delivery.message.encode()


def _copies(delivery: Delivery) -> tuple[bytes, bytes]:
    return delivery.message.encode(), b"%d" % delivery.version


def count_duplicate(server: Server, name: str, keys: LockKeys) -> None:
    """Count a prevented duplicate of a task. An error of Redis is ignored, because the count is for people only."""
    with suppress(LockBackendError):
        server.run(_count_duplicate(name, keys))


def _count_duplicate(name: str, keys: LockKeys) -> Operation[None]:
    yield from with_retries(name, ScriptCall(DUPLICATE, (keys.held,), (name.encode(),)), monotonic())
