"""Circles of computations that wait for each other, over all servers: the algorithm, without I/O.

The record of a lease names the leases that its computation waits for. A caller that is about to wait writes this first,
and then reads on from lease to lease. If it finds a lease under which it computes itself, the others wait for it, so it
computes without waiting. Of several callers that close a circle at once, the last writer sees the names of all others.
All of them may see the circle, though one that does not wait is enough. So each of them but the one with the first
lease takes its name back, and looks again after a pause: then the circle is there only if nobody else has opened it.
"""

from __future__ import annotations

import json
from typing import Any

from ...core.clock import monotonic
from ...core.driver.effects import Operation, Pipeline, RunAt, ScriptCall, Sleep
from ...core.driver.registry import living_servers
from ...core.driver.retry import with_retries, with_retries_each
from ...core.driver.script import Script
from ...core.driver.server import Server
from ...exceptions import LockBackendError
from .request import ValueLease, enclosing_leases

NEEDS = Script("needs", home=__package__)

LONGEST = 100
"""Number of leases that one caller reads at most before it waits."""

PAUSE = 0.1
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
    rank = yield from _look(own, wanted, target)
    if rank is not None and rank > 0:
        yield from end_wait(wanted)
        yield Sleep(rank * PAUSE)
        rank = yield from _look(own, wanted, target)
    return None if rank is None else rank >= 0


def _look(own: list[ValueLease], wanted: ValueLease, target: Place) -> Operation[int | None]:
    """Write that the caller's leases wait for the target, and then follow the names from there."""
    yield from _name(own, wanted, target)
    return (yield from _rank_in_circle(own, wanted.name, target))


def _name(own: list[ValueLease], wanted: ValueLease, target: Place) -> Operation[None]:
    for lease in own:
        at = "" if lease.server.place == wanted.server.place else label(wanted.server.place)
        lease.needs[wanted.id] = [at, target[1].decode(), target[2]]
    yield from _write(own)


def _rank_in_circle(own: list[ValueLease], name: str, target: Place) -> Operation[int | None]:
    """Follow the names from the target.

    If they lead to one of the caller's leases, return how many leases on the way come before it in the order of their
    locks. If not, return -1, or None when a server did not answer.
    """
    none: int | None = -1
    ahead = [target]
    seen: set[tuple[bytes, str]] = set()
    while ahead and len(seen) < LONGEST:
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
        yield from _write(waited)


def _write(leases: list[ValueLease]) -> Operation[None]:
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
