"""The end of leases, so that running computations are not stored: the algorithm, without I/O."""

from __future__ import annotations

import re

from redis.exceptions import RedisError

from ...core.clock import monotonic
from ...core.driver.effects import Operation, Pipeline, ScriptBatch, ScriptCall
from ...core.driver.retry import with_retries
from ...core.driver.script import Script
from ...core.driver.server import Server
from ...core.keys import LockKeys, held_keys, lock_keys, witness_key
from ...core.operations import names
from ...core.validation import MAX_NAME
from ...exceptions import LockBackendError
from .cluster_slots import is_clustered, is_crossing, keys_in, lease_keys
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
    if not is_clustered(server):
        for start in range(0, len(leases), BATCH):
            call = _call(leases[start : start + BATCH], *more)
            _, reply = yield from with_retries(leases[start][0], call, monotonic(), level=level)
            ended += reply
        return ended
    for start in range(0, len(leases), BATCH):
        first, *others = [_call([lease]) for lease in leases[start : start + BATCH]]
        # The text of the first call makes the script known to the server for the others.
        batch = ScriptBatch((first.with_text(), *others))
        _, replies = yield from with_retries(leases[start][0], batch, monotonic(), level=level)
        for reply in replies:
            if isinstance(reply, RedisError):
                raise LockBackendError(leases[start][0], str(reply)) from reply
            ended += reply
    return ended


def _call(leases: list[NamedLease], *more: bytes) -> ScriptCall:
    keys = [key for name, each in leases for key in (each.lock, each.held, each.queue, witness_key(each, name))]
    return ScriptCall(INVALIDATE, (*keys, *more), tuple(name.encode() for name, _ in leases))


def invalidate_pattern(server: Server, prefix: str, pattern: str) -> Operation[int]:
    """End the leases of the values whose keys match a pattern of Redis; return the number of leases."""
    known = is_clustered(server)
    try:
        if known:
            leases = yield from _leases_in_slots(prefix)
        else:
            # The names of ended leases are not known, so all witnesses become void.
            eras = [held.removesuffix(b"held") + b"era" for held in held_keys(prefix)]
            yield from with_retries(prefix, Pipeline(((b"DEL", *eras),)), monotonic())
            leases = [(name, lock_keys(prefix, name)) for name in (yield from names(server, prefix, monotonic()))]
    except LockBackendError as error:
        if known or not is_crossing(error, server):
            raise
        return (yield from invalidate_pattern(server, prefix, pattern))
    matches = re.compile(glob_to_regex(pattern), re.DOTALL).fullmatch
    # A long key is cut in the name of its lease, at most three bytes before the limit, so it may match.
    wanted = [
        (name, keys)
        for name, keys in leases
        if name.startswith(KIND) and (len(name.encode()) > MAX_NAME - 4 or matches(name.removeprefix(KIND)))
    ]
    return (yield from _end(server, wanted))


def _leases_in_slots(prefix: str) -> Operation[list[NamedLease]]:
    """Find the leases of a server in cluster mode by a scan, because no index covers all slots; void all witnesses."""
    found: list[NamedLease] = []
    ours = b"{" + re.sub(rb"([*?[\\])", rb"\\\1", prefix.encode()) + b":*}:*"
    cursor, tags = b"", set()
    while cursor != b"0":
        scan = (b"SCAN", cursor or b"0", b"MATCH", ours, b"COUNT", b"1000")
        _, ((cursor, keys),) = yield from with_retries(prefix, Pipeline((scan,)), monotonic())
        for key in keys:
            tag, _, rest = key.partition(b"}:")
            tags.add(tag + b"}")
            if rest.startswith(b"lock:" + KIND.encode()):
                name = rest.removeprefix(b"lock:").decode()
                found.append((name, keys_in(tag + b"}", name)))
    if tags:
        voided = tuple((b"DEL", era_key(keys_in(tag, ""))) for tag in tags)
        yield from with_retries(prefix, Pipeline(voided), monotonic())
    return found


def glob_to_regex(pattern: str) -> str:
    """Return a regular expression for the pattern of Redis; for ``[a-c]`` it matches any one character."""
    return _TOKEN.sub(lambda token: _REGEX.get(token[0][0]) or re.escape(token[1] or token[0]), pattern)


_TOKEN = re.compile(r"\\(.)|\[(?:\\.|[^]])*]?|.", re.DOTALL)
_REGEX = {"*": ".*", "?": ".", "[": "."}
