"""A value that is computed once for all who want it: the protocol, written once and without I/O.

Who computes a value holds a lease: the lock ``cache:<key>``, so that it is listed, renewed and force-released as any other.
Unlike other waiters, those who wait for a value need no turn: it is sent to all of them at once when it is there.
"""

from __future__ import annotations

import hashlib
import math
import time
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ..exceptions import LockBackendError
from . import events
from .keys import lock_keys, milliseconds
from .owner import record
from .protocol import Call, Compute, Join, Leave, Steps, attempt, give_back, sleep
from .scripts import Script
from .wanted import MISSING, Landing, Owner, ValueLease, Wanted, computing, lease_name, outer
from .watchdog import watchdog

LEASE = Script("lease")
SETTLE = Script("settle")
INVALIDATE = Script("invalidate")

BATCH = 1000
"""Leases ended in one call at most, so that the server is not kept busy for long."""


def fly(want: Wanted, owner: Owner, until: float, listening: bool, last: bool = False) -> Steps[Landing]:
    """Get the value: as stored, or from whoever computes it, or by computing it.

    Waits until this time on the monotonic clock; `last`: not at all, and who is not to compute for all does so for itself.
    `listening`: wake-ups arrive already. Raises LockBackendError.
    """
    lease = want.lease(owner)
    replaced = b""
    try:
        while True:
            verdict, told = yield from _seek(want, lease, replaced, -math.inf if last else until, listening)
            if verdict != b"value":
                break
            value = want.unpack(told)
            if value is not MISSING:
                return Landing(told, value, shared=True)
            replaced = hashlib.sha1(told, usedforsecurity=False).hexdigest().encode()
    except LockBackendError:
        if not want.forgiving:
            raise
        verdict, told = b"unreachable", b""
    if verdict == b"wait" and not last:
        return Landing()
    return (yield from _compute(want, lease, verdict, told, replaced))


def _seek(
    want: Wanted, lease: ValueLease, replaced: bytes, until: float, listening: bool
) -> Steps[tuple[bytes, bytes]]:
    """Return b"value" and it, b"compute" and the fence, b"wait" and the fence of who computes still, or b"cycle" and b""."""
    keys, id, name = lease.keys, lease.id.encode(), lease.name
    about = record("cache", "", want.expire, want.auto_renewal)
    inside = [other.encode() for other in outer(want.server)]
    waiter: Any = None
    try:
        if listening and until > time.monotonic():
            waiter = yield Join(keys.lock, id)
        while True:
            last = time.monotonic() >= until
            channel = b"" if waiter is None else waiter.channel
            join = b"1" if waiter is not None and not last else b"0"
            call = Call(
                LEASE,
                (*keys[:4], want.key.encode(), _waits(want.prefix)),
                (id, milliseconds(want.expire), name.encode(), about, channel, join, replaced, *inside),
                undo=partial(give_back, lease, channel),
            )
            patience = time.monotonic() if want.forgiving else until
            sent, reply = yield from attempt(name, call, patience)
            if reply[0] == b"cycle":
                return b"cycle", b""
            if reply[0] == b"compute":
                lease.begin(int(reply[1]), sent)
            elif reply[0] == b"wait" and not last:
                if waiter is None:
                    _, waiter = yield from attempt(name, Join(keys.lock, id), patience)
                    continue
                word = yield sleep(waiter, until, reply[2])
                if word is None:
                    continue
                return b"value", word
            return reply[0], reply[1]
    except LockBackendError:
        raise
    except BaseException:  # interrupted: the lease or the place in the queue goes back
        with suppress(RedisError):
            yield give_back(lease, b"" if waiter is None else waiter.channel)
        raise
    finally:
        if waiter is not None:
            yield Leave(waiter)


def _compute(want: Wanted, lease: ValueLease, verdict: bytes, told: bytes, replaced: bytes) -> Steps[Landing]:
    mine = verdict == b"compute"
    # Who does not wait any longer may settle for whoever computes still: a lease that stands proves that nothing was
    # invalidated meanwhile. A reservation (fence 0) proves nothing.
    fence = told if told != b"0" else b""
    token = computing.set((*computing.get(), lease)) if mine else None
    if mine and want.auto_renewal:
        watchdog.add(lease)
    try:
        value, error = yield Compute(want.default)
        if error is None:
            try:
                data, life = want.pack(value)
                copy = want.unpack(data)
            except Exception as failure:
                error = failure
        watchdog.remove(lease)
        if error is not None:
            if mine and not lease.foreign:
                yield from _abandon(lease)
            return Landing(error=error, trace=error.__traceback__, shared=True)
        landing = Landing(data, value if copy is MISSING else copy, shared=verdict == b"unreachable")
        if not fence or lease.foreign:
            return landing
        try:
            stored = yield from _settle(want, lease, fence, data, life, replaced)
        except LockBackendError:
            if not want.forgiving:
                raise
            return landing._replace(shared=True)
        return landing._replace(shared=stored)
    except BaseException:
        watchdog.remove(lease)
        if mine and not lease.foreign:
            with suppress(RedisError):
                yield give_back(lease)
        raise
    finally:
        lease.ended = True
        if token is not None:
            computing.reset(token)


def _settle(
    want: Wanted, lease: ValueLease, fence: bytes, data: bytes, life: int | None, replaced: bytes
) -> Steps[bool]:
    """Store the value if the lease of that fence stands and nothing newer is there; wake everybody."""
    keys = lease.keys
    call = Call(
        SETTLE,
        (keys.lock, keys.held, keys.queue, want.key.encode(), _waits(want.prefix)),
        (fence, lease.name.encode(), b"" if life is None else b"%d" % life, replaced, data),
    )
    now = time.monotonic()
    _, reply = yield from attempt(lease.name, call, now if want.forgiving else now + lease.retry_for)
    if reply == 0:
        events.log.info("What was computed for %r was not stored: a newer value is there.", lease.name)
    elif reply == -1 and lease.fence and time.monotonic() >= lease.deadline:
        events.log.warning(
            "What was computed for %r was not stored: it took longer than the right to compute lasts (expire, max_hold).",
            lease.name,
        )
    elif reply == -1:
        events.log.info("What was computed for %r was not stored: it was invalidated meanwhile.", lease.name)
    return bool(reply == 1)


def _abandon(lease: ValueLease) -> Steps[None]:
    """End the lease without a value: one of those who wait computes next."""
    with suppress(LockBackendError):
        yield from attempt(lease.name, give_back(lease), time.monotonic())


def invalidate(prefix: str, keys: list[str]) -> Steps[int]:
    """End the leases of the values, so that what is being computed is not stored, and return how many there were."""
    ended = 0
    for start in range(0, len(keys), BATCH):
        names = [lease_name(key) for key in keys[start : start + BATCH]]
        locks = [lock_keys(prefix, name) for name in names]
        call = Call(
            INVALIDATE,
            tuple(key for lock in locks for key in (lock.lock, lock.held, lock.queue)),
            tuple(name.encode() for name in names),
        )
        _, reply = yield from attempt(names[0], call, time.monotonic())
        ended += reply
    return ended


def _waits(prefix: str) -> bytes:
    return b"{%s}:waits" % prefix.encode()
