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
from ...core.operations import release_call, wait_effect
from ...core.records import RECALLED
from ...exceptions import LockBackendError
from .request import (
    MISSING,
    Acquirer,
    Answer,
    Caller,
    Mode,
    Outcome,
    ValueAttempt,
    ValueLease,
    ValueRequest,
    Verdict,
    is_forbidden,
    is_refusal,
    lease_keys,
    log_level,
    note_logged,
    value_keys,
)
from .store import ComputeJob, compute, digest, under_leases

LEASE = Script(
    *("lease", "clock", "index", "take_unwanted", "quick_lease", "lib", "expiry", "take"),
    home=__package__,
    granted=lambda reply: reply[0] == b"compute",
)

RESERVED = "refresh-"
"""Begins the owner id of a lease under which nobody computes yet, because it is kept for a Celery worker."""

PIECE = 262144
"""Bytes of a large value that are fetched by one command."""

MESSAGE_KINDS = {b"=": Verdict.VALUE, b"#": Verdict.LARGE, b"!": Verdict.FAILED}
"""The first byte of a message of settle.lua, and the verdict that it means."""


def obtain(request: ValueRequest, caller: Caller, mode: Mode) -> Operation[Outcome]:
    """Ask Redis for a value, wait while another process computes it, or compute it here and store it.

    The outcome is empty when the time is over, or when a refresh failed a moment ago. Raises LockBackendError.
    """
    attempt = ValueAttempt(request.lease(caller.acquirer))
    try:
        answer = yield from ask(request, attempt, mode, caller.room.open)
        if answer.verdict is Verdict.VALUE:
            return Outcome(answer.data, answer.value, shared=True)
        if answer.verdict is Verdict.FAILED:
            return Outcome(error=request.load_failure(request.key, answer.data), shared=True)
        if answer.verdict is Verdict.PAUSED or (answer.verdict is Verdict.WAIT and not mode.alone):
            return Outcome()
        job = ComputeJob(request, attempt, answer)
        return (yield from under_leases([job], compute(job)))
    finally:  # after an interruption, too: a handler that raised while the waiter left kept the lease
        attempt.give_up()


def ask(request: ValueRequest, attempt: ValueAttempt, mode: Mode, listening: bool = False) -> Operation[Answer]:
    """Ask for the value or its lease, wait while another process computes it, and return the answer, with the value
    deserialized. `listening`: the process is subscribed already.

    The verdict is UNREACHABLE when the server cannot be reached and the request ignores errors, and FORBIDDEN when
    permissions are missing. The attempt stays pending while there is something to be given back.
    """
    old_digest = b"" if mode.old is None else digest(mode.old)
    if request.is_own:
        return Answer(Verdict.OWN)
    if is_forbidden(request.server):
        return Answer(Verdict.FORBIDDEN, old_digest=old_digest)
    if request.is_silent:
        request.counters.count("errors")
        return Answer(Verdict.UNREACHABLE, old_digest=old_digest)
    while True:
        try:
            answer = yield from _ask_and_wait(request, attempt, mode, listening, old_digest)
            if answer.verdict is not Verdict.COMPUTE and attempt.pending:
                attempt.give_up()
                attempt.lease.id = another_id(attempt.lease.id)  # the caller may ask again
            if answer.verdict is Verdict.LARGE:
                found = yield from _fetch_large(request, answer.data)
                if found is None:
                    continue
                answer = Answer(Verdict.VALUE, found)
            if answer.verdict is not Verdict.VALUE:
                return answer._replace(old_digest=old_digest) if old_digest else answer
            value = yield from request.decode(answer.data)
            if value is not MISSING:
                return answer._replace(value=value)
            old_digest = digest(answer.data)  # it is too old by the base class's own rule
        except LockBackendError as error:
            attempt.give_up()
            if not moves_keys(request, attempt.lease, error):
                return Answer((yield from verdict_without_lease(request, error)), old_digest=old_digest)


def _ask_and_wait(
    request: ValueRequest, attempt: ValueAttempt, mode: Mode, listening: bool, old_digest: bytes
) -> Operation[Answer]:
    """Ask, and while another process computes, wait for its message and ask again."""
    lease, waiter = attempt.lease, None
    until = -math.inf if mode.alone else mode.until
    level = log_level(request.server, request.forgives)

    def send(effect: ScriptCall | Subscribe, within: float = math.inf) -> Operation[tuple[float, Any]]:
        give_up = monotonic() if request.forgives else until
        return with_retries(request.name, effect, give_up, attempt, level, within, for_value=True)

    waits_for, had_others = b"", False
    began, answered = 0.0, False
    attempt.pending, attempt.channel = True, b""
    try:
        while True:
            is_last = monotonic() >= until
            if listening and waiter is None and not is_last:
                _, waiter = yield from send(Subscribe(lease.keys.lock, lease.id.encode()))
                attempt.channel = waiter.channel
            join = waiter is not None and not is_last
            call = lease_call(request, attempt, join, old_digest, mode.old is not None)
            sent, reply = yield from send(call, lease.expire)
            answer = answer_of(reply)
            if answer.verdict is Verdict.COMPUTE:
                lease.note_acquired(int(answer.fence), sent)
                answered = True
                return answer
            if answer.verdict is not Verdict.WAIT or is_last:
                answered = answer.verdict is not Verdict.WAIT
                attempt.pending = attempt.repeated or holds_lease(reply)
                return answer
            if waiter is None:  # the next call joins the queue: a wake-up before it would have been missed
                listening = True
                continue
            had_others = had_others or waits_for not in (b"", answer.fence)
            waits_for = answer.fence
            if not lease.waited:
                lease.waited = True
                request.counters.count("waited")
            began = began or monotonic()
            message = yield wait_effect(waiter, until, reply[2], *reply[3:])
            if message is not None:  # of the holder; else it is asked again
                answered = True
                if had_others:  # the message may be an earlier holder's, and the place in the queue a later one's
                    with suppress(LockBackendError):
                        yield from send(release_call(lease, waiter.channel))
                attempt.pending = attempt.repeated
                return Answer(MESSAGE_KINDS[message[:1]], message[1:])
    finally:
        if waiter is not None:
            waiter.leave()
        request.report_wait(began, answered)


def answer_of(reply: Any) -> Answer:
    """Return what the reply of the lease's script means."""
    match reply[0]:
        case b"compute":
            return Answer(Verdict.COMPUTE, fence=reply[1], old_expires_at=reply[2])
        case b"wait":
            return Answer(Verdict.WAIT, fence=reply[1])
        case b"paused":
            return Answer(Verdict.PAUSED)
        case b"large":
            return Answer(Verdict.LARGE)
    return Answer(Verdict.VALUE, reply[1])


def holds_lease(reply: Any) -> bool:
    """Whether the caller has the lease beside a value: by a reservation, or by a lost reply."""
    return reply[0] in (b"value", b"large") and reply[2] == 1


def moves_keys(request: ValueRequest, lease: ValueLease, reply: Any) -> bool:
    """Give the lease its keys of cluster mode if an error shows that mode; return whether they are others."""
    keys = lease.keys
    if isinstance(reply, LockBackendError) and is_crossing(reply.__cause__, request.server):
        lease.keys = lease_keys(request.server, request.prefix, lease.name, request.key)
        lease.of_value = value_keys(lease.keys, request.key)
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


def lease_call(
    request: ValueRequest, attempt: ValueAttempt, join: bool = False, old_digest: bytes = b"", has_old: bool = False
) -> ScriptCall:
    """Return the call that asks for the value or its lease; `join`: it joins the queue."""
    lease, keys = attempt.lease, attempt.lease.of_value
    about = record("cache", "", request.renewal.expire, request.renewal.auto_renewal)
    holder = (lease.id.encode(), milliseconds(request.renewal.expire), lease.name.encode(), about)
    failures = (keys.failures,) if has_old else ()
    due = b"%d" % request.due_ms if has_old and request.due_ms else b""
    return ScriptCall(
        LEASE,
        (*lease.keys[:4], keys.value, keys.witness, keys.era, attempt.note, *failures),
        (*holder, attempt.channel, b"%d" % join, old_digest, b"%d" % has_old, due),
    )


def reserve_refresh(request: ValueRequest, acquirer: Acquirer, old: bytes) -> Operation[ComputeJob | None]:
    """Acquire the lease to replace a stale value, for another process, which gets the owner id and computes.

    Returns None when another process holds the lease, or a refresh failed a moment ago. Where the server allows no
    leases, each process has its worker compute.
    """
    attempt = ValueAttempt(request.lease(acquirer))
    try:
        answer = yield from ask(request, attempt, Mode(-math.inf, old=old))
        attempt.pending = False
        is_ours = answer.verdict in (Verdict.COMPUTE, Verdict.FORBIDDEN)
        return ComputeJob(request, attempt, answer) if is_ours else None
    finally:
        attempt.give_up()


def end_reservation(request: ValueRequest) -> Operation[None]:
    """Release the lease if it is kept for a worker: for that of the request's id, or of a later message.

    In a queue that is longer than the lease, each message met the lease of a later one, and none was processed.
    """
    with suppress(LockBackendError):
        lock = request.lease(threading.current_thread()).keys.lock
        _, (value,) = yield from with_retries(request.name, Pipeline(((b"GET", lock),)), monotonic())
        holder = (value or b"").split(b"\n", 1)[0].decode(errors="replace").removeprefix(RECALLED)
        if holder == request.id or holder.startswith(RESERVED):
            yield from cancel_refresh(replace(request, id=holder))


def cancel_refresh(request: ValueRequest) -> Operation[None]:
    """Release the lease that `reserve_refresh` acquired."""
    lease = request.lease(threading.current_thread())
    with suppress(LockBackendError), Attempt(lease) as attempt:
        yield from with_retries(request.name, release_call(lease), monotonic())
        attempt.pending = False
