"""A value that is computed once for all who want it: the protocol, written once and without I/O.

Who computes a value holds a lease: the lock ``cache:<key>``, so that it is listed, renewed and force-released as any other.
Unlike other waiters, those who wait for a value need no turn: it is sent to all of them at once when it is there.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import ClusterCrossSlotError, NoPermissionError, RedisError

from ...core.clock import monotonic
from ...core.driver.effects import (
    Operation,
    Pipeline,
    ScriptCall,
    Sleep,
    Subscribe,
    Unsubscribe,
)
from ...core.driver.interleave import together
from ...core.driver.retry import with_retries
from ...core.driver.script import Script
from ...core.driver.server import Server
from ...core.driver.wakeups import LOOK_EVERY
from ...core.keys import milliseconds
from ...core.operations import release_call, wait_effect
from ...core.records import record
from ...exceptions import LockBackendError
from .cluster_slots import is_crossing, lease_keys
from .request import (
    MISSING,
    Outcome,
    Owner,
    ValueLease,
    ValueRequest,
    is_forbidden,
    is_refusal,
    lease_name,
    level_of,
    note_told,
    outer,
)
from .store import ABSENT, ComputeJob, compute, digest, failures, waits, witness

LEASE = Script("lease", "index", "take", home=__package__)

PIECE = 262144
"""Bytes of a large value that are fetched at once."""

WORDS = {b"=": b"value", b"#": b"large", b"!": b"failed"}
"""What settle.lua sends to those who wait."""

_without_channels: weakref.WeakSet[Server] = weakref.WeakSet()
"""Servers whose user may not subscribe: who waits there looks from time to time."""


def fly(
    want: ValueRequest, owner: Owner, until: float, listening: bool, last: bool = False, old: bytes | None = None
) -> Operation[Outcome]:
    """Get the value: as stored, or from whoever computes it, or by computing it.

    Waits until this time on the monotonic clock; `last`: not at all, and who is not to compute for all does so for itself.
    `listening`: wake-ups arrive already. `old` is a value that is there and to be replaced. Raises LockBackendError.
    """
    lease = want.lease(owner)
    verdict, told, replaced, value = yield from look(want, lease, -math.inf if last else until, listening, old)
    if verdict == b"value":
        return Outcome(told, value, shared=True)
    if verdict == b"failed":
        return Outcome(error=want.unpack_failure(told), shared=True)
    if verdict == b"wait" and (not last or (old is not None and not told)):
        return Outcome()
    (landing,) = yield from compute([ComputeJob(want, lease, verdict, told, replaced)], want.default)
    return landing


def look(
    want: ValueRequest, lease: ValueLease, until: float, listening: bool, old: bytes | None = None
) -> Operation[tuple[bytes, bytes, bytes, Any]]:
    """Return a verdict as `_seek` does, the digest of the old value that is to be replaced, and the value if there is one.

    Where Redis may be missing, the verdict is b"unreachable" then; b"forbidden" where permissions are.
    """
    replaced = b"" if old is None else digest(old)
    if is_forbidden(want.server):
        return b"forbidden", b"", replaced, MISSING
    try:
        while True:
            verdict, told = yield from _seek(want, lease, replaced, until, listening, old is not None)
            if verdict == b"large":
                found = yield from _fetch(want, told)
                if found is None:
                    continue
                verdict, told = b"value", found
            if verdict != b"value":
                return verdict, told, replaced, MISSING
            value = want.unpack(told)
            if value is not MISSING:
                return verdict, told, replaced, value
            replaced = digest(told)
    except LockBackendError as error:
        keys = lease.keys
        if is_crossing(error, want.server):
            lease.keys = lease_keys(want.server, want.prefix, lease.name, want.key)
            if lease.keys != keys:
                return (yield from look(want, lease, until, listening, old))
        want.tally.count("errors")
        if is_refusal(error, want.server):
            return b"forbidden", b"", replaced, MISSING
        if not want.forgiving:
            raise
        note_told(want.server)
        return b"unreachable", b"", replaced, MISSING


def _fetch(want: ValueRequest, told: bytes) -> Operation[bytes | None]:
    """Get a large value: in pieces, if its length and digest are told, or the server would copy it for each who waits."""
    key = want.key.encode()
    if told:
        length, expected, *elsewhere = told.split(b" ", 2)
        if elsewhere:  # it is stored nowhere else
            key = elsewhere[0]
        found = bytearray()
        while len(found) < int(length):
            command = (b"GETRANGE", key, b"%d" % len(found), b"%d" % (len(found) + PIECE - 1))
            _, (piece,) = yield from with_retries(want.name, Pipeline((command,)), math.inf)
            found += piece
            if not piece:
                break
        if digest(data := bytes(found)) == expected:  # else another value came while this one was read
            return data
    _, (whole,) = yield from with_retries(want.name, Pipeline(((b"GET", key),)), math.inf)
    return whole  # type: ignore[no-any-return]


def _seek(
    want: ValueRequest, lease: ValueLease, replaced: bytes, until: float, listening: bool, has_old: bool = False
) -> Operation[tuple[bytes, bytes]]:
    """Return b"value" and it, b"compute" and the fence, b"wait" and the fence of who computes still (b"": nobody does, because
    who did so a moment ago failed, and the caller has an old value), b"cycle" and b"",
    b"large" and by what to know the value, if that was told, or b"failed" and how who computed it for all failed."""
    keys, id, name = lease.keys, lease.id.encode(), lease.name
    about = record("cache", "", want.expire, want.auto_renewal)
    above = outer(want.server)
    inside = [other.name.encode() for other in above]
    for other in above:
        other.has_waited = True
    others = (waits(want, lease), failures(lease)) if inside or has_old else ()
    waiter: Any = None
    reply: Any = None
    asked = b""
    look_after = 0.02

    def ask(channel: bytes, join: bool = True) -> ScriptCall:
        nonlocal asked
        asked = channel
        return ScriptCall(
            LEASE,
            (*keys[:4], want.key.encode(), *witness(lease), *others),
            (
                *(
                    id,
                    milliseconds(want.expire),
                    name.encode(),
                    about,
                    channel,
                    b"%d" % join,
                    replaced,
                    b"%d" % has_old,
                ),
                *inside,
            ),
            undo=partial(release_call, lease, channel),
        )

    try:
        if listening and until > monotonic():
            waiter = yield Subscribe(keys.lock, id)
        while True:
            last = monotonic() >= until
            patience = monotonic() if want.forgiving else until
            level = level_of(want.server, want.forgiving)
            if reply is None or last:
                call = ask(b"" if waiter is None else waiter.channel, join=waiter is not None and not last)
                sent, reply = yield from with_retries(name, call, patience, want.server, level)
            if reply[0] == b"cycle":
                return b"cycle", b""
            if reply[0] == b"paused":
                return b"wait", b""
            if reply[0] == b"compute":
                lease.note_acquired(int(reply[1]), sent)
                return b"compute", b" ".join(reply[1:3])
            if reply[0] in (b"value", b"large") and reply[2]:  # by a reservation or a lost reply
                yield from with_retries(name, release_call(lease), patience, lease, level)
            if reply[0] == b"large":
                return b"large", b""
            if reply[0] == b"wait" and not last:
                if waiter is None and want.server not in _without_channels:
                    try:
                        sent, waiter = yield from with_retries(
                            name, Subscribe(keys.lock, id, ask), patience, want.server, level
                        )
                        reply = waiter.said
                        continue
                    except LockBackendError as error:
                        if not isinstance(error.__cause__, NoPermissionError):
                            raise
                        _without_channels.add(want.server)
                if not lease.waited:
                    lease.waited = True
                    want.tally.count("waited")
                began = monotonic()
                if waiter is None:
                    yield Sleep(max(0.0, min(look_after, until - began)))
                    want.tally.count("seconds_waited", monotonic() - began)
                    reply, look_after = None, min(2 * look_after, LOOK_EVERY)
                    continue
                word = yield wait_effect(waiter, until, reply[2])
                want.tally.count("seconds_waited", monotonic() - began)
                if word is None:
                    reply = None
                    continue
                return WORDS[word[:1]], word[1:]
            return reply[0], reply[1]
    except LockBackendError:
        raise
    except BaseException:  # interrupted: the lease or the place in the queue goes back
        with suppress(RedisError):
            yield release_call(lease, asked if waiter is None else waiter.channel)
        raise
    finally:
        if waiter is not None:
            yield Unsubscribe(waiter)


def take(want: ValueRequest, owner: Owner, old: bytes) -> Operation[bool]:
    """Take the right to replace an old value for whom the id of the lease is given to; False when another one has it."""
    verdict, *_ = yield from look(want, want.lease(owner), -math.inf, listening=False, old=old)
    return verdict == b"compute"


def give_up(want: ValueRequest) -> Operation[None]:
    """End that right."""
    with suppress(LockBackendError):
        yield from with_retries(want.name, release_call(want.lease(threading.current_thread())), monotonic())


def fly_together(
    wants: list[ValueRequest],
    owner: Owner,
    default: Callable[[list[Any]], Any],
    until: float,
    landed: Callable[[ValueRequest, Outcome], None],
    last: bool = False,
) -> Operation[None]:
    """Get many values: those that nobody computes are computed here, together; then the caller waits for the others.

    `landed` gets each landing as soon as there is one. It gets none of a value that another caller still computes at
    `until`, and none of the rest after a failure. `last`: the caller does not wait, and computes these values, too.
    `default` takes the keys in the caller's form, and returns a dict of their values. Raises LockBackendError.
    """
    leases = [want.lease(owner) for want in wants]
    found: dict[int, tuple[bytes, bytes, bytes, Any]] = {}

    def take_in() -> Operation[bool]:
        """Compute the values that this caller has the right to; False after a failure."""
        tickets: list[ComputeJob] = []
        failed = False
        for number in sorted(found):
            verdict, told, replaced, value = found.pop(number)
            want = wants[number]
            if verdict == b"value":
                landed(want, Outcome(told, value, shared=True))
            elif verdict == b"failed":
                failed = True
                landed(want, Outcome(error=want.unpack_failure(told), shared=True))
            elif verdict != b"wait" or last:
                tickets.append(ComputeJob(want, leases[number], verdict, told, replaced))
        if tickets:
            asked = [ticket.want for ticket in tickets]

            def values_of(found: Any) -> list[Any]:
                if not isinstance(found, Mapping):
                    raise TypeError(f"the default of many keys must return a dict, not {type(found).__name__}")
                return [found.get(want.asked_as, ABSENT) for want in asked]

            made = yield from compute(tickets, lambda: default([want.asked_as for want in asked]), values_of)
            for want, landing in zip(asked, made, strict=True):
                failed = failed or landing.error is not None
                landed(want, landing)
        return not failed

    try:
        looks = [look(want, lease, until, listening=False) for want, lease in zip(wants, leases, strict=True)]
        yield from together(looks, found, take_in)
        yield from take_in()
    except BaseException:
        for number in found:
            with suppress(RedisError):
                yield release_call(leases[number])
        raise


def peek_many(keys: list[str]) -> Operation[list[bytes | None]]:
    """Read many values."""
    name, raw = lease_name(keys[0]), [key.encode() for key in keys]
    try:
        _, replies = yield from with_retries(name, Pipeline(((b"MGET", *raw),)), monotonic())
        return list(replies[0])
    except LockBackendError as error:
        if not isinstance(error.__cause__, ClusterCrossSlotError):
            raise
    _, replies = yield from with_retries(name, Pipeline(tuple((b"GET", key) for key in raw)), monotonic())
    return list(replies)


def peek(key: str, with_life: bool) -> Operation[tuple[bytes | None, int]]:
    """Read a value, and how many milliseconds it has left (-1: it stays; -2: unknown, or it has just ended)."""
    commands = ((b"GET", key.encode()),) + (((b"PTTL", key.encode()),) if with_life else ())
    _, replies = yield from with_retries(lease_name(key), Pipeline(commands), monotonic())
    return replies[0], replies[1] if with_life else -2
