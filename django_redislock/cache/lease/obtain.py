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
from dataclasses import replace
from typing import Any

from redis.exceptions import TimeoutError

from ...core.attempt import Attempt
from ...core.clock import monotonic
from ...core.driver.cluster.by_slot import is_crossing
from ...core.driver.effects import (
    Operation,
    Pipeline,
    RunAt,
    Script,
    ScriptCall,
    Sleep,
    Subscribe,
    with_retries,
    with_retries_each,
)
from ...core.driver.registry import living_servers
from ...core.driver.server import Server
from ...core.driver.wakeups import POLL_INTERVAL
from ...core.keys import another_id, milliseconds, record
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
    enclosing_leases,
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
    answer = yield from lookup(request, lease, -math.inf if last else until, listening, old)
    try:
        yield from end_wait(lease)
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
        if _moves_keys(request, lease, error):
            return (yield from lookup(request, lease, until, listening, old))
        verdict = yield from _verdict_without_lease(request, error)
        return Answer(verdict, old_digest=old_digest)
    except BaseException:
        if answer is not None:
            answer.give_up()
        raise


def _moves_keys(request: ValueRequest, lease: ValueLease, error: LockBackendError) -> bool:
    """Give the lease its keys of cluster mode if the error shows that mode; return whether they are others."""
    keys = lease.keys
    if is_crossing(error.__cause__, request.server):
        lease.keys = lease_keys(request.server, request.prefix, lease.name, request.key)
    return lease.keys != keys


def _verdict_without_lease(request: ValueRequest, error: LockBackendError) -> Operation[Verdict]:
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
        attempt.pending = attempt.repeated or answer.verdict is Verdict.CYCLE
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
        self._nested = bool(enclosing_leases())
        self._in_circle: bool | None = None
        self._looked_at = b""
        """The fence of the holder that was asked for whom it waits."""
        self._look_again = math.inf
        """When it is asked again."""
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
            if (yield from self.is_in_circle(reply[1])):
                return Answer(Verdict.CYCLE)
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
        call = self._call(self.channel, self.waiter is not None and not self.is_last)
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

    def is_in_circle(self, fence: bytes) -> Operation[bool]:
        """Whether the holder of the lease with this fence waits for the caller; looked at rarely for each holder."""
        if self._nested and (fence != self._looked_at or monotonic() >= self._look_again):
            self._in_circle = yield from closes_circle(self._lease, fence)
            self._looked_at = fence
            self._look_again = monotonic() + (POLL_INTERVAL if self._in_circle is None else LOOK_AGAIN)
        return bool(self._in_circle)

    def wait(self, reply: Any) -> Operation[bytes | None]:
        """Sleep until the holder of the lease sends a message, and return it; None: ask again."""
        request, lease = self._request, self._lease
        if not lease.waited:
            lease.waited = True
            request.counters.count("waited")
        self._had_others = self._had_others or self._waits_for not in (b"", reply[1])
        self._waits_for = reply[1]
        began = monotonic()
        message = yield wait_effect(self.waiter, min(self._until, self._look_again), reply[2], *reply[3:])
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

    def _call(self, channel: bytes, join: bool) -> ScriptCall:
        request, lease = self._request, self._lease
        about = record("cache", "", request.renewal.expire, request.renewal.auto_renewal)
        holder = (lease.id.encode(), milliseconds(request.renewal.expire), lease.name.encode(), about)
        failures = (failures_key(lease),) if self._has_old else ()
        keys = (*lease.keys[:4], request.key.encode(), *witness_keys(lease), self._attempt.note, *failures)
        due = b"%d" % request.due_ms if self._has_old and request.due_ms else b""
        args = (*holder, channel, b"%d" % join, self._old_digest, b"%d" % self._has_old, due)
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


NEEDS = Script("needs", home=__package__)

LONGEST_CHAIN = 100
"""Number of leases that one caller reads at most before it waits."""

LOOK_AGAIN = 10.0
"""Seconds until a caller that waits looks again: a failover may have lost what the others wrote, or what it wrote."""

CIRCLE_PAUSE = 0.1
"""Seconds between the second looks of two callers of one circle: longer than a caller takes to open it."""

Place = tuple[Server | None, bytes, str]
"""A lease: its server (None: unknown to this process), the key of its lock, and its fence."""


def closes_circle(wanted: ValueLease, fence: bytes) -> Operation[bool | None]:
    """Write that the caller's computations wait for the wanted lease, and return whether its holder waits for them.

    `fence` is the fence of the lease's holder. Returns None when a server on the way did not answer: look again soon.
    After any other answer do not: two callers computed without waiting, because one looked again as it polled, and met
    the other's second look. A lease on a server that this process does not know counts as one that waits for none.
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
    """Write that the caller's leases wait for the target, and then follow the names from there.

    Two callers of a circle whose writes were both lost did not see each other, and waited until their time was over
    (seed 43001985 of the simulation).
    """
    written = yield from _name_wait(own, wanted, target)
    rank = yield from _rank_in_circle(own, wanted.name, target)
    return rank if written or rank != -1 else None


def _name_wait(own: list[ValueLease], wanted: ValueLease, target: Place) -> Operation[bool]:
    for lease in own:
        at = "" if lease.server.place == wanted.server.place else label(wanted.server.place)
        lease.needs[wanted.id] = [at, target[1].decode(), target[2]]
    return (yield from _write_needs(own))


def _rank_in_circle(own: list[ValueLease], name: str, target: Place) -> Operation[int | None]:
    """Follow the names from the target.

    If they lead to one of the caller's leases, return how many leases on the way come before it in the order of their
    locks. If not, return -1, or None when a server did not answer.
    """
    ahead = [target]
    seen: set[tuple[bytes, str]] = set()
    unanswered: set[tuple[bytes, str]] = set()
    while ahead and len(seen) < LONGEST_CHAIN:
        server, lock, fence = ahead.pop()
        if _is_one_of(own, server, lock, fence):
            return sum(other < (lock, fence) for other in seen)
        if server is not None and (lock, fence) not in seen:
            try:
                _, (value,) = yield RunAt(server, with_retries(name, Pipeline(((b"GET", lock),)), monotonic()))
                seen.add((lock, fence))
                ahead += _needs_in(value, server)
            # A client whose connections have no counterpart for asyncio: a TypeError. Another one may be asked.
            except (LockBackendError, TypeError) as error:
                unanswered.add((lock, fence))
                if isinstance(error.__cause__, TimeoutError):  # each other client of that server would wait, too
                    ahead = [place for place in ahead if place[1:] != (lock, fence)]
    return None if unanswered - seen else -1


def end_wait(wanted: ValueLease) -> Operation[None]:
    """Write that the caller's computations no longer wait for the lease, if they did."""
    waited = [lease for lease in enclosing_leases() if lease.needs.pop(wanted.id, None)]
    if waited:
        yield from _write_needs(waited)


def _write_needs(leases: list[ValueLease]) -> Operation[bool]:
    """Write into the records of leases what their computations wait for; return whether each server answered."""
    written = True
    by_server: dict[Server, list[ScriptCall]] = {}
    for lease in leases:
        needs = json.dumps(list(lease.needs.values()), separators=(",", ":")).encode() if lease.needs else b""
        call = ScriptCall(NEEDS, (lease.keys.lock,), (lease.value_prefix + b"\n", needs))
        by_server.setdefault(lease.server, []).append(call)
    for server, calls in by_server.items():
        replies = yield RunAt(server, with_retries_each(leases[0].name, calls, monotonic(), server))
        written = written and not any(isinstance(reply, LockBackendError) for reply in replies)
    return written


def _needs_in(value: bytes | None, server: Server) -> list[Place]:
    """Return the leases that the holder of a lease on this server waits for."""
    try:
        _, fence, _, record = (value or b"").split(b"\n", 3)
        needs = json.loads(record).get("needs", ()) if fence != b"0" else ()  # 0: nobody computes yet
    except ValueError:
        return []
    return [
        (at, lock.encode(), number)
        for place, lock, number in needs
        for at in (_servers_at(place) if place else [server])
    ]


def _is_one_of(own: list[ValueLease], server: Server | None, lock: bytes, fence: str) -> bool:
    """Whether it is one of the caller's leases. Another host may name their server otherwise, but knows the fence."""
    return any(
        lease.keys.lock == lock
        and ((server is not None and lease.server.place == server.place) or str(lease.fence) == fence)
        for lease in own
    )


def _servers_at(wanted: str) -> list[Server | None]:
    """Return the servers at this place, of which the first one that answers counts.

    A server is known once for each user and set of options, and one of them may be refused, or be for threads only:
    with the first one alone, a circle of three was open only when the next caller looked again, after ten seconds.
    """
    return [server for server in living_servers() if label(server.place) == wanted] or [None]


def label(place: Any) -> str:
    """Return the place of a server as text, the same in all processes that are given the same address."""
    if isinstance(place, frozenset):
        return ",".join(sorted(map(label, place)))
    return "/".join(map(label, place)) if isinstance(place, tuple) else str(place)
