"""The keys of a lock in Redis, and what an acquirer writes there: its owner id, its record and an expiry.

All keys of one lock begin with the hash tag ``{prefix:bucket}``, so that they share a Cluster slot with each other and
with the bucket's index of held locks and its fence counter. The bucket is a hash of the name.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from functools import lru_cache
from typing import NamedTuple

from .driver import process

BUCKETS = 256


class LockKeys(NamedTuple):
    """The keys of one lock."""

    lock: bytes
    held: bytes
    fence: bytes
    queue: bytes
    receipts: bytes
    """The acquisitions that were released lately."""


def lock_keys(prefix: str, name: str) -> LockKeys:
    """Return the keys of the lock `name`."""
    raw = name.encode()
    lock, held, fence, queue, receipts = _buckets(prefix)[zlib.crc32(raw) % BUCKETS]
    return LockKeys(lock + raw, held, fence, queue + raw, receipts + raw)


@lru_cache(maxsize=16)
def _buckets(prefix: str) -> list[LockKeys]:
    """Return the beginnings of the locks' keys, for each bucket."""
    tags = [b"{%s:%d}" % (prefix.encode(), bucket) for bucket in range(BUCKETS)]
    return [
        LockKeys(tag + b":lock:", tag + b":held", tag + b":fence", tag + b":queue:", tag + b":released:")
        for tag in tags
    ]


def witness_key(keys: LockKeys, name: str) -> bytes:
    """Return the key of the witness: it exists while a computed value may be stored. A reset deletes it."""
    return keys.held[: -len(b"held")] + b"witness:" + name.encode()


def held_keys(prefix: str) -> list[bytes]:
    """Return the keys of all indexes of held locks."""
    return [bucket.held for bucket in _buckets(prefix)]


def new_id() -> str:
    """Return a random owner id."""
    return os.urandom(16).hex()


@lru_cache(maxsize=1024)
def _static(pid: int, thread: str, kind: str, label: str, expire: float, auto_renewal: bool) -> bytes:
    fields = {"host": process.HOST, "pid": pid, "thread": thread, "kind": kind, "label": label}
    return json.dumps(fields | {"expire": expire, "auto_renewal": auto_renewal}, separators=(",", ":")).encode()


def record(kind: str, label: str, expire: float, auto_renewal: bool) -> bytes:
    """Return the record that this thread writes into a lock that it acquires."""
    return _static(process.pid, threading.current_thread().name, kind, label, expire, auto_renewal)


def milliseconds(seconds: float) -> bytes:
    """Return a checked expiry for Redis, rounded up, so that the lock expires there no earlier than its holder
    believes.

    It is bytes, because hiredis 3.5 can crash while it formats an int.
    """
    return b"%d" % math.ceil(seconds * 1000)
