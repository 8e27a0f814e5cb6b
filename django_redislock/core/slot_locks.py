"""The leases of values on a server in cluster mode: locks in the slots of their values, beyond the buckets.

No index lists them, so they are found by a scan of all keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from redis.exceptions import RedisError

from ..exceptions import LockBackendError
from .clock import monotonic
from .driver.cluster.cluster import Cluster
from .driver.effects import At, Operation, Pipeline
from .driver.retry import with_retries
from .driver.server import Server
from .keys import BUCKETS, LockKeys

KEYS_OF_A_SCAN = b"1000"


class SlotLocks(NamedTuple):
    """What a scan found."""

    held: list[tuple[str, LockKeys]]
    """The names and the keys of the locks."""
    tags: set[bytes]
    """The hash tags of all keys beyond the buckets."""


def keys_in(tag: bytes, name: str) -> LockKeys:
    """Return the keys of a lock in the slot of a hash tag."""
    raw = name.encode()
    return LockKeys(
        tag + b":lock:" + raw, tag + b":held", tag + b":fence", tag + b":queue:" + raw, tag + b":released:" + raw
    )


def find_slot_locks(server: Server, prefix: str) -> Operation[SlotLocks]:
    """Find the locks beyond the buckets, in no order. Raises LockBackendError."""
    found = SlotLocks([], set())
    ours = b"{" + re.sub(rb"([*?[\\])", rb"\\\1", prefix.encode()) + b":*}:*"
    # Another prefix may begin with this one, and the numbers of the buckets are those of other locks.
    of_lock = re.compile(rb"(\{%b:(\d+)\}):(?:lock:(.*))?" % re.escape(prefix.encode()), re.DOTALL).match
    for node in (yield from _primaries(server, prefix)):
        cursor = b""
        while cursor != b"0":
            scan = Pipeline(((b"SCAN", cursor or b"0", b"MATCH", ours, b"COUNT", KEYS_OF_A_SCAN),))
            call = scan if node is None else At(node, scan)
            _, ((cursor, keys),) = yield from with_retries(prefix, call, monotonic())
            for parts in filter(None, map(of_lock, keys)):
                if int(parts[2]) >= BUCKETS:
                    found.tags.add(parts[1])
                    if parts[3] is not None:
                        name = parts[3].decode()
                        found.held.append((name, keys_in(parts[1], name)))
    return found


def _primaries(server: Server, prefix: str) -> Operation[Sequence[Server | None]]:
    """Return the primaries of a Cluster; None stands for the server itself."""
    if not isinstance(server, Cluster):
        return [None]
    try:
        yield from server.table.read_anew()
    except RedisError as error:
        raise LockBackendError(prefix, str(error)) from error
    return server.table.primaries
