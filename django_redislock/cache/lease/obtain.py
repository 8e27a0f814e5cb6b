"""One value between processes: the leader of one process obtains it. The algorithm, without I/O.

The process that computes a value holds a lease: the lock ``cache:<key>``, which is listed, renewed and force-released
like any other lock. Unlike the waiters for a lock, the waiters for a value need no turns: all of them are sent the
value at once.

Computations may wait for each other in a circle, over all servers. The record of a lease names the leases that its
computation waits for. A caller that is about to wait writes this first, and then reads on from lease to lease. If it
finds a lease under which it computes itself, the others wait for it, so it computes without waiting. Of several callers
that close a circle at once, the last writer sees the names of all others. All of them may see the circle, though one
that does not wait is enough. So each of them but the one with the first lease takes its name back, and looks again
after a pause: then the circle is there only if nobody else has opened it.
"""

from __future__ import annotations

import json
import math
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ...core.clock import monotonic
from ...core.driver.by_slot import is_crossing
from ...core.driver.effects import Operation, Pipeline, RunAt, ScriptCall, Sleep, Subscribe, Unsubscribe
from ...core.driver.registry import living_servers
from ...core.driver.retry import with_retries, with_retries_each
from ...core.driver.script import Script
from ...core.driver.server import Server
from ...core.keys import milliseconds, record
from ...core.operations import release_call, wait_effect
from ...exceptions import LockBackendError
from .request import (
    MISSING,
    Acquirer,
    Outcome,
    ValueLease,
    ValueRequest,
    enclosing_leases,
    is_forbidden,
    is_refusal,
    lease_keys,
    log_level,
    note_logged,
)
from .store import ComputeJob, compute, digest, failures_key, under_leases, witness_keys

LEASE = Script("lease", "index", "expiry", "take", home=__package__)

PIECE = 262144
"""Bytes of a large value that are fetched by one command."""

MESSAGE_KINDS = {b"=": b"value", b"#": b"large", b"!": b"failed"}
"""The first byte of a message of settle.lua, and the verdict that it means."""


def get_or_compute(
    request: ValueRequest,
    acquirer: Acquirer,
    until: float,
    listening: bool,
    last: bool = False,
    old: bytes | None = None,
) -> Operation[Outcome]:
    """Get the value as stored, or from the process that computes it, or by computing it here.

    Waits until the time `until` on the monotonic clock. `last`: does not wait; if another caller holds the lease,
    computes for this caller only, and stores the value only while that lease stands. `listening`: the process is
    subscribed already. `old` is a stale value that is to be replaced. Raises LockBackendError.
    """
    lease = request.lease(acquirer)
    verdict, reply, old_digest, value = yield from lookup(request, lease, -math.inf if last else until, listening, old)
    yield from end_wait(lease)
    if verdict == b"value":
        return Outcome(reply, value, shared=True)
    if verdict == b"failed":
        return Outcome(error=request.load_failure(reply), shared=True)
    if verdict == b"wait" and (not last or (old is not None and not reply)):
        return Outcome()
    job = ComputeJob(request, lease, verdict, reply, old_digest)
    return (yield from under_leases([job], compute(job)))


def lookup(
    request: ValueRequest, lease: ValueLease, until: float, listening: bool, old: bytes | None = None
) -> Operation[tuple[bytes, bytes, bytes, Any]]:
    """Return the verdict and reply of `request_lease`, the digest of the stale value to replace, and the value.

    The verdict is b"unreachable" when the server cannot be reached and the request ignores errors, and b"forbidden"
    when permissions are missing.
    """
    old_digest = b"" if old is None else digest(old)
    if is_forbidden(request.server):
        return b"forbidden", b"", old_digest, MISSING
    try:
        while True:
            verdict, reply = yield from request_lease(request, lease, old_digest, until, listening, old is not None)
            if verdict == b"large":
                found = yield from _fetch_large(request, reply)
                if found is None:
                    continue
                verdict, reply = b"value", found
            if verdict != b"value":
                return verdict, reply, old_digest, MISSING
            value = yield from request.decode(reply)
            if value is not MISSING:
                return verdict, reply, old_digest, value
            old_digest = digest(reply)
    except LockBackendError as error:
        keys = lease.keys
        if is_crossing(error.__cause__, request.server):
            lease.keys = lease_keys(request.server, request.prefix, lease.name, request.key)
            if lease.keys != keys:
                return (yield from lookup(request, lease, until, listening, old))
        request.counters.count("errors")
        if is_refusal(error, request.server):
            return b"forbidden", b"", old_digest, MISSING
        if not request.ignore_errors:
            raise
        note_logged(request.server)
        return b"unreachable", b"", old_digest, MISSING


def _fetch_large(request: ValueRequest, message: bytes) -> Operation[bytes | None]:
    """Fetch a large value.

    A message with its length and digest allows to fetch it in pieces; otherwise the server copies it as a whole for
    each waiter.
    """
    key = request.key.encode()
    if message:
        length, expected, *elsewhere = message.split(b" ", 2)
        if elsewhere:  # the value is not stored under its own key
            key = elsewhere[0]
        found = bytearray()
        while len(found) < int(length):
            command = (b"GETRANGE", key, b"%d" % len(found), b"%d" % (len(found) + PIECE - 1))
            _, (piece,) = yield from with_retries(request.name, Pipeline((command,)), math.inf)
            found += piece
            if not piece:
                break
        if digest(data := bytes(found)) == expected:  # otherwise another value was stored meanwhile
            return data
    _, (whole,) = yield from with_retries(request.name, Pipeline(((b"GET", key),)), math.inf)
    return whole  # type: ignore[no-any-return]


def request_lease(
    request: ValueRequest, lease: ValueLease, old_digest: bytes, until: float, listening: bool, has_old: bool = False
) -> Operation[tuple[bytes, bytes]]:
    """Ask for the value or the lease, wait while another process computes, and return a verdict and its reply.

    b"value": the value. b"large": the message about a large value, or b"". b"compute": the fence of the acquired
    lease, and the expiry of the stale value. b"wait": the fence of the lease that another caller holds, or b"" when a
    computation failed a moment ago and the caller has a stale value. b"failed": the serialized error of the
    computation. b"cycle": b"", because the holder of the lease waits for the caller.
    """
    keys, id, name = lease.keys, lease.id.encode(), lease.name
    about = record("cache", "", request.expire, request.auto_renewal)
    optional_keys = (failures_key(lease),) if has_old else ()
    nested = bool(enclosing_leases())
    waiter: Any = None
    reply: Any = None
    holders: set[bytes] = set()
    circle: bool | None = None
    looked_at = b""

    def call(channel: bytes, join: bool) -> ScriptCall:
        return ScriptCall(
            LEASE,
            (*keys[:4], request.key.encode(), *witness_keys(lease), *optional_keys),
            (
                *(id, milliseconds(request.expire), name.encode(), about, channel, b"%d" % join),
                *(old_digest, b"%d" % has_old, b"%d" % request.due_ms if has_old and request.due_ms else b""),
            ),
            undo=partial(release_call, lease, channel),
        )

    try:
        while True:
            last = monotonic() >= until
            patience = monotonic() if request.ignore_errors else until
            level = log_level(request.server, request.ignore_errors)
            if listening and waiter is None and not last:
                _, waiter = yield from with_retries(name, Subscribe(keys.lock, id), patience, request.server, level)
            if reply is None or last:
                effect = call(b"" if waiter is None else waiter.channel, join=waiter is not None and not last)
                sent, reply = yield from with_retries(name, effect, patience, request.server, level)
            if reply[0] == b"paused":
                return b"wait", b""
            if reply[0] == b"compute":
                lease.note_acquired(int(reply[1]), sent)
                return b"compute", b" ".join(reply[1:3])
            if reply[0] in (b"value", b"large") and reply[2]:  # the lease is ours by a reservation or a lost reply
                yield from with_retries(name, release_call(lease), patience, lease, level)
            if reply[0] == b"large":
                return b"large", b""
            if reply[0] == b"wait" and not last:
                if waiter is None:
                    listening, reply = True, None
                    continue
                if nested and reply[1] != looked_at:
                    circle = yield from closes_circle(lease, reply[1])
                    looked_at = b"" if circle is None else reply[1]
                if circle:
                    with suppress(LockBackendError):
                        yield from with_retries(name, release_call(lease, waiter.channel), patience, lease, level)
                    return b"cycle", b""
                if not lease.waited:
                    lease.waited = True
                    request.counters.count("waited")
                holders.add(reply[1])
                began = monotonic()
                message = yield wait_effect(waiter, until, reply[2], 0, *reply[3:])
                request.counters.count("seconds_waited", monotonic() - began)
                if message is None:
                    reply = None
                    continue
                if len(holders) > 1:  # the message may be an earlier holder's, and the place in the queue a later one's
                    with suppress(LockBackendError):
                        yield from with_retries(name, release_call(lease, waiter.channel), patience, lease, level)
                return MESSAGE_KINDS[message[:1]], message[1:]
            return reply[0], reply[1]
    except LockBackendError:
        raise
    except GeneratorExit:
        waiter = None  # nothing can be yielded any more, and the driver undoes the call
        raise
    except BaseException:  # interrupted: give back the lease, or the place in the queue
        with suppress(RedisError):
            yield release_call(lease, b"" if waiter is None else waiter.channel).with_text()
        raise
    finally:
        if waiter is not None:
            yield Unsubscribe(waiter)


def reserve_refresh(request: ValueRequest, acquirer: Acquirer, old: bytes) -> Operation[ComputeJob | None]:
    """Acquire the lease to replace a stale value, for another process, which gets the owner id and computes.

    Returns None when another process holds the lease, or a refresh failed a moment ago.
    """
    lease = request.lease(acquirer)
    verdict, reply, old_digest, _ = yield from lookup(request, lease, -math.inf, listening=False, old=old)
    return ComputeJob(request, lease, verdict, reply, old_digest) if verdict == b"compute" else None


def cancel_refresh(request: ValueRequest) -> Operation[None]:
    """Release the lease that `reserve_refresh` acquired."""
    with suppress(LockBackendError):
        yield from with_retries(request.name, release_call(request.lease(threading.current_thread())), monotonic())


NEEDS = Script("needs", home=__package__)

LONGEST_CHAIN = 100
"""Number of leases that one caller reads at most before it waits."""

CIRCLE_PAUSE = 0.1
"""Seconds between the second looks of two callers of one circle: longer than a caller takes to open it."""

Place = tuple[Server | None, bytes, str]
"""A lease: its server (None: unknown to this process), the key of its lock, and its fence."""


def closes_circle(wanted: ValueLease, fence: bytes) -> Operation[bool | None]:
    """Write that the caller's computations wait for the wanted lease, and return whether its holder waits for them.

    `fence` is the fence of the lease's holder. Returns None when a server on the way did not answer: look again. After
    any other answer do not: two callers computed without waiting, because one looked again as it polled, and met the
    other's second look. A lease on a server that this process does not know counts as one that waits for none.
    """
    own = enclosing_leases()
    target = wanted.server, wanted.keys.lock, fence.decode()
    if _is_one_of(own, *target):
        return True
    rank = yield from _look_for_circle(own, wanted, target)
    if rank is not None and rank > 0:
        yield from end_wait(wanted)
        yield Sleep(rank * CIRCLE_PAUSE)
        rank = yield from _look_for_circle(own, wanted, target)
    return None if rank is None else rank >= 0


def _look_for_circle(own: list[ValueLease], wanted: ValueLease, target: Place) -> Operation[int | None]:
    """Write that the caller's leases wait for the target, and then follow the names from there."""
    yield from _name_wait(own, wanted, target)
    return (yield from _rank_in_circle(own, wanted.name, target))


def _name_wait(own: list[ValueLease], wanted: ValueLease, target: Place) -> Operation[None]:
    for lease in own:
        at = "" if lease.server.place == wanted.server.place else label(wanted.server.place)
        lease.needs[wanted.id] = [at, target[1].decode(), target[2]]
    yield from _write_needs(own)


def _rank_in_circle(own: list[ValueLease], name: str, target: Place) -> Operation[int | None]:
    """Follow the names from the target.

    If they lead to one of the caller's leases, return how many leases on the way come before it in the order of their
    locks. If not, return -1, or None when a server did not answer.
    """
    none: int | None = -1
    ahead = [target]
    seen: set[tuple[bytes, str]] = set()
    while ahead and len(seen) < LONGEST_CHAIN:
        server, lock, fence = ahead.pop()
        if _is_one_of(own, server, lock, fence):
            return sum(other < (lock, fence) for other in seen)
        if server is not None and (lock, fence) not in seen:
            seen.add((lock, fence))
            try:
                _, (value,) = yield RunAt(server, with_retries(name, Pipeline(((b"GET", lock),)), monotonic()))
                ahead += _needs_in(value, server)
            except LockBackendError:
                none = None
    return none


def end_wait(wanted: ValueLease) -> Operation[None]:
    """Write that the caller's computations no longer wait for the lease, if they did."""
    waited = [lease for lease in enclosing_leases() if lease.needs.pop(wanted.id, None)]
    if waited:
        yield from _write_needs(waited)


def _write_needs(leases: list[ValueLease]) -> Operation[None]:
    """Write into the records of leases what their computations wait for."""
    by_server: dict[Server, list[ScriptCall]] = {}
    for lease in leases:
        needs = json.dumps(list(lease.needs.values()), separators=(",", ":")).encode() if lease.needs else b""
        call = ScriptCall(NEEDS, (lease.keys.lock,), (lease.value_prefix + b"\n", needs))
        by_server.setdefault(lease.server, []).append(call)
    for server, calls in by_server.items():
        yield RunAt(server, with_retries_each(leases[0].name, calls, monotonic(), server))


def _needs_in(value: bytes | None, server: Server) -> list[Place]:
    """Return the leases that the holder of a lease on this server waits for."""
    try:
        _, fence, _, record = (value or b"").split(b"\n", 3)
        needs = json.loads(record).get("needs", ()) if fence != b"0" else ()  # 0: nobody computes yet
    except ValueError:
        return []
    return [(_server_at(place) if place else server, lock.encode(), number) for place, lock, number in needs]


def _is_one_of(own: list[ValueLease], server: Server | None, lock: bytes, fence: str) -> bool:
    """Whether it is one of the caller's leases. Another host may name their server otherwise, but knows the fence."""
    return any(
        lease.keys.lock == lock
        and ((server is not None and lease.server.place == server.place) or str(lease.fence) == fence)
        for lease in own
    )


def _server_at(wanted: str) -> Server | None:
    return next((server for server in living_servers() if label(server.place) == wanted), None)


def label(place: Any) -> str:
    """Return the place of a server as text, the same in all processes that are given the same address."""
    if isinstance(place, frozenset):
        return ",".join(sorted(map(label, place)))
    return "/".join(map(label, place)) if isinstance(place, tuple) else str(place)
