"""The computation under a lease, the storing of its value, and the invalidations that prevent it. Without I/O."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from redis.exceptions import ResponseError

from ...core import events
from ...core.clock import monotonic
from ...core.driver.cluster.by_slot import is_crossing
from ...core.driver.effects import (
    Invoke,
    Operation,
    Pipeline,
    Script,
    ScriptCall,
    T,
    with_retries,
    with_retries_each,
)
from ...core.driver.server import Server
from ...core.keys import LockKeys, held_keys, keys_in, lock_keys, witness_key
from ...core.listing import find_slot_locks
from ...core.operations import names, release_call, send_release
from ...core.validation import MAX_NAME
from ...core.watchdog import watchdog
from ...exceptions import LockBackendError, is_interruption
from .request import (
    KIND,
    MISSING,
    Answer,
    Outcome,
    ValueAttempt,
    ValueLease,
    ValueRequest,
    Verdict,
    computing,
    era_key,
    lease_keys,
    lease_name,
    log_level,
    note_logged,
)

SETTLE = Script("settle", "clock", "lib", "store", "counts", home=__package__)

LARGE = 524288
"""Bytes. A larger value is uploaded in pieces of this size and then moved into place: a command takes up twice the
size of its value in the server, and a script three times."""
UPLOAD_EXPIRY_MS = 60_000

SMALL = 32768
"""Bytes. A larger value that is not stored is uploaded for the waiters to fetch: it is not sent to each of them."""

ABSENT: Any = object()
"""Stands for the value of a key for which the function for many keys returned none."""


Encoded = tuple[bytes, int | None]
"""The bytes of a value, and their expiry in milliseconds (None: never; 0: it is not stored)."""


class ComputeJob:
    """A value that this process computes, and the answer that led to it."""

    __slots__ = ("answer", "attempt", "is_leader", "lease", "request")

    def __init__(self, request: ValueRequest, attempt: ValueAttempt, answer: Answer) -> None:
        self.request = request
        self.attempt = attempt
        self.answer = answer
        self.lease: ValueLease = attempt.lease
        """The lease, whether the caller has it or not."""
        self.is_leader = answer.verdict is Verdict.COMPUTE
        """Whether the value is computed for all callers."""

    @property
    def ends_lease(self) -> bool:
        """Whether the lease ends with the computation: in a forked child it is the parent's."""
        return self.is_leader and not self.lease.inherited_by_fork

    @property
    def fence(self) -> bytes:
        """The fence of the lease under which the value may be stored, b"" for none.

        A caller that does not wait any longer may store its value under the lease of the caller that still computes: a
        lease that stands proves that no invalidation happened meanwhile. A reservation (fence 0) proves nothing.
        """
        return b"" if self.answer.fence == b"0" else self.answer.fence


def under_leases(jobs: Sequence[ComputeJob], operation: Operation[T]) -> Operation[T]:
    """Run the operation, which computes the values of the jobs, while the watchdog renews their leases.

    If it is interrupted, the leases are released.
    """
    leading: list[ComputeJob] = []
    token = None
    try:  # from here on, because a lease that stays in the context is renewed, and makes each later call a nested one
        leading += [job for job in jobs if job.is_leader]
        token = computing.set((*computing.get(), *[job.lease for job in jobs]))
        for job in leading:
            if job.lease.waited:
                job.request.counters.count("taken_over")
            watchdog.add(job.lease, job.request.renewal.auto_renewal)
            job.attempt.pending = False
        return (yield from operation)
    except BaseException:
        for job in leading:
            watchdog.remove(job.lease)
            if not job.lease.ended:
                send_release(job.lease)
        raise
    finally:
        for job in jobs:
            job.lease.ended = True
        if token is not None:
            with suppress(ValueError):  # the generator is closed by another task than the one that ran it
                computing.reset(token)


def compute(job: ComputeJob) -> Operation[Outcome]:
    """Call the function of the request, and store the value that it returns."""
    value, error = yield Invoke(job.request.default)
    if error is None and inspect.iscoroutine(value):  # a task awaits what its default returns
        error = unawaited(value)
    (outcome,) = yield from finish([job], [value], error)
    return outcome


def unawaited(coroutine: Coroutine[Any, Any, Any]) -> TypeError:
    """Return the error of a default that returned a coroutine where none is awaited."""
    coroutine.close()  # or Python warns that nobody awaited it
    return TypeError(
        f"the default returned {coroutine!r}, which only the asynchronous method can await: use aget_or_set()"
    )


def finish(
    jobs: Sequence[ComputeJob],
    values: Sequence[Any],
    error: BaseException | None,
    encoded: Sequence[Encoded | Exception | None] | None = None,
) -> Operation[list[Outcome]]:
    """Store the values, or send the error to the waiters; the leases end. Returns the outcomes of the computations.

    `encoded`: the values are serialized already, or could not be.
    """
    outcomes: list[Outcome] = []
    calls: dict[int, ScriptCall] = {}
    released: list[ComputeJob] = []
    for number, job in enumerate(jobs):
        outcome, call = yield from _ending(job, values[number], error, encoded[number] if encoded else None)
        outcomes.append(outcome)
        if call is not None:
            calls[number] = call
        elif outcome.data is None and job.ends_lease:
            released.append(job)
    for job in jobs:
        watchdog.remove(job.lease)
    if released:
        yield from _release(released)
    if calls:
        request, lease = jobs[0].request, jobs[0].lease
        until = monotonic() + (0.0 if error is not None or request.forgives else lease.retry_for)
        replies = yield from _call_each([jobs[number] for number in calls], list(calls.values()), until)
        for number, reply in zip(calls, replies, strict=True):
            job, outcome = jobs[number], outcomes[number]
            if outcome.data is not None:
                stored = yield from _is_stored(job, values[number], outcome.data, reply)
                outcomes[number] = Outcome(outcome.data, outcome.value, shared=stored)
            elif isinstance(reply, LockBackendError):
                send_release(job.lease)
            job.lease.ended = True
    return outcomes


def _call_each(jobs: list[ComputeJob], calls: list[ScriptCall], until: float) -> Operation[list[Any]]:
    """Run one script for each job, and return the replies, a LockBackendError in place of each that did not come."""
    request, lease = jobs[0].request, jobs[0].lease
    level, leases = log_level(request.server, request.forgives), [job.lease for job in jobs]
    return with_retries_each(lease.name, calls, until, leases, level, for_value=True)


def _ending(
    job: ComputeJob, value: Any, error: BaseException | None, encoded: Encoded | Exception | None
) -> Operation[tuple[Outcome, ScriptCall | None]]:
    """Return the outcome of a computation, and the call that tells the server."""
    request, lease = job.request, job.lease
    data, expiry_ms, copy = b"", None, value
    if error is None and value is not ABSENT:
        request.counters.count("computed")
        try:
            if isinstance(encoded, Exception):
                raise encoded
            data, expiry_ms = (yield from _encode(job, value)) if encoded is None else encoded
            copy = yield from request.decode(data)
        except Exception as failure:
            error = failure
    if error is not None:
        request.counters.count("errors")
        outcome = Outcome(error=error, trace=error.__traceback__, shared=True)
        if job.ends_lease and not is_interruption(error):
            return outcome, _failure_call(job, error)
        return outcome, None
    if value is ABSENT:
        return Outcome(absent=True, shared=True), None
    outcome = Outcome(data, value if copy is MISSING else copy)
    verdict = job.answer.verdict
    if verdict is Verdict.FORBIDDEN and expiry_ms != 0:
        yield from _store_without_lease(job, data, expiry_ms)
    if verdict in (Verdict.FORBIDDEN, Verdict.UNREACHABLE):  # there is no lease; the followers here get the value
        return outcome._replace(shared=True), None
    if not job.fence or lease.inherited_by_fork:
        return outcome, None
    try:
        return outcome, (yield from _store_call(job, data, expiry_ms))
    except LockBackendError as failure:
        stored = yield from _is_stored(job, value, data, failure)
        return outcome._replace(shared=stored), None


async def call_in_thread(function: Callable[[], Any]) -> Any:
    """Call the function where `sync_to_async` does. When the caller is cancelled, that waits until the function ends.

    No thread can be interrupted: the caller's lease ended while its thread went on, and with clients that waited for
    two seconds six threads computed the same value.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    first: dict[str, bool] = {}
    """Whether the thread began before the caller was cancelled. Both ask by one operation of a dict."""

    def run() -> Any:
        if not first.setdefault("thread", True):
            return None
        try:
            return function()
        finally:
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(ended.set_result, None)

    try:
        return await sync_to_async(run)()
    except asyncio.CancelledError:
        if first.setdefault("thread", False):
            while not ended.done():
                with suppress(asyncio.CancelledError):  # a second cancellation must not end the wait either
                    await asyncio.wait([ended])
        raise


def _encode(job: ComputeJob, value: Any) -> Operation[Encoded]:
    """Return what `ValueRequest.encode` returns."""
    request = job.request
    if not encodes_in_thread(job):
        try:
            return request.encode(value)
        except request.not_in_loop:
            if not isinstance(job.lease.acquirer, asyncio.Task):
                raise
    return (yield from call_where_default_runs(partial(request.encode, value)))


def encodes_in_thread(job: ComputeJob) -> bool:
    """Whether a task has its thread serialize the value, because functions of the site take part."""
    return job.request.calls_site and isinstance(job.lease.acquirer, asyncio.Task)


def call_where_default_runs(function: Callable[[], T]) -> Operation[T]:
    """Call the function for a task where a plain default is called: over the same database connection."""
    value, error = yield Invoke(partial(call_in_thread, function))
    try:
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]
    finally:
        del error  # it refers to this frame: in a cycle it would keep the caller's lease


def _is_stored(job: ComputeJob, value: Any, data: bytes, reply: int | LockBackendError) -> Operation[bool]:
    """Whether the waiters have the value by this reply; so they do if it is an error that the request ignores."""
    request = job.request
    if not isinstance(reply, LockBackendError):
        if reply != 1:
            _log_reply(job, reply)
        return reply > 0
    request.counters.count("errors")
    through = request.through
    yield from request.forgive(reply, None if through is None else partial(through.write_failure, value))
    note_logged(request.server)
    if isinstance(reply.__cause__, ResponseError):  # the server answers, but stores nothing: full, or a replica
        try:
            call = yield from _store_call(job, data, 0)
            level = log_level(request.server, request.forgives)
            yield from with_retries(job.lease.name, call, monotonic(), job.lease, level, for_value=True)
        except LockBackendError:
            yield from _release([job])
    else:
        send_release(job.lease)
    return True


def _store_call(job: ComputeJob, data: bytes, expiry_ms: int | None) -> Operation[ScriptCall]:
    """Return the call that stores the value if the lease of the job's fence stands and there is no newer value, and
    wakes all waiters; upload a large value before.

    With an expiry of 0 the value is only sent to the waiters. The stale value that may be replaced is identified by its
    digest and its expiry.
    """
    lease = job.lease
    upload: tuple[bytes, ...] = ()
    if len(data) > (SMALL if expiry_ms == 0 else LARGE):
        upload = (lease.keys.held.removesuffix(b"held") + b"ready:" + lease.id.encode(),)
        yield from with_retries(lease.name, _upload(upload[0], data), monotonic() + lease.retry_for, for_value=True)
        data = b"%d %b" % (len(data), digest(data)) + (b" " + upload[0] if expiry_ms == 0 else b"")
    return _settle_call(job, b"" if expiry_ms is None else b"%d" % expiry_ms, data, *upload)


def _log_reply(job: ComputeJob, reply: int) -> None:
    """Count and log why a value was not stored, or why its lease ended early."""
    counters, lease = job.request.counters, job.lease
    late = bool(lease.fence) and lease.loss is not None and lease.loss.code in ("expired", "no_answer")
    if late and reply != 0:
        counters.count("lease_lost")
        events.log.warning(
            "The computation of %r took longer than its lease (expire, max_hold), so other processes may have computed "
            "the value, too. The value was %s. Set a longer expire or max_hold.",
            lease.name,
            "stored" if reply == 2 else "not stored, because it may have been invalidated meanwhile",
        )
    elif reply == 2:
        counters.count("lease_evicted")
        events.log.warning(
            "The server evicted the lease of %r, so other processes may have computed the value, too. The value was "
            "stored. The server evicts the keys with the shortest expiry first: set its maxmemory-policy to noeviction "
            "or allkeys-lru.",
            lease.name,
        )
    else:
        counters.count("fenced")
        reason = "a newer value is there" if reply == 0 else "it was invalidated meanwhile"
        events.log.info("The value computed for %r was not stored: %s.", lease.name, reason)


def _store_without_lease(job: ComputeJob, data: bytes, expiry_ms: int | None) -> Operation[None]:
    """Store the value as the base class does, on a server that refuses leases."""
    expiry = () if expiry_ms is None else (b"PX", b"%d" % expiry_ms)
    command = (b"SET", job.request.key.encode(), data, *expiry, *(() if job.answer.old_digest else (b"NX",)))
    try:
        yield from with_retries(job.lease.name, Pipeline((command,)), monotonic())
    except LockBackendError:
        if not job.request.ignore_errors:
            raise


def _settle_call(job: ComputeJob, expiry_ms: bytes, data: bytes, *upload: bytes) -> ScriptCall:
    request, lease, answer = job.request, job.lease, job.answer
    of_value = lease.of_value
    keys: tuple[bytes, ...] = (*lease.keys[:2], lease.keys.queue, *of_value[:4])
    if answer.old_digest or upload or request.due_ms:
        keys += (of_value.failures, *upload)
    name, leader = lease.name.encode(), b"%d" % job.is_leader
    return ScriptCall(
        SETTLE, keys, (job.fence, name, expiry_ms, answer.old_digest, answer.old_expires_at, data, leader)
    )


def _upload(key: bytes, data: bytes) -> Pipeline:
    """Return the commands that write the data in pieces: the last byte first, so that memory is allocated once."""
    end = len(data) - 1
    pieces = [(b"SETRANGE", key, b"%d" % at, data[at : at + LARGE]) for at in range(0, len(data), LARGE)]
    return Pipeline(((b"SETRANGE", key, b"%d" % end, data[end:]), (b"PEXPIRE", key, b"%d" % UPLOAD_EXPIRY_MS), *pieces))


def _failure_call(job: ComputeJob, error: BaseException | None) -> ScriptCall:
    """Return the call that sends the error to the waiters: otherwise they would fail one after another.

    Without an error they ask again. The next refresh of a stale value pauses in both cases.
    """
    data = b"" if error is None else job.request.dump_failure(job.request.key, error)  # type: ignore[arg-type]
    return _settle_call(job, b"!", data)


def settle_as_failed(job: ComputeJob) -> Operation[None]:
    """End the lease of a refresh that did not begin."""
    try:
        yield from with_retries(job.lease.name, _failure_call(job, None), monotonic())
    except LockBackendError:
        send_release(job.lease)


def _release(jobs: list[ComputeJob]) -> Operation[None]:
    """End leases without values: one of the waiters for each computes next."""
    replies = yield from _call_each(jobs, [release_call(job.lease) for job in jobs], monotonic())
    witnesses = []
    for job, reply in zip(jobs, replies, strict=True):
        if isinstance(reply, LockBackendError):
            send_release(job.lease)
        else:
            witnesses.append((b"UNLINK", job.lease.of_value.witness))
    if witnesses:
        with suppress(LockBackendError):
            yield from with_retries(jobs[0].lease.name, Pipeline(tuple(witnesses)), monotonic())


def digest(data: bytes) -> bytes:
    """Return the SHA-1 by which the scripts identify a stored value."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest().encode()


INVALIDATE = Script("invalidate", "handover", home=__package__)

BATCH = 250
"""Number of leases that one call ends at most, so that the server is not busy for long."""

NamedLease = tuple[str, LockKeys, tuple[bytes, ...]]
"""The name of a lease, its keys, and the key of its value, if that is known."""


def invalidate(
    server: Server, prefix: str, keys: list[str], level: int | None = None, *, delete: bool = False
) -> Operation[int]:
    """End the leases of the values, so that their running computations are not stored; return the number of leases.

    `delete`: delete the values in the same moment. `level` is the log level of the record when the server does not
    answer.
    """
    known = server.splits
    leases: list[NamedLease] = [
        (name, lease_keys(server, prefix, name, key), (key.encode(),)) for key in keys for name in [lease_name(key)]
    ]
    try:
        # The call names the values in any case, so that a server in cluster mode refuses it and is recognised.
        return (yield from _end_leases(server, leases, level, delete))
    except LockBackendError as error:
        if known or not is_crossing(error.__cause__, server):
            raise
    return (yield from invalidate(server, prefix, keys, level, delete=delete))


def _end_leases(
    server: Server, leases: list[NamedLease], level: int | None = None, delete: bool = False
) -> Operation[int]:
    ended = 0
    for start in range(0, len(leases), BATCH):
        batch = leases[start : start + BATCH]
        parts = [[lease] for lease in batch] if server.splits else [batch]
        calls = [_end_call(part, delete) for part in parts]
        replies = yield from with_retries_each(batch[0][0], calls, monotonic(), [server] * len(calls), level)
        for reply in replies:
            if isinstance(reply, LockBackendError):
                raise reply
            ended += reply
    return ended


def _end_call(leases: list[NamedLease], delete: bool) -> ScriptCall:
    keys = [key for _, each, _ in leases for key in (each.lock, each.held, each.queue, witness_key(each))]
    keys += [key for *_, value in leases for key in value]
    return ScriptCall(INVALIDATE, tuple(keys), (b"1" if delete else b"0", *(name.encode() for name, *_ in leases)))


def invalidate_pattern(server: Server, prefix: str, pattern: str) -> Operation[int]:
    """End the leases of the values whose keys match a pattern of Redis; return the number of leases."""
    return invalidate_matching(server, prefix, re.compile(glob_to_regex(pattern), re.DOTALL).fullmatch)


def invalidate_matching(server: Server, prefix: str, matches: Callable[[str], object]) -> Operation[int]:
    """End the leases of the values whose keys the function selects; return the number of leases."""
    known = server.splits
    try:
        if known:
            leases = yield from _void_slots(server, prefix)
        else:
            # The names of ended leases are not known, so all witnesses become void.
            eras = [held.removesuffix(b"held") + b"era" for held in held_keys(prefix)]
            yield from with_retries(prefix, Pipeline(((b"DEL", *eras),)), monotonic())
            found = yield from names(server, prefix, monotonic())
            leases = [(name, lock_keys(prefix, name), ()) for name in found]
    except LockBackendError as error:
        if known or not is_crossing(error.__cause__, server):
            raise
        return (yield from invalidate_matching(server, prefix, matches))
    # A long key is cut in the name of its lease, at most three bytes before the limit, so it may match.

    def wanted(name: str) -> bool:
        return name.startswith(KIND) and bool(len(name.encode()) > MAX_NAME - 4 or matches(name.removeprefix(KIND)))

    return (yield from _end_leases(server, [lease for lease in leases if wanted(lease[0])]))


def _void_slots(server: Server, prefix: str) -> Operation[list[NamedLease]]:
    """Find the leases of a server in cluster mode, and void all witnesses there."""
    found = yield from find_slot_locks(server, prefix)
    voided = tuple((b"DEL", era_key(keys_in(tag, ""))) for tag in found.tags)
    for start in range(0, len(voided), BATCH):
        yield from with_retries(prefix, Pipeline(voided[start : start + BATCH]), monotonic())
    return [(name, keys, ()) for name, keys in found.held]


def glob_to_regex(pattern: str) -> str:
    """Return a regular expression for the pattern of Redis; for ``[a-c]`` it matches any one character."""
    return _TOKEN.sub(lambda token: _REGEX.get(token[0][0]) or re.escape(token[1] or token[0]), pattern)


_TOKEN = re.compile(r"\\(.)|\[(?:\\.|[^]])*]?|.", re.DOTALL)
_REGEX = {"*": ".*", "?": ".", "[": "."}
