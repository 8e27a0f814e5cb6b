"""The algorithm of the lock: acquire and wait, release, renew, reset, read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.exceptions import MovedError, RedisError

from ..exceptions import AlreadyAcquired, LockBackendError
from . import chance, events, scripts
from .attempt import Attempt
from .clock import monotonic
from .driver.cluster.by_slot import Missing, by_slot
from .driver.effects import ONE_NODE, Operation, Pipeline, Script, ScriptCall, Subscribe, WaitForWakeup, with_retries
from .driver.server import Server
from .keys import LockKeys, counts_key, held_keys, listed_name, lock_keys, milliseconds, new_id, witness_key
from .lease import Lease, note, notes_key, report_reset
from .records import StoredLock, parse

MAX_SLEEP = 30.0
"""Seconds after which a waiter tries again in any case; a queue expires after four times as long."""
LOOKED_AT = 500
"""Locks whose age and waiters `count` reads, at most."""
BATCH = 200
"""Locks read, or reset, in one call at most, so that the server is not kept busy for long."""
JOINS, HAS_JOINED = 1, 2
"""What a call says of the queue: it joins it, or believes to be in it."""
NO_LOCK_WROTE_IT = -2
"""The length of a value in the reply of READ that no lock wrote."""
OF_LEADER = b'"kind":"leader"'
"""A part of the record of a leader, and of who waits to be one, as acquire.lua finds it."""
FOREIGN = "The key %s has a value that no lock wrote: delete it, or give the lock another name or prefix."
SELF_WAIT = (
    "Lock %r (fence %d) is held by the same thread or task that now waits for it through another object. Only the "
    "lock's expiry, or a release from elsewhere, can end this wait before the timeout. Release the lock first, or, "
    "if it is no semaphore and no quorum lock, make both re-entrant: lock(name, reentrant=True) or rlock(name)."
)


@dataclass(slots=True)
class AcquireRequest:
    """The arguments of one attempt to acquire a lock, and the lease that begins if it succeeds."""

    attempt: Attempt
    record: bytes
    timeout: float | None
    """Seconds to wait; None waits without limit."""
    given_id: bool
    """Whether the id may be used again, by anybody who knows it."""
    subscribed: bool = False
    """Whether wake-ups arrive already, so that joining the queue with the first call costs nothing."""
    script: Script = scripts.ACQUIRE
    """The script that acquires: it takes the KEYS and ARGV of ACQUIRE, and `more_keys` and `more_args` after them."""
    more_keys: tuple[bytes, ...] = ()
    more_args: tuple[bytes, ...] = ()
    answer_by: float = 0.0
    """When the last call is repeated at the latest, on the monotonic clock, if that is later than the timeout's end."""

    @property
    def lease(self) -> Lease:
        """The lease that begins if it succeeds."""
        return self.attempt.lease

    @property
    def waited(self) -> bool:
        """Whether it has waited for the lock."""
        return self.attempt.waited

    def call(self, channel: bytes, join: int, ticket: bytes) -> ScriptCall:
        lease = self.attempt.lease
        args = (
            lease.id.encode(),
            milliseconds(lease.expire),
            lease.keys.name,
            self.record,
            channel,
            b"%d" % join,
            ticket,
            *self.more_args,
        )
        # An earlier release of a given id must not count as the release of this acquisition.
        receipts = (lease.keys.receipts,) if self.given_id else ()
        counts = (counts_key(lease.keys),) if ticket else ()  # only a wait is counted
        keys = (*lease.keys[:4], *self.more_keys, self.attempt.note, *receipts, *counts)
        return ScriptCall(self.script, keys, args)

    def fence_of(self, reply: int | bytes) -> int:
        """Return the fence of a grant, negative when the id held the lock before; note which slot was granted."""
        if isinstance(reply, int):
            return reply
        fence, _, slot = reply.partition(b" ")
        self.lease.keys = self.lease.keys.slot(int(slot))
        return int(fence)


def acquire(request: AcquireRequest) -> Operation[bool]:
    """Acquire the lock within the request's timeout; its lease begins when the lock is acquired.

    The first call only tries unless the process is subscribed, so that an uncontended lock needs no subscription.
    """
    lease, attempt = request.lease, request.attempt
    until = math.inf if request.timeout is None else monotonic() + request.timeout
    answer_by = max(until, request.answer_by)
    refuse_one_of_several(lease.server, lease.name)
    attempt.pending = True
    waiter: Any = None
    ticket = b""
    began = 0.0
    call: ScriptCall | None = None
    listen = request.subscribed and request.timeout != 0
    try:
        while True:
            if listen and waiter is None:  # a process that was subscribed may have lost its connection since
                subscribe = Subscribe(lease.keys.last, lease.id.encode())
                _, waiter = yield from with_retries(lease.name, subscribe, answer_by, attempt)
                attempt.channel = waiter.channel
            last = until < math.inf and monotonic() >= until
            if last or call is None:
                call = request.call(attempt.channel, listen and not last, ticket)
            sent, reply = yield from with_retries(lease.name, call, answer_by, attempt, within=lease.expire)
            if isinstance(reply, int | bytes):
                fence = request.fence_of(reply)
                # Of another script that replies with a number, a negative one means something else.
                held_before = fence < 0 and (request.script is scripts.ACQUIRE or isinstance(reply, bytes))
                if request.given_id:  # first: at an interruption, a lock that another object holds is not released
                    lease.shared, lease.mark = held_before, b" " + new_id().encode()
                lease.note_acquired(-fence if held_before else fence, sent)
                if began:
                    _report_wait(request, began, acquired=True)
                return True
            if last:
                attempt.pending = attempt.repeated  # its first call may arrive when the lock is free
                if began:
                    _report_wait(request, began, acquired=False)
                return False
            left_ms, ticket, queue_length = reply
            if waiter is None:
                listen, call = True, None
                continue
            began = began or monotonic()
            attempt.waited = True
            # Prepared now, so that nothing is built between the wake-up and the next try.
            call = request.call(waiter.channel, JOINS, ticket)
            yield wait_effect(waiter, until, left_ms, queue_length)
            if not waiter.called:  # it looks by itself: a queue that was lost calls nobody
                call = request.call(waiter.channel, HAS_JOINED, ticket)
    except LockBackendError as error:
        yield from see_one_of_several(lease.server, error)
        raise
    finally:
        if waiter is not None:
            waiter.leave()


def refuse_one_of_several(server: Server, name: str) -> None:
    """Raise LockBackendError when the server is known to be one of several primaries of a Cluster.

    A plain client of it got the locks of some names, and nobody saw that it had those of the others not.
    """
    if server.one_of_several:
        failure = LockBackendError(name, ONE_NODE, refused=True)
        events.emit("backend_error", "%s", str(failure), name=name, cause=ONE_NODE)
        raise failure


def see_one_of_several(server: Server, error: LockBackendError) -> Operation[None]:
    """Note after an error whether the server is one of several primaries of a Cluster.

    A proxy, and the only primary of a Cluster, serve every name: the latter answers MOVED when a failover has made a
    replica of it, and is not refused.
    """
    if isinstance(error.__cause__, MovedError):
        with suppress(RedisError):  # the user may not ask
            (about,) = yield Pipeline(((b"CLUSTER", b"INFO"),))
            found = re.search(rb"cluster_size:(\d+)", about)
            server.one_of_several = found is not None and int(found[1]) > 1


def acquire_again(request: AcquireRequest, held: list[Lease]) -> Operation[bool]:
    """Acquire a lock of which the acquirer has these leases, or report that it would wait for itself.

    Raises AlreadyAcquired when the wait would never end.
    """
    timeout = request.timeout
    until = math.inf if timeout is None else monotonic() + timeout
    request.timeout = 0.0  # a lock that was lost unnoticed may be free
    request.answer_by = until  # the caller has time, so an error of the connection is not the answer
    if (yield from acquire(request)):
        return True
    held = [lease for lease in held if lease.id != request.lease.id and lease.loss is None]
    if timeout is None and any(lease.renewing and lease.renewal.max_hold is None for lease in held):
        raise AlreadyAcquired(request.lease.name)
    if held:
        events.log.warning(SELF_WAIT, request.lease.name, held[0].fence)
    request.timeout = None if timeout is None else max(0.0, until - monotonic())
    return (yield from acquire(request))


def _report_wait(request: AcquireRequest, began: float, acquired: bool) -> None:
    """Report the length of the wait, if there was one, but not that of who waits to be a leader, perhaps for days."""
    if OF_LEADER not in request.record:
        report_wait(request.lease.name, began, acquired)


def report_wait(name: str, began: float, acquired: bool) -> None:
    """Report the length of a wait that began then; 0: there was none."""
    if began:
        seconds = monotonic() - began
        message = "Lock %r was waited for %.3f s (acquired: %s)."
        events.emit("waited", message, name, seconds, acquired, name=name, seconds=seconds, acquired=acquired)


def wait_effect(waiter: Any, until: float, left_ms: int, queue_length: int = 0) -> WaitForWakeup:
    """Return the wait of a waiter for a lock that has so many milliseconds left (negative: unknown)."""
    now = monotonic()
    waiter.tried_at, waiter.queue_length, waiter.called = now, queue_length, False
    look = now + (left_ms + 1) / 1000 if left_ms >= 0 else math.inf
    return WaitForWakeup(waiter, min(until, now + MAX_SLEEP), look)


def release_call(lease: Lease, channel: bytes = b"") -> ScriptCall:
    """Return the call that releases the lease; if its fence is unknown, whatever its id has got, and the place in the
    queue of its waiter with that channel."""
    id, keys = lease.id.encode(), lease.keys
    fence = b"%d" % lease.fence if lease.fence else b""
    return ScriptCall(
        scripts.RELEASE,
        (keys.lock, keys.held, keys.queue, keys.receipts, *keys.others),
        (id, keys.name, channel, fence, fence + lease.mark if fence else b"id " + id),
    )


def release(lease: Lease, until: float = math.inf) -> Operation[bool]:
    """Release the lock; False when it was no longer the lease's.

    If that is not answered, or interrupted, it is sent again until the server answers.
    """
    # After the deadline the lock has ended by itself, so there is no sense in trying for longer.
    until = min(until, max(lease.deadline, monotonic()))
    try:
        _, reply = yield from with_retries(lease.name, release_call(lease), until, lease)
    except BaseException:
        send_release(lease)
        raise
    return bool(reply)


def send_release(lease: Lease) -> None:
    """Have the lock released, without waiting for it; a destructor may call this."""
    # Without the fence it might arrive after the next acquisition by the same id, and release that one.
    if lease.fence and not lease.inherited_by_fork:
        lease.server.send_in_any_case(release_call(lease))


def release_lost(lease: Lease) -> Operation[None]:
    """Release a lost lock by one try, if an extension or a renewal may have kept it in Redis after the loss.

    Otherwise the server is not asked, because it may be silent, and because another caller with the given id may have
    extended the lock. A lock of a shared id stays, because another holder may rely on it.
    """
    if lease.may_outlive and lease.fence and not lease.shared:
        with suppress(LockBackendError):
            yield from with_retries(lease.name, release_call(lease), monotonic(), lease)


def renew(lease: Lease, until: float = math.inf) -> Operation[bool]:
    """Set the expiry in Redis, to an earlier one if the lease shortens; False when the lease does not hold the lock."""
    expire = lease.expire
    until = min(until, max(lease.deadline, monotonic()))
    call = renew_call([lease], shorten=lease.shortens and bool(lease.fence) and not lease.shared)
    # Until it is answered, because the watchdog, or another thread, may find the loss meanwhile.
    outlives, lease.may_outlive = lease.may_outlive, True
    try:
        sent, reply = yield from with_retries(lease.name, call, until, lease)
    except BaseException:
        lease.may_outlive = True  # another extension, which was answered meanwhile, may have set it back
        raise
    lease.may_outlive = outlives
    if reply[0] > 0:
        lease.shortens = False
        lease.renewed(sent, expire)
        if lease.loss is not None:  # the answer came after the deadline
            lease.may_outlive = True
            yield from release_lost(lease)
        return True
    lease.refused(reply[0])
    return False


def renew_call(leases: list[Lease], shorten: bool = False) -> ScriptCall:
    """Return one call that renews all the leases; `shorten`: also where the expiry in Redis is later."""
    keys = [key for lease in leases for key in (lease.keys.lock, lease.keys.held)]
    args = [b"1" if shorten else b"0"]
    for lease in leases:
        args += (lease.value_prefix, milliseconds(lease.expire), lease.keys.name)
    return ScriptCall(scripts.RENEW, tuple(keys), tuple(args))


def reset_call(
    keys: LockKeys, fence: int | None, by: object = None, reason: str = "", recalls: bool = False
) -> ScriptCall:
    """Return the call that force-releases or recalls the lock.

    Its reply is 1 when that was done, 2 when the lock was recalled before, 0 when nobody held it, -1 when another
    acquisition than `fence` held it.
    """
    fence_text = b"" if fence is None else b"%d" % fence
    args = (keys.name, fence_text, new_id().encode(), note(by, reason), *((b"1",) if recalls else ()))
    of_lock = (keys.lock, keys.held, keys.queue, keys.receipts, notes_key(keys), witness_key(keys))
    return ScriptCall(scripts.RESET, of_lock, args)


def reset(
    what: str,
    server: Server,
    name: str,
    keys: LockKeys,
    fence: int | None,
    by: object = None,
    reason: str = "",
    recalls: bool = False,
) -> Operation[bool]:
    """Force-release or recall the lock, report that, and return whether it was held."""
    _, reply = yield from with_retries(name, reset_call(keys, fence, by, reason, recalls), math.inf, server)
    if reply == 1:
        report_reset(what, name, fence, by, reason, recalls)
    return bool(reply > 0)


def read(
    server: Server, name: str, locks: list[LockKeys], until: float = math.inf
) -> Operation[list[StoredLock | None]]:
    """Read the lock, or the slots of a semaphore, as they are stored: None for each that nobody holds."""
    each = [(name, keys) for keys in locks]
    _, reply = yield from with_retries(name, _read_call(each), until, server)
    return _stored(each, reply)


def read_many(
    server: Server,
    names: list[str],
    locks: list[LockKeys],
    until: float = math.inf,
    missing: Missing | None = None,
    foreign: Missing | None = None,
) -> Operation[list[StoredLock | None]]:
    """Read any locks as they are stored, in no order. For `missing` see `by_slot`.

    `foreign` gets the names of those whose value no lock wrote, and why; without it, LockBackendError is raised.
    """
    each = list(zip(names, locks, strict=True))
    replies = yield from by_slot(server, each, lambda item: item[1].lock, _read_call, until, missing)
    return [stored for some, reply in replies for stored in _stored(some, reply, foreign)]


def _read_call(each: list[tuple[str, LockKeys]]) -> ScriptCall:
    return ScriptCall(scripts.READ, tuple(key for _, keys in each for key in (keys.lock, keys.queue)), ())


def _stored(each: list[tuple[str, LockKeys]], reply: Any, foreign: Missing | None = None) -> list[StoredLock | None]:
    now, packed, blob = reply
    numbers = list(map(int, packed.split()))
    lengths = numbers[::3]
    found: list[StoredLock | None] = []
    for (name, keys), length, value, ttl_ms, waiting in zip(
        each, lengths, unpack(lengths, blob), numbers[1::3], numbers[2::3], strict=True
    ):
        try:
            if length == NO_LOCK_WROTE_IT:
                raise LockBackendError(name, FOREIGN % keys.lock.decode(errors="backslashreplace"))
            found.append(parse(name, value, ttl_ms, waiting, now))
        except LockBackendError as error:
            if foreign is None:
                raise
            foreign[name] = error.cause
    return found


def names(server: Server, prefix: str, until: float = math.inf, missing: Missing | None = None) -> Operation[list[str]]:
    """Read the names of the locks held now, in no order. For `missing` see `by_slot`."""
    found: set[bytes | None] = set()
    pages = [(held, b"0") for held in held_keys(prefix)]
    while pages:
        replies = yield from by_slot(server, pages, lambda page: page[0], _names_call, until, missing)
        pages = []
        for some, (bucket, cursor, lengths, blob) in replies:
            found.update(unpack(map(int, lengths.split()), blob))
            if bucket:
                pages += [(some[bucket - 1][0], cursor), *some[bucket:]]
    return [listed_name(name) for name in found if name is not None]


def _names_call(pages: list[tuple[bytes, bytes]]) -> ScriptCall:
    return ScriptCall(scripts.NAMES, tuple(held for held, _ in pages), (b"1", pages[0][1]))


class Held(NamedTuple):
    """The locks held now, in numbers."""

    locks: int
    oldest: float
    """For how many seconds the oldest lock is held, of those that were looked at; without the locks of leaders."""
    waiting: int
    """The waiters for the locks that were looked at."""
    slots: int
    """How many of the locks that were looked at are slots of semaphores."""
    limits: int
    """The limits of these semaphores together."""


def count(server: Server, prefix: str, until: float = math.inf, missing: Missing | None = None) -> Operation[Held]:
    """Count the locks held now, and look at `LOOKED_AT` of them. For `missing` see `by_slot`.

    If more are held, each call looks at others: at those of whole indexes, in any order, because all slots of a
    semaphore are in one.
    """
    replies = yield from by_slot(server, held_keys(prefix), lambda held: held, _count_call, until, missing)
    numbers = [item for some, reply in replies for item in zip(some, map(int, reply.split()), strict=True)]
    chance.shuffle(numbers)
    pages, number = [], 0
    for held, of_index in numbers:
        if of_index and number < LOOKED_AT:
            pages.append((held, b"0"))
            number += of_index
    found: set[bytes | None] = set()
    if pages:
        answers = yield from by_slot(server, pages, lambda page: page[0], _names_call, until, missing)
        found.update(*(unpack(map(int, lengths.split()), blob) for _, (_, _, lengths, blob) in answers))
    names = [listed_name(name) for name in found if name is not None][:LOOKED_AT]
    oldest, slots, queues, limits = 0.0, 0, dict[bytes, int](), dict[bytes, int]()
    for start in range(0, len(names), BATCH):
        batch = names[start : start + BATCH]
        keys = [lock_keys(prefix, name) for name in batch]
        stored = yield from read_many(server, batch, keys, until, missing, foreign={})
        for lock in filter(None, stored):
            if OF_LEADER in lock.record:
                continue
            oldest, queue = max(oldest, lock.age), lock_keys(prefix, lock.name).queue
            queues[queue] = lock.waiting  # the slots of a semaphore share it
            if limit := lock.info.limit:
                slots, limits[queue] = slots + 1, max(limits.get(queue, 0), limit)
    return Held(sum(of_index for _, of_index in numbers), oldest, sum(queues.values()), slots, sum(limits.values()))


def _count_call(indexes: list[bytes]) -> ScriptCall:
    return ScriptCall(scripts.COUNT, tuple(indexes), ())


def unpack(lengths: Iterable[int], blob: bytes) -> list[bytes | None]:
    """Return the strings of these lengths that follow each other; None for a negative length."""
    values: list[bytes | None] = []
    at = 0
    for length in lengths:
        end = at + length
        values.append(blob[at:end] if length >= 0 else None)
        at = max(at, end)
    return values
