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

NamedLease = tuple[str, LockKeys, tuple[bytes, ...]]
"""The name of a lease, its keys, and the key of its value, if that is known."""


def invalidate(
    server: Server, prefix: str, keys: list[str], level: int | None = None, *, delete: bool = False
) -> Operation[int]:
    """End the leases of the values, so that their running computations are not stored; return the number of leases.

    `delete`: delete the values in the same moment. `level` is the log level of the record when the server does not
    answer.
    """
    known = is_clustered(server)
    leases: list[NamedLease] = [
        (name, lease_keys(server, prefix, name, key), (key.encode(),)) for key in keys for name in [lease_name(key)]
    ]
    try:
        # The call names the values in any case, so that a server in cluster mode refuses it and is recognised.
        return (yield from _end(server, leases, level, delete))
    except LockBackendError as error:
        if known or not is_crossing(error, server):
            raise
    return (yield from invalidate(server, prefix, keys, level, delete=delete))


def _end(server: Server, leases: list[NamedLease], level: int | None = None, delete: bool = False) -> Operation[int]:
    ended = 0
    for start in range(0, len(leases), BATCH):
        batch = leases[start : start + BATCH]
        if is_clustered(server):
            replies: dict[int, int] = {}
            yield from interleave([_end_some([lease], level, delete) for lease in batch], replies)
            ended += sum(replies.values())
        else:
            ended += yield from _end_some(batch, level, delete)
    return ended


def _end_some(leases: list[NamedLease], level: int | None, delete: bool) -> Operation[int]:
    _, reply = yield from with_retries(leases[0][0], _call(leases, delete), monotonic(), level=level)
    return int(reply)


def _call(leases: list[NamedLease], delete: bool) -> ScriptCall:
    keys = [key for name, each, _ in leases for key in (each.lock, each.held, each.queue, witness_key(each, name))]
    keys += [key for *_, value in leases for key in value]
    return ScriptCall(INVALIDATE, tuple(keys), (b"1" if delete else b"0", *(name.encode() for name, *_ in leases)))


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
            found = yield from names(server, prefix, monotonic())
            leases = [(name, lock_keys(prefix, name), ()) for name in found]
    except LockBackendError as error:
        if known or not is_crossing(error, server):
            raise
        return (yield from invalidate_matching(server, prefix, matches))
    # A long key is cut in the name of its lease, at most three bytes before the limit, so it may match.

    def wanted(name: str) -> bool:
        return name.startswith(KIND) and bool(len(name.encode()) > MAX_NAME - 4 or matches(name.removeprefix(KIND)))

    return (yield from _end(server, [lease for lease in leases if wanted(lease[0])]))


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
