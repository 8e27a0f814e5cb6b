"""From the right to compute values to the values in Redis: the protocol, without I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis.exceptions import RedisError, ResponseError

from ...core import events
from ...core.clock import monotonic
from ...core.driver.effects import Invoke, Operation, Pipeline, ScriptCall
from ...core.driver.interleave import together
from ...core.driver.retry import with_retries
from ...core.driver.script import Script
from ...core.keys import witness_key
from ...core.operations import release_call
from ...core.watchdog import watchdog
from ...exceptions import LockBackendError
from .cluster_slots import is_clustered
from .request import (
    MISSING,
    Outcome,
    ValueLease,
    ValueRequest,
    computing,
    era_key,
    is_interruption,
    level_of,
    note_told,
)

SETTLE = Script("settle", "counts", home=__package__)

LARGE = 524288
"""Bytes. A larger value is put ready in pieces of this size, and then moved into place: in one piece it would take up twice
its size in the server, and in a script three times."""
READY_FOR = 60_000
"""Milliseconds for which it stays there at most."""

SMALL = 32768
"""Bytes. A larger value that is only told is put ready for those who wait: it is not sent to each."""

ABSENT: Any = object()
"""In place of a value that was asked for together with others, and did not come."""


class ComputeJob(NamedTuple):
    """A value that is to be computed, and what Redis said to that."""

    want: ValueRequest
    lease: ValueLease
    verdict: bytes
    told: bytes
    replaced: bytes
    """The digest of the old value, b"" without."""

    @property
    def mine(self) -> bool:
        """Whether it is computed for all."""
        return self.verdict == b"compute"

    @property
    def fence(self) -> bytes:
        """Of the lease under which it may be stored, b"" for none.

        A caller that does not wait any longer may settle under the lease of the caller that still computes: a lease
        that stands proves that nothing was invalidated meanwhile. A reservation (fence 0) proves nothing.
        """
        fence = self._parts[0]
        return b"" if fence == b"0" else fence

    @property
    def ends(self) -> bytes:
        """When the old value ends."""
        return self._parts[1]

    @property
    def _parts(self) -> list[bytes]:
        return [*self.told.split(b" ", 1), b""]


def compute(
    tickets: Sequence[ComputeJob],
    function: Callable[[], Any],
    values_of: Callable[[Any], list[Any]] = lambda value: [value],
) -> Operation[list[Outcome]]:
    """Call the function once, store what it returns, and return how it went; `values_of` takes that apart, one a ticket."""
    mine = [ticket for ticket in tickets if ticket.mine]
    token = computing.set((*computing.get(), *[ticket.lease for ticket in mine])) if mine else None
    for want, lease, *_ in mine:
        if lease.waited:
            want.tally.count("taken_over")
        watchdog.add(lease, want.auto_renewal)
    try:
        result, error = yield Invoke(function)
        values = [ABSENT] * len(tickets)
        if error is None:
            try:
                values = values_of(result)
            except Exception as failure:
                error = failure
        landings: dict[int, Outcome] = {}
        each = [_land(ticket, value, error) for ticket, value in zip(tickets, values, strict=True)]
        yield from together(each, landings)
        return [landings[number] for number in range(len(each))]
    except BaseException:
        for _, lease, *_ in mine:
            watchdog.remove(lease)
            if not lease.inherited_by_fork and not lease.ended:
                with suppress(RedisError):
                    yield release_call(lease)
        raise
    finally:
        for _, lease, *_ in tickets:
            lease.ended = True
        if token is not None:
            with suppress(ValueError):  # the generator is closed by another task than the one that ran it
                computing.reset(token)


def _land(ticket: ComputeJob, value: Any, error: BaseException | None) -> Operation[Outcome]:
    want, lease, verdict, _, _ = ticket
    tally = want.tally
    if error is None and value is not ABSENT:
        tally.count("computed")
        try:
            data, life = want.pack(value)
            copy = want.unpack(data)
            if want.should_cache is not None and not want.should_cache(value):
                life = 0
        except Exception as failure:
            error = failure
    watchdog.remove(lease)
    if error is not None or value is ABSENT:
        if error is not None:
            tally.count("errors")
        if ticket.mine and not lease.inherited_by_fork:
            if error is None or is_interruption(error):
                yield from _abandon(ticket)
            else:
                yield from _tell_failure(ticket, error)
        lease.ended = True
        if error is None:
            return Outcome(absent=True)
        return Outcome(error=error, trace=error.__traceback__, shared=True)
    landing = Outcome(data, value if copy is MISSING else copy, shared=verdict in (b"unreachable", b"forbidden"))
    if verdict == b"forbidden" and life != 0:
        yield from _store_plainly(ticket, data, life)
    if not ticket.fence or lease.inherited_by_fork:
        return landing
    try:
        stored = yield from _settle(ticket, data, life)
    except LockBackendError as failure:
        tally.count("errors")
        if not want.forgiving:
            raise
        note_told(want.server)
        stored = True
        if isinstance(failure.__cause__, ResponseError):  # it is there, but does not store: it is full, or a replica
            try:
                yield from _settle(ticket, data, 0)
            except LockBackendError:
                yield from _abandon(ticket)
    lease.ended = True
    return landing._replace(shared=stored)


def _settle(ticket: ComputeJob, data: bytes, life: int | None) -> Operation[bool]:
    """Store the value if the lease of that fence stands and nothing newer is there; wake everybody.

    With a life of 0 it is only told to those who wait. What it replaces is known by its digest and by when it ends.
    """
    want, lease = ticket.want, ticket.lease
    keys = lease.keys
    ready: tuple[bytes, ...] = ()
    if len(data) > (SMALL if life == 0 else LARGE):
        ready = (keys.held.removesuffix(b"held") + b"ready:" + lease.id.encode(),)
        yield from with_retries(lease.name, _pieces(ready[0], data), monotonic() + lease.retry_for)
        data = b"%d %b" % (len(data), digest(data)) + (b" " + ready[0] if life == 0 else b"")
    call = _settlement(ticket, b"" if life is None else b"%d" % life, data, *ready)
    now = monotonic()
    level = level_of(want.server, want.forgiving)
    _, reply = yield from with_retries(lease.name, call, now if want.forgiving else now + lease.retry_for, lease, level)
    if reply != 1:
        _tell(ticket, reply)
    return bool(reply > 0)


def _tell(ticket: ComputeJob, reply: int) -> None:
    """Count and log why a value was not stored, or why its lease ended early."""
    want, lease = ticket.want, ticket.lease
    late = bool(lease.fence) and lease.loss is not None and lease.loss.code in ("expired", "no_answer")
    if late and reply != 0:
        want.tally.count("lease_lost")
        events.log.warning(
            "The computation of %r took longer than the right to compute lasts (expire, max_hold), so other processes "
            "may have computed the value, too. The value was %s. Give a longer expire or max_hold.",
            lease.name,
            "stored" if reply == 2 else "not stored, because it may have been invalidated meanwhile",
        )
    elif reply == 2:
        want.tally.count("lease_evicted")
        events.log.warning(
            "The server evicted the right to compute %r, so other processes may have computed the value, too. The "
            "value was stored. The server evicts the keys with the shortest life first: set its maxmemory-policy to "
            "noeviction or allkeys-lru.",
            lease.name,
        )
    else:
        want.tally.count("fenced")
        why = "a newer value is there" if reply == 0 else "it was invalidated meanwhile"
        events.log.info("The value computed for %r was not stored: %s.", lease.name, why)


def _store_plainly(ticket: ComputeJob, data: bytes, life: int | None) -> Operation[None]:
    """Store the value as the base class does, where there are no leases."""
    expiry = () if life is None else (b"PX", b"%d" % life)
    command = (b"SET", ticket.want.key.encode(), data, *expiry, *(() if ticket.replaced else (b"NX",)))
    try:
        yield from with_retries(ticket.lease.name, Pipeline((command,)), monotonic())
    except LockBackendError:
        if not ticket.want.forgiving:
            raise


def _settlement(ticket: ComputeJob, life: bytes, data: bytes, *ready: bytes) -> ScriptCall:
    want, lease = ticket.want, ticket.lease
    keys: tuple[bytes, ...] = (*lease.keys[:2], lease.keys.queue, want.key.encode(), *witness(lease))
    if lease.has_waited or ticket.replaced or ready:
        keys += (waits(want, lease), failures(lease), *ready)
    name, own = lease.name.encode(), b"%d" % ticket.mine
    return ScriptCall(SETTLE, keys, (ticket.fence, name, life, ticket.replaced, ticket.ends, data, own))


def _pieces(key: bytes, data: bytes) -> Pipeline:
    end = len(data) - 1
    pieces = [(b"SETRANGE", key, b"%d" % at, data[at : at + LARGE]) for at in range(0, len(data), LARGE)]
    # The last byte first, so that room is made once.
    return Pipeline(((b"SETRANGE", key, b"%d" % end, data[end:]), (b"PEXPIRE", key, b"%d" % READY_FOR), *pieces))


def _tell_failure(ticket: ComputeJob, error: BaseException) -> Operation[None]:
    """End the lease without a value, and tell those who wait why: they would only find out one after another."""
    data = ticket.want.pack_failure(error)  # type: ignore[arg-type]
    with suppress(LockBackendError):
        yield from with_retries(ticket.lease.name, _settlement(ticket, b"!", data), monotonic())


def _abandon(ticket: ComputeJob) -> Operation[None]:
    """End the lease without a value: one of those who wait computes next."""
    want, lease = ticket.want, ticket.lease
    waited_for = (b"HDEL", waits(want, lease), lease.name.encode())
    with suppress(LockBackendError):
        yield from with_retries(lease.name, release_call(lease), monotonic())
        yield from with_retries(lease.name, Pipeline((waited_for, (b"UNLINK", witness(lease)[0]))), monotonic())


def digest(data: bytes) -> bytes:
    """Return by what the scripts know a value."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest().encode()


def failures(lease: ValueLease) -> bytes:
    """Return the key that tells how often an old value could not be replaced."""
    return lease.keys.held[: -len(b"held")] + b"failed:" + lease.name.encode()


def witness(lease: ValueLease) -> tuple[bytes, bytes]:
    """Return the two keys of the check whether the value was invalidated since the lease was taken."""
    return witness_key(lease.keys, lease.name), era_key(lease.keys)


def waits(want: ValueRequest, lease: ValueLease) -> bytes:
    """Return the key that tells which computation waits for which."""
    if is_clustered(want.server):
        return lease.keys.held[: -len(b"held")] + b"waits"
    return b"{%s}:waits" % want.prefix.encode()
