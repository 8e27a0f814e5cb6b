"""Servers in cluster mode behind a plain client: all keys of one script must be in one slot, that of the value.

Such a server is recognised by its answer CROSSSLOT to the first script that names a value and its lease. From then on
the lease of a value has its keys in the value's slot. Such a server never grants a lease under other keys, so all
processes agree.
"""

from __future__ import annotations

import weakref
from binascii import crc_hqx
from functools import lru_cache

from redis.exceptions import ClusterCrossSlotError

from ...core import events
from ...core.driver.server import Server
from ...core.keys import BUCKETS, LockKeys, lock_keys
from ...exceptions import LockBackendError

SLOTS = 16384
clustered_servers: weakref.WeakSet[Server] = weakref.WeakSet()
"""The servers that are known to be in cluster mode."""


def is_clustered(server: Server) -> bool:
    """Whether the server is known to be in cluster mode."""
    return server in clustered_servers


def is_crossing(error: LockBackendError, server: Server) -> bool:
    """Whether the server refused keys of several slots. If so, leases have other keys from now on."""
    if not isinstance(error.__cause__, ClusterCrossSlotError):
        return False
    if server not in clustered_servers:
        clustered_servers.add(server)
        events.log.info(
            "The server is in cluster mode: from now on the lease of each value has its keys in the slot of the value."
        )
    return True


def lease_keys(server: Server, prefix: str, name: str, key: str) -> LockKeys:
    """Return the keys of the lease of this name, whose value has this key."""
    if server not in clustered_servers:
        return lock_keys(prefix, name)
    number = _numbers(prefix)[slot_of(key.encode())]
    return keys_in(b"{%b:%d}" % (prefix.encode(), number), name)


def keys_in(tag: bytes, name: str) -> LockKeys:
    """Return the keys of a lock in the slot of a hash tag."""
    raw = name.encode()
    return LockKeys(
        tag + b":lock:" + raw, tag + b":held", tag + b":fence", tag + b":queue:" + raw, tag + b":released:" + raw
    )


def slot_of(key: bytes) -> int:
    """Return the slot of a key, as the servers compute it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


@lru_cache(maxsize=4)
def _numbers(prefix: str) -> dict[int, int]:
    """Return for each slot a number whose hash tag is in it, without the numbers of the buckets."""
    found: dict[int, int] = {}
    start, number = crc_hqx(prefix.encode() + b":", 0), BUCKETS
    while len(found) < SLOTS:
        found.setdefault(crc_hqx(b"%d" % number, start) % SLOTS, number)
        number += 1
    return found
