"""The slots of a Cluster, and servers that run a script for one slot only."""

from __future__ import annotations

from binascii import crc_hqx

from redis.exceptions import ClusterCrossSlotError

from .. import events
from .server import Server

SLOTS = 16384


def slot_of(key: bytes) -> int:
    """Return the slot of a key, as the servers compute it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


def is_crossing(error: BaseException | None, server: Server) -> bool:
    """Whether the server refused keys of several slots. If so, calls to it are split by slot from now on.

    So a server in cluster mode behind a plain client is recognised: a Cluster of one shard, a proxy, or a serverless
    service.
    """
    if not isinstance(error, ClusterCrossSlotError):
        return False
    if not server.splits:
        server.splits = True
        events.log.info(
            "The server is in cluster mode: from now on, calls about many locks or values are split by slot."
        )
    return True
