"""One value between processes: the leader of one process obtains it. The algorithm, without I/O.

The process that computes a value holds a lease: the lock ``cache:<key>``, which is listed, renewed and force-released
like any other lock. Unlike the waiters for a lock, the waiters for a value need no turns: all of them are sent the
value at once.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...core.attempt import Attempt
from ...core.clock import monotonic
from ...core.driver.cluster.by_slot import is_crossing
from ...core.driver.effects import (
    Operation,
    Pipeline,
    Script,
    ScriptCall,
    Subscribe,
    with_retries,
)
from ...core.keys import another_id, milliseconds, record
from ...core.lease import Lease
from ...core.operations import release_call, wait_effect
from ...exceptions import LockBackendError
from .request import (
    MISSING,
    Acquirer,
    Answer,
    Outcome,
    ValueLease,
    ValueRequest,
    Verdict,
    is_forbidden,
    is_refusal,
    lease_keys,
    log_level,
    note_logged,
)
from .store import ComputeJob, compute, digest, failures_key, under_leases, witness_keys

LEASE = Script("lease", "index", "expiry", "take", home=__package__, granted=lambda reply: reply[0] == b"compute")

RESERVED = "refresh-"
"""Begins the owner id of a lease under which nobody computes yet, because it is kept for a Celery worker."""

PIECE = 262144
"""Bytes of a large value that are fetched by one command."""

MESSAGE_KINDS = {b"=": Verdict.VALUE, b"#": Verdict.LARGE, b"!": Verdict.FAILED}
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
    if request.is_own:
        answer = Answer(Verdict.OWN)
    else:
        answer = yield from lookup(request, lease, -math.inf if last else until, listening, old)
    try:
        match answer.verdict:
            case Verdict.VALUE:
                return Outcome(answer.data, answer.value, shared=True)
            case Verdict.FAILED:
                return Outcome(error=request.load_failure(request.key, answer.data), shared=True)
            case Verdict.PAUSED:
                return Outcome()
            case Verdict.WAIT if not last:
                return Outcome()
        job = ComputeJob(request, lease, answer)
        return (yield from under_leases([job], compute(job)))
    except BaseException:
        answer.give_up()
        raise


def lookup(
    request: ValueRequest, lease: ValueLease, until: float, listening: bool, old: bytes | None = None
) -> Operation[Answer]:
    """Return the answer of `request_lease`, with the value deserialized.

    The verdict is UNREACHABLE when the server cannot be reached and the request ignores errors, and FORBIDDEN when
    permissions are missing.
    """
    old_digest = b"" if old is None else digest(old)
    if is_forbidden(request.server):
        return Answer(Verdict.FORBIDDEN, old_digest=old_digest)
    if request.is_silent:
        request.counters.count("errors")
        return Answer(Verdict.UNREACHABLE, old_digest=old_digest)
    answer = None
    try:
        while True:
            answer = yield from request_lease(request, lease, old_digest, until, listening, old is not None)
            if answer.verdict is Verdict.LARGE:
                found = yield from _fetch_large(request, answer.data)
                if found is None:
                    continue
                answer = Answer(Verdict.VALUE, found)
            if answer.verdict is not Verdict.VALUE:
                return answer._replace(old_digest=old_digest)
            value = yield from request.decode(answer.data)
            if value is not MISSING:
                return answer._replace(value=value)
            old_digest = digest(answer.data)  # it is too old by the base class's own rule
    except LockBackendError as error:
        if moves_keys(request, lease, error):
            return (yield from lookup(request, lease, until, listening, old))
        verdict = yield from verdict_without_lease(request, error)
        return Answer(verdict, old_digest=old_digest)
    except BaseException:
        if answer is not None:
            answer.give_up()
        raise


def moves_keys(request: ValueRequest, lease: Lease, reply: Any) -> bool:
    """Give the lease its keys of cluster mode if an error shows that mode; return whether they are others."""
    keys = lease.keys
    if isinstance(reply, LockBackendError) and is_crossing(reply.__cause__, request.server):
        lease.keys = lease_keys(request.server, request.prefix, lease.name, request.key)
    return lease.keys != keys


def verdict_without_lease(request: ValueRequest, error: LockBackendError) -> Operation[Verdict]:
    """Return how the caller computes without a lease after this error; raise it if it may not."""
    request.counters.count("errors")
    if is_refusal(error, request.server):
        return Verdict.FORBIDDEN
    yield from request.forgive(error, None if request.through is None else request.through.read_failure)
    note_logged(request.server)
    return Verdict.UNREACHABLE


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
            _, (piece,) = yield from with_retries(request.name, Pipeline((command,)), math.inf, for_value=True)
            found += piece
            if not piece:
                break
        if digest(data := bytes(found)) == expected:  # otherwise another value was stored meanwhile
            return data
    _, (whole,) = yield from with_retries(request.name, Pipeline(((b"GET", key),)), math.inf, for_value=True)
    return whole  # type: ignore[no-any-return]


def request_lease(
    request: ValueRequest, lease: ValueLease, old_digest: bytes, until: float, listening: bool, has_old: bool = False
) -> Operation[Answer]:
    """Ask for the value or the lease, wait while another process computes, and return the answer."""
    attempt = Attempt(lease)
    inquiry = _Inquiry(request, attempt, old_digest, until, has_old)
    attempt.pending = True
    try:
        try:
            answer = yield from inquiry.run(listening)
        finally:
            if inquiry.waiter is not None:
                inquiry.waiter.leave()
        if answer.verdict is Verdict.COMPUTE:
            return answer._replace(attempt=attempt)
        attempt.pending = attempt.repeated
        if attempt.pending:
            attempt.give_up()
            lease.id = another_id(lease.id)  # the caller may ask again
        return answer
    except BaseException:  # also of a handler that raises while the waiter leaves: 20 points of it kept the lease
        attempt.give_up()
        raise


class _Inquiry:
    """The calls by which one caller asks for a value or its lease, and its place in the queue."""

    def __init__(self, request: ValueRequest, attempt: Attempt, old_digest: bytes, until: float, has_old: bool) -> None:
        self._request = request
        self._attempt = attempt
        self._lease: ValueLease = attempt.lease  # type: ignore[assignment]
        self._old_digest = old_digest
        self._until = until
        self._has_old = has_old
        self._waits_for = b""
        """The fence of the lease that the caller waited for last."""
        self._had_others = False
        """Whether it waited for the lease of another holder before."""
        self.waiter: Any = None
        self.is_last = False
        """Whether the time is over, so that the last reply counts."""

    @property
    def channel(self) -> bytes:
        """The channel of the waiter, b"" if there is none."""
        return b"" if self.waiter is None else self.waiter.channel

    def run(self, listening: bool) -> Operation[Answer]:
        """Ask, and wait while another process computes."""
        while True:
            reply = yield from self.ask(listening)
            if reply[0] != b"wait" or self.is_last:
                return (yield from self.answer(reply))
            if self.waiter is None:  # the next call joins the queue: a wake-up before it would have been missed
                listening = True
                continue
            message = yield from self.wait(reply)
            if message is not None:
                return Answer(MESSAGE_KINDS[message[:1]], message[1:])

    def ask(self, listening: bool) -> Operation[Any]:
        """Subscribe if the process listens, call the script, and return its reply."""
        lease = self._lease
        self.is_last = monotonic() >= self._until
        if listening and self.waiter is None and not self.is_last:
            _, self.waiter = yield from self._try(Subscribe(lease.keys.lock, lease.id.encode()))
            self._attempt.channel = self.channel
        join = self.waiter is not None and not self.is_last
        call = lease_call(self._request, self._attempt, self.channel, join, self._old_digest, self._has_old)
        sent, reply = yield from self._try(call, lease.expire)
        if reply[0] == b"compute":
            lease.note_acquired(int(reply[1]), sent)
        return reply

    def answer(self, reply: Any) -> Operation[Answer]:
        """Return what a reply means that is not to be waited for."""
        match reply[0]:
            case b"compute":
                return Answer(Verdict.COMPUTE, fence=reply[1], old_expires_at=reply[2])
            case b"wait":
                return Answer(Verdict.WAIT, fence=reply[1])
            case b"paused":
                return Answer(Verdict.PAUSED)
        if reply[2]:  # there is a value, and the lease is ours by a reservation or a lost reply
            yield from self._try(release_call(self._lease))
        return Answer(Verdict.LARGE) if reply[0] == b"large" else Answer(Verdict.VALUE, reply[1])

    def wait(self, reply: Any) -> Operation[bytes | None]:
        """Sleep until the holder of the lease sends a message, and return it; None: ask again."""
        request, lease = self._request, self._lease
        if not lease.waited:
            lease.waited = True
            request.counters.count("waited")
        self._had_others = self._had_others or self._waits_for not in (b"", reply[1])
        self._waits_for = reply[1]
        began = monotonic()
        message = yield wait_effect(self.waiter, self._until, reply[2], 0, *reply[3:])
        request.counters.count("seconds_waited", monotonic() - began)
        if message is not None and self._had_others:
            # The message may be an earlier holder's, and the place in the queue a later one's.
            yield from self.leave_queue()
        return message  # type: ignore[no-any-return]

    def leave_queue(self) -> Operation[None]:
        """Give up the place in the queue."""
        with suppress(LockBackendError):
            yield from self._try(release_call(self._lease, self.channel))

    def _try(self, effect: ScriptCall | Subscribe, within: float = math.inf) -> Operation[tuple[float, Any]]:
        request = self._request
        until = monotonic() if request.forgives else self._until
        level = log_level(request.server, request.forgives)
        return with_retries(request.name, effect, until, self._attempt, level, within, for_value=True)


def lease_call(
    request: ValueRequest,
    attempt: Attempt,
    channel: bytes = b"",
    join: bool = False,
    old_digest: bytes = b"",
    has_old: bool = False,
) -> ScriptCall:
    """Return the call that asks for the value or its lease."""
    lease = attempt.lease
    about = record("cache", "", request.renewal.expire, request.renewal.auto_renewal)
    holder = (lease.id.encode(), milliseconds(request.renewal.expire), lease.name.encode(), about)
    failures = (failures_key(lease),) if has_old else ()
    keys = (*lease.keys[:4], request.key.encode(), *witness_keys(lease), attempt.note, *failures)
    due = b"%d" % request.due_ms if has_old and request.due_ms else b""
    args = (*holder, channel, b"%d" % join, old_digest, b"%d" % has_old, due)
    return ScriptCall(LEASE, keys, args)


def reserve_refresh(request: ValueRequest, acquirer: Acquirer, old: bytes) -> Operation[ComputeJob | None]:
    """Acquire the lease to replace a stale value, for another process, which gets the owner id and computes.

    Returns None when another process holds the lease, or a refresh failed a moment ago. Where the server allows no
    leases, each process has its worker compute.
    """
    lease = request.lease(acquirer)
    answer = yield from lookup(request, lease, -math.inf, listening=False, old=old)
    if answer.attempt is not None:
        answer.attempt.pending = False
    is_ours = answer.verdict in (Verdict.COMPUTE, Verdict.FORBIDDEN)
    return ComputeJob(request, lease, answer) if is_ours else None


def end_reservation(request: ValueRequest) -> Operation[None]:
    """Release the lease if it is kept for a worker: for that of the request's id, or of a later message.

    In a queue that is longer than the lease, each message met the lease of a later one, and none was processed.
    """
    with suppress(LockBackendError):
        lock = request.lease(threading.current_thread()).keys.lock
        _, (value,) = yield from with_retries(request.name, Pipeline(((b"GET", lock),)), monotonic())
        holder = (value or b"").split(b"\n", 1)[0].decode(errors="replace")
        if holder == request.id or holder.startswith(RESERVED):
            yield from cancel_refresh(replace(request, id=holder))


def cancel_refresh(request: ValueRequest) -> Operation[None]:
    """Release the lease that `reserve_refresh` acquired."""
    lease = request.lease(threading.current_thread())
    with suppress(LockBackendError), Attempt(lease) as attempt:
        yield from with_retries(request.name, release_call(lease), monotonic())
        attempt.pending = False
