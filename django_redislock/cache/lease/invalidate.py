"""The end of leases, so that running computations are not stored: the algorithm, without I/O."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...core.clock import monotonic
from ...core.driver.effects import Operation, Pipeline, ScriptCall
from ...core.driver.interleave import interleave
from ...core.driver.retry import with_retries
from ...core.driver.script import Script
from ...core.driver.server import Server
from ...core.keys import LockKeys, held_keys, lock_keys, witness_key
from ...core.operations import names
from ...core.slot_locks import find_slot_locks, keys_in
from ...core.validation import MAX_NAME
from ...exceptions import LockBackendError
from .cluster_slots import is_clustered, is_crossing, lease_keys
from .request import KIND, era_key, lease_name

INVALIDATE = Script("invalidate", "handover", home=__package__)

BATCH = 250
"""Number of leases that one call ends at most, so that the server is not busy for long."""

NamedLease = tuple[str, LockKeys]


def invalidate(server: Server, prefix: str, keys: list[str], level: int | None = None) -> Operation[int]:
    """End the leases of the values, so that their running computations are not stored; return the number of leases.

    `level` is the log level of the record when the server does not answer.
    """
    known = is_clustered(server)
    leases = [(name, lease_keys(server, prefix, name, key)) for key in keys for name in [lease_name(key)]]
    try:
        # The call also names the first value, so that a server in cluster mode refuses it and is recognised.
        return (yield from _end(server, leases, level, *(key.encode() for key in keys[:1])))
    except LockBackendError as error:
        if known or not is_crossing(error, server):
            raise
    return (yield from invalidate(server, prefix, keys, level))


def _end(server: Server, leases: list[NamedLease], level: int | None = None, *more: bytes) -> Operation[int]:
    ended = 0
    for start in range(0, len(leases), BATCH):
        batch = leases[start : start + BATCH]
        if is_clustered(server):
            replies: dict[int, int] = {}
            yield from interleave([_end_some([lease], level) for lease in batch], replies)
            ended += sum(replies.values())
        else:
            ended += yield from _end_some(batch, level, *more)
    return ended


def _end_some(leases: list[NamedLease], level: int | None, *more: bytes) -> Operation[int]:
    _, reply = yield from with_retries(leases[0][0], _call(leases, *more), monotonic(), level=level)
    return int(reply)


def _call(leases: list[NamedLease], *more: bytes) -> ScriptCall:
    keys = [key for name, each in leases for key in (each.lock, each.held, each.queue, witness_key(each, name))]
    return ScriptCall(INVALIDATE, (*keys, *more), tuple(name.encode() for name, _ in leases))


def invalidate_pattern(server: Server, prefix: str, pattern: str) -> Operation[int]:
    """End the leases of the values whose keys match a pattern of Redis; return the number of leases."""
    return invalidate_matching(server, prefix, re.compile(glob_to_regex(pattern), re.DOTALL).fullmatch)


def invalidate_matching(server: Server, prefix: str, matches: Callable[[str], object]) -> Operation[int]:
    """End the leases of the values whose keys the function selects; return the number of leases."""
    known = is_clustered(server)
    try:
        if known:
            leases = yield from _void_slots(server, prefix)
        else:
            # The names of ended leases are not known, so all witnesses become void.
            eras = [held.removesuffix(b"held") + b"era" for held in held_keys(prefix)]
            yield from with_retries(prefix, Pipeline(((b"DEL", *eras),)), monotonic())
            leases = [(name, lock_keys(prefix, name)) for name in (yield from names(server, prefix, monotonic()))]
    except LockBackendError as error:
        if known or not is_crossing(error, server):
            raise
        return (yield from invalidate_matching(server, prefix, matches))
    # A long key is cut in the name of its lease, at most three bytes before the limit, so it may match.
    wanted = [
        (name, keys)
        for name, keys in leases
        if name.startswith(KIND) and (len(name.encode()) > MAX_NAME - 4 or matches(name.removeprefix(KIND)))
    ]
    return (yield from _end(server, wanted))


def _void_slots(server: Server, prefix: str) -> Operation[list[NamedLease]]:
    """Find the leases of a server in cluster mode, and void all witnesses there."""
    found = yield from find_slot_locks(server, prefix)
    voided = tuple((b"DEL", era_key(keys_in(tag, ""))) for tag in found.tags)
    for start in range(0, len(voided), BATCH):
        yield from with_retries(prefix, Pipeline(voided[start : start + BATCH]), monotonic())
    return found.held


def glob_to_regex(pattern: str) -> str:
    """Return a regular expression for the pattern of Redis; for ``[a-c]`` it matches any one character."""
    return _TOKEN.sub(lambda token: _REGEX.get(token[0][0]) or re.escape(token[1] or token[0]), pattern)


_TOKEN = re.compile(r"\\(.)|\[(?:\\.|[^]])*]?|.", re.DOTALL)
_REGEX = {"*": ".*", "?": ".", "[": "."}
