"""The algorithm of the lock: acquire and wait, release, renew, reset, read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ..exceptions import LockBackendError
from . import events, scripts
from .clock import monotonic
from .driver.effects import Operation, ScriptCall, Subscribe, Unsubscribe, WaitForWakeup
from .driver.retry import with_retries
from .driver.script import Script
from .keys import LockKeys, held_keys, milliseconds, witness_key
from .lease import Lease
from .loss import note, notes_key
from .records import Held, new_id, parse

MAX_SLEEP = 30.0
"""Seconds after which a waiter looks again in any case; a queue lives four times as long."""


@dataclass(slots=True)
class AcquireRequest:
    """What an acquisition asks for."""

    lease: Lease
    record: bytes
    timeout: float | None
    given_id: bool
    """The id may be used again, by whoever knows it."""
    script: Script = scripts.ACQUIRE
    """What acquires, given what ACQUIRE is given, and `more_keys` and `more_args` after it."""
    more_keys: tuple[bytes, ...] = ()
    more_args: tuple[bytes, ...] = ()

    def call(self, channel: bytes, join: bool, ticket: bytes) -> ScriptCall:
        lease = self.lease
        args = (
            lease.id.encode(),
            milliseconds(lease.expire),
            lease.name.encode(),
            self.record,
            channel,
            b"1" if join else b"0",
            ticket,
            *self.more_args,
        )
        undo = None if self.given_id else partial(give_back, lease, channel)
        # What an id has released before is no answer to a release of this acquisition.
        receipts = (lease.keys.receipts,) if self.given_id else ()
        return ScriptCall(self.script, (*lease.keys[:4], *self.more_keys, *receipts), args, undo)


def acquire(claim: AcquireRequest, waiting: bool) -> Operation[bool]:
    """Acquire the lock within the claim's timeout; the lease begins when it is acquired.

    `waiting`: wake-ups arrive already, so that joining the queue with the first call costs nothing. Otherwise the first
    call only tries, and an uncontended lock needs no waiting room.
    """
    lease = claim.lease
    until = math.inf if claim.timeout is None else monotonic() + claim.timeout
    waiter: Any = None
    ticket = b""
    began = 0.0
    try:
        if waiting and claim.timeout != 0:
            waiter = yield Subscribe(lease.keys.lock, lease.id.encode())
        call = claim.call(waiter.channel if waiter is not None else b"", waiter is not None, ticket)
        while True:
            last = until < math.inf and monotonic() >= until
            if last and waiter is not None:
                call = claim.call(waiter.channel, False, ticket)
            sent, reply = yield from with_retries(lease.name, call, until, lease)
            if isinstance(reply, int):
                before = reply < 0 and claim.script is scripts.ACQUIRE  # START says something else by it
                lease.note_acquired(-reply if before else reply, sent)
                lease.shared = claim.given_id and before
                _tell_wait(lease, began, acquired=True)
                return True
            if last:
                _tell_wait(lease, began, acquired=False)
                return False
            if waiter is None:
                _, waiter = yield from with_retries(
                    lease.name, Subscribe(lease.keys.lock, lease.id.encode()), until, lease
                )
                call = claim.call(waiter.channel, True, ticket)
                continue
            left_ms, ticket, *first = reply
            began = began or monotonic()
            # Packed now: whoever is woken is in a hurry, and so is who waits for the release.
            call = claim.call(waiter.channel, True, ticket)
            if not claim.given_id:
                lease.farewell = lease.farewell or give_back(lease)
            yield sleep(waiter, until, left_ms, bool(first))
    except (LockBackendError, GeneratorExit):
        raise
    except BaseException:
        # Interrupted: whatever the server gave us so far (the lock, a reservation, a place in the queue) goes back.
        with suppress(RedisError):
            yield give_back(lease, waiter.channel if waiter is not None else b"").with_text()
        raise
    finally:
        if waiter is not None:
            yield Unsubscribe(waiter)


def _tell_wait(lease: Lease, began: float, acquired: bool) -> None:
    """Tell how long was waited, if there was a wait at all."""
    if began:
        seconds = monotonic() - began
        message = "Lock %r was waited for %.3f s (acquired: %s)."
        events.emit(
            "waited", message, lease.name, seconds, acquired, name=lease.name, seconds=seconds, acquired=acquired
        )


def sleep(waiter: Any, until: float, left_ms: int, first: bool = False) -> WaitForWakeup:
    """Return the sleep of a waiter whose lock has so many milliseconds left (negative: nobody knows).

    `first`: it sleeps no longer, even if others of its process wait for the same lock.
    """
    now = monotonic()
    look = now + (left_ms + 1) / 1000 if left_ms >= 0 else math.inf
    return WaitForWakeup(waiter, min(until, now + MAX_SLEEP, look if first else math.inf), look)


def give_back(lease: Lease, channel: bytes = b"") -> ScriptCall:
    """Return the call that releases the lease, or drops its claim on the queue of that channel."""
    id = lease.id.encode()
    keys = lease.keys
    fence = b"%d" % lease.fence if lease.fence else b""
    return ScriptCall(
        scripts.RELEASE,
        (keys.lock, keys.held, keys.queue, keys.receipts),
        (id, lease.name.encode(), channel, fence),
    )


def release(lease: Lease) -> Operation[bool]:
    """Release the lock; False when it was not the lease's any more."""
    # After the deadline the lock has ended by itself, so there is no sense in trying for longer.
    until = max(lease.deadline, monotonic())
    _, reply = yield from with_retries(lease.name, lease.farewell or give_back(lease), until, lease)
    return bool(reply)


def renew(lease: Lease) -> Operation[bool]:
    """Give the lease its life, a shorter one, too, where nobody else may believe in it; False when it is not held any more."""
    life = lease.expire
    until = max(lease.deadline, monotonic())
    sent, reply = yield from with_retries(
        lease.name, renewal([lease], shorten=bool(lease.fence) and not lease.shared), until, lease
    )
    if reply[0]:
        lease.renewed(sent, life)
    return bool(reply[0])


def renewal(leases: list[Lease], shorten: bool = False) -> ScriptCall:
    """Return the one call that renews all the leases; `shorten`: also one whose life in Redis is longer than it should be."""
    keys = [key for lease in leases for key in (lease.keys.lock, lease.keys.held)]
    args = [b"1" if shorten else b"0"]
    for lease in leases:
        args += (lease.value_prefix, milliseconds(lease.expire), lease.name.encode())
    return ScriptCall(scripts.RENEW, tuple(keys), tuple(args))


def reset(
    name: str, keys: LockKeys, fence: int | None, by: object = None, reason: str = "", until: float = math.inf
) -> Operation[int]:
    """Take the lock from its holder: 1 when freed, 0 when nobody held it, -1 when another acquisition than `fence` did."""
    args = (name.encode(), b"" if fence is None else b"%d" % fence, new_id().encode(), note(by, reason))
    of_lock = (keys.lock, keys.held, keys.queue, keys.receipts, notes_key(keys, name), witness_key(keys, name))
    call = ScriptCall(scripts.RESET, of_lock, args)
    _, reply = yield from with_retries(name, call, until)
    return int(reply)


def read(names: list[str], locks: list[LockKeys], until: float = math.inf) -> Operation[list[Held | None]]:
    """Read who holds the locks: None for each that nobody holds."""
    call = ScriptCall(scripts.READ, tuple(key for keys in locks for key in (keys.lock, keys.queue)), ())
    _, reply = yield from with_retries(names[0] if len(names) == 1 else "", call, until)
    now, packed, blob = reply
    numbers = list(map(int, packed.split()))
    each = zip(names, unpack(numbers[::3], blob), numbers[1::3], numbers[2::3], strict=True)
    return [parse(name, value, ttl_ms, waiting, now) for name, value, ttl_ms, waiting in each]


def names(prefix: str, until: float = math.inf) -> Operation[list[str]]:
    """Read the names of the locks held now, in no order."""
    keys = tuple(held_keys(prefix))
    found: set[bytes | None] = set()
    bucket, cursor = 1, b"0"
    while bucket:
        call = ScriptCall(scripts.NAMES, keys, (b"%d" % bucket, cursor))
        _, (bucket, cursor, lengths, blob) = yield from with_retries("", call, until)
        found.update(unpack(map(int, lengths.split()), blob))
    return [name.decode() for name in found if name is not None]


def count(prefix: str, until: float = math.inf) -> Operation[int]:
    """Count the locks held now."""
    _, reply = yield from with_retries("", ScriptCall(scripts.COUNT, tuple(held_keys(prefix)), ()), until)
    return int(reply)


def unpack(lengths: Iterable[int], blob: bytes) -> list[bytes | None]:
    """Return the strings of these lengths that follow each other; None for a negative length."""
    values: list[bytes | None] = []
    at = 0
    for length in lengths:
        end = at + length
        values.append(blob[at:end] if length >= 0 else None)
        at = max(at, end)
    return values
