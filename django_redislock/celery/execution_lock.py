"""A lock that passes from a message to its execution, and from the execution to its retry.

A message holds the lock under an owner id made from the task's id. Its execution takes the lock over under an id of its
own, so that a copy of the message is not mistaken for the running execution. Copies of a message may start in any
order; one of them runs. The others find the lock of the running execution, or the processed marker of the message. An
execution writes the marker with its release: "done", or "ending" when its message is acknowledged later; then "done"
follows when the result is stored and all callbacks are sent. The marker also contains the version in which the message
was published again. `Execution` is what the body sees.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, ClassVar, Literal, NamedTuple, Self

from redis.exceptions import MovedError, RedisError

from ..core import events, operations
from ..core.attempt import Attempt, DroppableAttempt
from ..core.base import MESSAGES
from ..core.clock import monotonic
from ..core.driver import process
from ..core.driver.effects import Operation, Pipeline, Script, ScriptCall, with_retries
from ..core.driver.server import Server
from ..core.keys import LockKeys, counts_key, id_with_limit, lock_keys, milliseconds, record, slots_keys
from ..core.lease import Lease, find_cause
from ..core.lock import Lock
from ..core.operations import AcquireRequest
from ..core.options import Renewal
from ..core.records import LockInfo, marked, new_mark, parse
from ..core.semaphore import Slots
from ..core.watchdog import BATCH, watchdog
from ..exceptions import LockBackendError, LockLost, LossRecord

START = Script(
    *("start", "clock", "index", "take_unwanted", "lib", "quick_start"),
    *("expiry", "take", "handover", "counts", "turns", "slots", "message"),
    home=__package__,
    granted=lambda reply: isinstance(reply, bytes) or (isinstance(reply, int) and reply > 0),
)
PUBLISH = Script(
    *("publish", "clock", "index", "take_unwanted", "quick_publish"),
    *("lib", "receipts", "replace", "expiry", "take", "handover", "counts", "turns"),
    home=__package__,
    granted=lambda reply: isinstance(reply, int) and abs(reply) > 1,  # else it is about arguments
)
FINISH = Script("finish", "message", "marker", "index", "receipts", "handover", home=__package__)
SEE = Script("see", "counts", home=__package__)

_json = json.JSONEncoder().encode


class Delivery(NamedTuple):
    """A message as a worker received it."""

    id: str
    """The id under which it may hold the lock while it waits."""
    message: str = ""
    """Identifies the message and all its copies; "" for a message that cannot be delivered twice."""
    known: bool = False
    """Whether its copies can be distinguished from other messages."""
    version: int = 0
    """How often it was published again; only copies of the last version run."""


class AfterRelease(NamedTuple):
    """What an execution leaves in Redis after its release."""

    marker: Literal["keep", "ending", "done"] = "keep"
    """What is told of its message (marker.lua)."""
    marker_expire: float = 0.0
    """Seconds until the marker expires then."""
    keep_id: str = ""
    """The owner id that holds the lock from now on; "": the lock is released."""
    keep: float = 0.0
    """Seconds until the lock expires then."""


OF_PUBLISHER = Renewal(30.0)
"""The life of the lock of a message while it is published: if the publisher dies, no message may exist."""
CONFIRM_AFTER = 1.0
"""Seconds after which the lock of a published message gets the rest of its life, together with those of others."""


class MessageLease(Lease):
    """The lock of a message while it is published: renewed like any other until the message is sent, then given the
    time for which the message may wait.

    The watchdog does that, so it costs the publisher no call, and many messages share one. If the publisher dies in
    between, no message may exist, and the lock ends soon. A worker that has the message takes the lock, which is no
    loss.
    """

    __slots__ = ()
    published: ClassVar[set[MessageLease]] = set()
    """Those of messages that are sent, until Redis has confirmed the longer life."""
    confirming_pid: ClassVar[int] = 0
    """The process whose exit gives the rest of them their life."""

    def renewed(self, sent: float, expire: float, share: float | None = None) -> None:
        """Note that the lock got a new expiry; nothing is left to be done after the longer one."""
        super().renewed(sent, expire, share)
        if expire > OF_PUBLISHER.expire:
            watchdog.remove(self)
            self.published.discard(self)

    def ends_quietly(self) -> bool:
        """Return that nobody is told, because most often a worker has the message."""
        self.published.discard(self)
        return True

    def lengthen(self, expire: float) -> None:
        """Give the lock this life soon: its message is sent."""
        if MessageLease.confirming_pid != process.pid:
            self.published.clear()  # a forked child has its parent's
            MessageLease.confirming_pid = process.pid
            Finalize(None, confirm_published, exitpriority=0)  # atexit is not called in children of multiprocessing
        now = monotonic()
        self.published.add(self)
        self.expire = max(expire - (now - self.acquired) - CONFIRM_AFTER, OF_PUBLISHER.expire + 0.001)
        self.next_renewal = min(self.next_renewal, now + CONFIRM_AFTER)
        watchdog.reschedule(self)


class MessageAttempt(DroppableAttempt):
    """The calls for the lock of one message."""

    __slots__ = ()
    lease: MessageLease


def confirm_published() -> None:
    """Give the locks of all messages that this process has published their life now, because the process ends."""
    by_server: dict[Server, list[Lease]] = {}
    for lease in list(MessageLease.published):
        if not lease.inherited_by_fork:
            by_server.setdefault(lease.server, []).append(lease)
    for server, leases in by_server.items():
        for start in range(0, len(leases), BATCH):
            server.watchdog.renew(server, leases[start : start + BATCH])


class WaitingLease(Lease):
    """The lock of a message that waits in its worker. The start of its execution ends it, which is no loss."""

    __slots__ = ()

    def ends_quietly(self) -> bool:
        """Return that nobody is told."""
        return True


@dataclass(slots=True)
class StartRequest(AcquireRequest):
    """The arguments of one attempt to start an execution, and what its message had."""

    had_place: bool = True
    newest: bytes | None = None

    def fence_of(self, reply: int | bytes) -> int:
        """Return the fence of a grant, or why there is none."""
        if isinstance(reply, int):
            return reply
        fence, slot, waited, newest = reply.split(b" ")
        self.had_place, self.newest = waited == b"1", base64.b64decode(newest) if newest else None
        if slot != b"0":
            self.lease.keys = self.lease.keys.slot(int(slot))
        return int(fence)


class ExecutionLock(Slots, Lock):
    """The lock of a message, or of its execution: a slot of a semaphore if there is a limit of executions."""

    delivery: Delivery | None = None
    details: Mapping[str, Any] = {}
    """Further fields of the record: texts, or True."""
    place: ExecutionLock | None = None
    """The lock that its message holds while it waits. The start of the execution ends it, or takes it over."""
    arguments_expire = 0.0
    """Seconds for which the copies of the message find the newest arguments with which it began."""
    replaces = False
    """Whether duplicates give the message their arguments, so that the start notes also that it had none."""
    newest: bytes | None = None
    """The packed arguments of the newest duplicate, with which the execution begins."""
    had_place = True
    """Whether the message held its other lock until the start."""
    ending = AfterRelease()
    """What `release` leaves behind."""
    refused_by: LockInfo | None = None
    """Who held the lock when `take` was refused."""
    processed = False
    """Whether the lock was refused because the message was processed or published again."""
    retry_in: float | None = None
    """Seconds until another try makes sense, when the lock was refused because a copy of the message runs or ends
    now."""
    answer_within = 0.0
    """Seconds for which a single try waits for a server that cannot answer for a moment."""
    _tried: tuple[Lease, ...] = ()  # what it has asked for, perhaps without an answer
    _asked_ahead = False  # by a call that was sent ahead, which may still arrive after a further try
    message_lease: MessageLease | None = None
    """What this process holds for a message that it publishes now, if the message may wait for long."""

    def __init__(self, client: Any, name: str, **options: Any) -> None:
        Lock.__init__(self, client, name, **options)  # `with_name` gives it its limit

    def with_name(self, name: str, *, limit: int = 0, label: str = "", id: str | None = None, **changes: Any) -> Self:
        """Return a copy of this lock with another name and other attributes; nothing is checked again."""
        keys = slots_keys(self._prefix, name, limit) if limit else lock_keys(self._prefix, name)
        return self._copy(name=name, limit=limit, _keys=keys, label=label, _given_id=id, **changes)

    @property
    def other_place(self) -> ExecutionLock | None:
        """The lock under which the message waits, if its execution holds another one."""
        place = self.place
        return place if place is not None and (self.limit or place.name != self.name) else None

    @contextmanager
    def keep_alive(self, expire: float) -> Iterator[bool | None]:
        """Inside the block, hold the lock of the given id with a shorter expiry and renew it, so that it ends soon if
        this process dies. The block is given what `take_again` returns.

        After the block the lock is still held. Raises LockBackendError when Redis cannot answer.
        """
        # As a new acquisition, or the publisher might still give it the life of a message that no worker has.
        renewal = Renewal(expire)
        lease = WaitingLease(self._server, self.name, self._keys, self._given_id or "", renewal, self._acquirer())
        had = self._copy(renewal=renewal).take_again(lease, until=math.inf)
        try:
            if lease.fence:
                watchdog.add(lease)
            yield had
        finally:
            watchdog.remove(lease)

    def take_again(self, lease: Lease | None = None, until: float = 0.0) -> bool | None:
        """Acquire the lock anew for a message that waits on, and return whether it had it, or its execution began
        before; None when another message has it.

        Raises LockBackendError when Redis cannot answer until then.
        """
        with self._new_attempt(fresh=False) as attempt:
            attempt.is_new = False  # it is the message's by right, so nothing is given back
            call = self._publish_call(b"again", attempt, self.expire)
            sent, reply = self._server.run(self._asking(attempt, call, self.expire, until))
        if not isinstance(reply, int):
            return None
        if lease is not None:
            lease.note_acquired(abs(reply), sent)
        return reply > 0

    def take(self, *, fresh: bool = False) -> bool:
        """Acquire the lock for a message, without a wait, and return whether it was acquired; then call `settle`.

        `fresh`: the given id is new. Raises LockBackendError when Redis cannot answer; then what the call gets later is
        released.
        """
        with self._new_attempt(fresh) as attempt:
            call = self._publish_call(b"new" if fresh else b"known", attempt, self._first_expire)
            sent, reply = self._server.run(self._asking(attempt, call, self._first_expire))
            taken = self._has_taken(attempt.lease, sent, reply)
            attempt.pending = attempt.repeated and not taken
        return taken

    def _asking(
        self, attempt: Attempt, call: ScriptCall, within: float, until: float = 0.0
    ) -> Operation[tuple[float, Any]]:
        operations.refuse_one_of_several(self._server, self.name)
        try:
            return (yield from with_retries(self.name, call, until, attempt, within=within))
        except LockBackendError as error:
            yield from operations.see_one_of_several(self._server, error)
            raise

    def _new_attempt(self, fresh: bool) -> MessageAttempt:
        process.notice_fork()  # before the lease and the record, which name the process
        # A known id may hold the lock by another message of its.
        lease = MessageLease(self._server, self.name, self._keys, self._given_id or "", OF_PUBLISHER, None)
        attempt = MessageAttempt(lease, b"" if fresh else new_mark())
        attempt.repeated = self._asked_ahead
        return attempt

    def take_within(self, seconds: float) -> bool:
        """Acquire the lock as `take` does, but wait for it for so many seconds."""
        # With the whole life of a message, a publisher that was killed then blocked the key for an hour. The record has
        # the whole life all the same, and `take` alone reports the acquisition.
        quiet = {"_record": self._record, "_report": lambda *_: None}
        brief = self._copy(renewal=Renewal(self._first_expire, auto_renewal=False), **quiet)
        return brief.acquire(timeout=seconds) and self.take()

    @property
    def _first_expire(self) -> float:
        """Seconds until the lock of a message expires unless it is renewed."""
        return min(self.expire, OF_PUBLISHER.expire)

    def settle(self, published: bool) -> None:
        """Note that the message was published, or that it will not be."""
        lease, self.message_lease = self.message_lease, None
        if lease is not None and published:
            lease.lengthen(self.expire)
        elif lease is not None:
            watchdog.remove(lease)

    def take_ahead(self) -> Callable[[], bool | None] | None:
        """Send what `take` sends for a new id; None when no connection is free.

        The function returned waits for the answer: call it once, in this thread. It returns None when `take` shall try
        again, and raises LockBackendError when that makes no sense.
        """
        attempt = self._new_attempt(fresh=True)
        attempt.pending = True
        call, sent = self._publish_call(b"new", attempt, self._first_expire), monotonic()
        receive = self._server.send_ahead(call)
        if receive is None:
            attempt.pending = False
            return None
        self._asked_ahead = True
        return partial(self._answer_of, receive, sent, call, attempt)

    def _answer_of(
        self, receive: Callable[[], Any], sent: float, call: ScriptCall, attempt: MessageAttempt
    ) -> bool | None:
        with attempt:
            try:
                reply = receive()
                taken = self._has_taken(attempt.lease, sent, reply) if monotonic() < sent + self._first_expire else None
            except MovedError:
                taken = None  # `take` sees whether the server has other names only
            except RedisError as error:
                tries = with_retries(self.name, call, 0.0)
                next(tries)
                tries.throw(error)  # raises LockBackendError, unless it asks for another try
                tries.close()
                taken = None
            attempt.pending = False  # another try has the same id, and gives back what this one gets later
        return taken

    def _publish_call(self, verb: bytes, attempt: Attempt, expire: float) -> ScriptCall:
        id, keys = (self._given_id or "").encode(), self._keys
        record = marked(self._record(), attempt.mark) if attempt.mark else self._record()
        more = () if verb == b"new" else (keys.receipts, arguments_key(keys, self.delivery or Delivery("")))
        of_lock = (*keys[:4], attempt.note, counts_key(keys), *more)
        return ScriptCall(PUBLISH, of_lock, (verb, id, milliseconds(expire), keys.name, record))

    def _has_taken(self, lease: MessageLease, sent: float, reply: object) -> bool:
        fence, self.refused_by = abs(reply) if isinstance(reply, int) else 0, self._info(reply)
        if fence:
            if self.expire > OF_PUBLISHER.expire:
                self.message_lease = lease
                lease.note_acquired(fence, sent)
                with suppress(RuntimeError):  # no further thread can be started: the message has its lock for a while
                    watchdog.add(lease)
            events.emit("acquired", MESSAGES["acquired"], self.name, fence, name=self.name, fence=fence)
        return fence > 0

    def release_given_id(self, later: bool = True) -> bool:
        """Release the lock if the given id holds it, and return whether it did.

        Raises LockBackendError when Redis cannot answer. With `later` it is released as soon as Redis does.
        """
        try:
            return self._server.run(operations.release(self._new_lease(None, self._given_id or "")))
        except BaseException:  # a soft time limit, too
            if later:
                self.release_later()
            raise

    def release_later(self) -> None:
        """Have the lock released if the given id holds it, without waiting for it: its message has ended.

        A lock of a name and an id that anybody may use again is not released so late, but the id of a message that has
        ended is used again at most by hand.
        """
        lease = self._new_lease(None, self._given_id or "")
        self._server.send_in_any_case(operations.release_call(lease))

    def count_duplicate(self) -> None:
        """Count a prevented duplicate for the page about contention; an error of Redis is ignored."""
        with suppress(LockBackendError):
            self._server.run(with_retries(self.name, self._duplicate_call(always=True), monotonic()))

    def prevented_by(self) -> LockInfo | None:
        """Return the holder, who prevents a duplicate now, and count it; None when nobody holds the lock.

        Raises LockBackendError when Redis cannot answer.
        """
        _, reply = self._server.run(with_retries(self.name, self._duplicate_call(), 0.0))
        return self._info(reply)

    def _info(self, reply: object) -> LockInfo | None:
        """Return the holder in the reply of a script."""
        holder = parse(self.name, *reply) if isinstance(reply, list) and reply else None
        return None if holder is None else holder.info

    def _duplicate_call(self, always: bool = False) -> ScriptCall:
        keys = self._keys
        return ScriptCall(SEE, (keys.lock, keys.queue, counts_key(keys)), (keys.name, b"1" if always else b""))

    def replace_arguments(self, holder: LockInfo, newest: bytes) -> bool:
        """Give the waiting message that holds the lock these arguments; False when it does not hold it any more.

        Raises LockBackendError when Redis cannot answer.
        """
        receipt = b"newest " + os.urandom(4).hex().encode()  # because a repeated call must not undo a newer one
        waiting = holder.id.encode(), b"", b"", b"", b"%d" % holder.fence
        args = (b"replace", *waiting, base64.b64encode(newest), receipt)
        return bool(self._server.run(self._reply_to(ScriptCall(PUBLISH, (self._keys.lock, self._keys.receipts), args))))

    def newest_arguments(self, delivery: Delivery) -> bytes | None:
        """Return the newest arguments that the message was given, whether its execution has begun or not; None if
        there are none.

        Raises LockBackendError when Redis cannot answer.
        """
        noted = (b"GET", arguments_key(self._keys, delivery)), (b"GET", self._keys.lock)
        _, (began, value) = self._server.run(with_retries(self.name, Pipeline(noted), 0.0))
        found = _NEWEST.search(value) if value and value.startswith(f"{self._given_id}\n".encode()) else None
        newest = found[1] if found else began
        return base64.b64decode(newest) if newest else None

    def claim(self, expire: float, state: Literal["ending", "done"], ends: bool = False) -> bool:
        """Mark a message that will not run now, for so many seconds; False when a copy of it runs or has been
        processed. `ends`: it ends by this, so the lock under which it waited is released.

        Raises LockBackendError when Redis cannot answer.
        """
        place = self.place if ends else None
        if (delivery := self.delivery) is None or not delivery.known:
            if state == "done":
                self.mark_processed(expire)
            if place is not None:
                place.release_given_id()
            return True
        claim = b"%d.%b" % (delivery.version, os.urandom(4).hex().encode())
        id, keys = (b"", self._keys) if place is None else ((place._given_id or "").encode(), place._keys)
        copies, version = _copies(delivery)
        slots = self._keys.slots(2) if self.limit else ()
        args = (b"refuse", milliseconds(expire), id, keys.name, *[b""] * 4, version, claim, state.encode(), copies)
        call = _finish(keys, marker_key(keys, delivery), args, self._keys.lock, *slots)
        reply = self._server.run(self._reply_to(call))
        return self._note_reply(reply)

    def mark_processed(self, expire: float, version: int | None = None, *, alone: bool = True) -> None:
        """Mark the message as processed, or as published again in this version, for so many seconds.

        A version does not replace the marker of a later one, or of an end. `alone`: no copy of the message may exist,
        so it may replace the marker that a copy is about to end. Raises LockBackendError when Redis cannot answer.
        """
        if self.delivery is not None and self.delivery.message:
            verb, more = (b"done", ()) if version is None else (b"again", (b"%d" % version, b"" if alone else b"1"))
            args = (verb, milliseconds(expire), *[b""] * 6, *more)
            self._server.run(self._reply_to(ScriptCall(FINISH, (marker_key(self._keys, self.delivery),), args)))

    def _reply_to(self, call: ScriptCall) -> Operation[int]:
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

    def release_tried(self) -> None:
        """Release what Redis may have granted to calls that it did not answer; does nothing if it cannot answer now."""
        for lease in self._tried:
            if not lease.fence and lease.id != self._given_id:  # by a given id another one may hold it
                with suppress(LockBackendError):
                    self._server.run(with_retries(self.name, operations.release_call(lease), 0.0))

    def is_copy(self, holder: LockInfo | None) -> bool:
        """Return whether the holder of the lock is another execution of the same message."""
        # Redis may have granted this one the lock without an answer: it passed for a copy, and the message was dropped,
        # though nobody ran it (celery, seed 43206949).
        if holder is None or self.delivery is None or any(holder.id == lease.id for lease in self._tried):
            return False
        return holder.id.startswith(f"{self.delivery.message}:")

    def _new_request(self, acquirer: Any, timeout: float | None) -> AcquireRequest:
        if (delivery := self.delivery) is None:
            return super()._new_request(acquirer, timeout)
        id, keys, place = f"{delivery.message or delivery.id}:{os.urandom(12).hex()}", self._keys, self.other_place
        if self.limit:
            id = id_with_limit(id, self.limit)
        of_place: tuple[bytes, ...] = ()
        about_place: tuple[bytes, ...] = (b"", b"", b"")
        if place is not None:
            of_place = place._keys.lock, place._keys.queue, arguments_key(keys, delivery)
            notes = b"1" if self.replaces else b""
            about_place = place._keys.name, milliseconds(self.arguments_expire), notes
        slots = keys.slots(2) if self.limit and delivery.known else keys.others
        known, (copies, version) = b"1" if delivery.known else b"0", _copies(delivery)
        lease = self._new_lease(acquirer, id)
        self._tried = (*self._tried, lease)
        return StartRequest(
            Attempt(lease, is_new=id != delivery.id),
            self._record(),
            timeout,
            False,
            self._is_subscribed(),
            START,
            (marker_key(keys, delivery), *of_place, *slots),
            (b"%d" % self.limit, delivery.id.encode(), known, copies, version, *about_place),
            monotonic() + self.answer_within,
        )

    def _accepts(self, request: AcquireRequest) -> bool:
        if isinstance(request, StartRequest):
            self.newest, self.had_place = request.newest, request.had_place or self.other_place is None
        return self._note_reply(request.lease.fence)

    def _release(self, lease: Lease) -> Operation[None]:
        if self.ending == AfterRelease():
            yield from super()._release(lease)
            return
        self._stop(lease)
        # Its deadline counts until now, and not when the answer comes: a process that stood still meanwhile was told
        # that it had lost a lock that it had released (seed 1798 of the simulation of tasks).
        in_time = lease.loss is None
        # A direct call has no message, and its lock is kept, too (`keep_for`).
        if not (yield from self._leave(lease, self.delivery or Delivery(""))) and in_time:
            lease.lose((yield from find_cause(lease)))
        self._forget(lease)
        if lease.noted_loss is not None:
            self._raise_loss(lease)
        self._report("released", lease)

    def leave_to_message(self, holder: LockInfo, seconds: float) -> None:
        """Let the message hold the lock of its execution that was killed, for so many seconds.

        Does nothing when another execution holds the lock. Raises LockBackendError when Redis cannot answer.
        """
        if self.delivery is not None and self.is_copy(holder):
            lease = self._new_lease(None, holder.id)
            lease.fence = holder.fence
            self.ending = AfterRelease(keep_id=self.delivery.id, keep=seconds)
            self._server.run(self._leave(lease, self.delivery))

    def _leave(self, lease: Lease, delivery: Delivery) -> Operation[bool]:
        keys, ending = lease.keys, self.ending
        args = (
            (ending.marker if delivery.message else "keep").encode(),
            milliseconds(ending.marker_expire),
            lease.id.encode(),
            keys.name,
            b"%d" % lease.fence,
            ending.keep_id.encode(),
            milliseconds(ending.keep),
            self._record(ending.keep) if ending.keep_id else b"",
        )
        call = _finish(keys, marker_key(keys, delivery), args)
        # Also after a loss of the lock, because the message has been processed.
        try:
            _, reply = yield from with_retries(lease.name, call, lease.deadline, lease)
        except BaseException:
            # The call itself, which may be repeated: a lock that is kept would else stay as the run's until its expiry,
            # and the message of a retry passed for a copy of a run that goes on.
            if ending.keep_id and lease.fence:
                self._server.send_in_any_case(call)
            else:
                operations.send_release(lease)
            raise
        return bool(reply)

    def _record(self, keep: float | None = None) -> bytes:
        """Return what is written into the lock: of the execution, or when it is kept after it for so many seconds."""
        # No call may set a later end than the longest expiry in the record. A kept lock that had the expiry of the run
        # there ended early, when a call of its publisher came late (seed 55,903 of the simulation of tasks).
        life, is_renewed = (self.expire, self.renewal.auto_renewal) if keep is None else (keep, False)
        # The fields of this task are appended to the prepared record of all tasks.
        general = record(self.kind, "", life, is_renewed)
        own = [f',"{name}":{"true" if value is True else _json(value)}' for name, value in self.details.items()]
        if self.limit:
            own.append(f',"limit":{self.limit}')
        return b'%b,"label":%b}' % (general[:-1], "".join([_json(self.label), *own]).encode())

    def _owner(self) -> Operation[LockInfo | None]:
        """Read the holder; of the holders of slots the one that prevents this execution most, which is a copy of its
        message, or another run of its task's id, and else the oldest one."""
        if not self.limit:
            return (yield from Lock._owner(self))
        held = (yield from self._holders()).values()
        return max(held, key=lambda info: (self.is_copy(info), info.label == self.label, info.age), default=None)


def _finish(keys: LockKeys, marker: bytes, args: tuple[bytes, ...], *copies: bytes) -> ScriptCall:
    return ScriptCall(FINISH, (keys.lock, keys.held, keys.queue, keys.receipts, marker, *copies), args)


def marker_key(keys: LockKeys, delivery: Delivery) -> bytes:
    return keys.held.removesuffix(b"held") + b"done:" + delivery.message.encode()


def arguments_key(keys: LockKeys, delivery: Delivery) -> bytes:
    return keys.held.removesuffix(b"held") + b"arguments:" + delivery.message.encode()


_NEWEST = re.compile(rb',"newest":"([^"]*)"}$')


def _copies(delivery: Delivery) -> tuple[bytes, bytes]:
    return delivery.message.encode(), b"%d" % delivery.version


class Execution:
    """One execution of a single-instance task, as its body sees it: ``self.single_instance``. It runs inside its
    ``with`` block."""

    def __init__(self, task: str, task_id: str | None = None, lock: Lock | None = None) -> None:
        self.task = task
        self.task_id = task_id
        """None in a direct call."""
        self.lock = lock
        """None in a call that takes no lock."""
        self.over = False
        """Whether its body has ended."""

    def __enter__(self) -> None:
        self._outer = executions()
        _executions.set((*self._outer, self))

    def __exit__(self, *error: object) -> None:
        self.over = True
        _executions.set(self._outer)

    @property
    def lost(self) -> LossRecord | None:
        """Why the lock was lost, or None while it is held. No call to Redis."""
        return None if self.lock is None else self.lock.lost

    def raise_if_lost(self) -> None:
        """Raise LockLost if the lock was lost: call it before each irreversible step. No call to Redis."""
        if self.lost is not None:
            raise LockLost(self.lost.name, self.lost)


_executions: ContextVar[tuple[Execution, ...]] = ContextVar("executions", default=())


def executions() -> tuple[Execution, ...]:
    """Return the executions of this context, outermost first, because a task may call itself or be applied within
    itself.

    Coroutines of a body, and the threads that they start, have its context. They may run longer than the execution.
    """
    return tuple(execution for execution in _executions.get() if not execution.over)
