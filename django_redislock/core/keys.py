"""The keys of a lock in Redis, and what an acquirer writes there: its owner id, its record and an expiry.

All keys of one lock begin with the hash tag ``{prefix:bucket}``, so that they share a Cluster slot with each other and
with the bucket's index of held locks and its fence counter. The bucket is a hash of the name.
"""

from __future__ import annotations

import json
import math
import os
import re
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
    lock, held, fence, queue, receipts = _bucket(prefix, zlib.crc32(raw) % BUCKETS)
    return LockKeys(lock + raw, held, fence, queue + raw, receipts + raw)


def keys_in(tag: bytes, name: str) -> LockKeys:
    """Return the keys of a lock in the slot of a hash tag."""
    raw = name.encode()
    return LockKeys(
        tag + b":lock:" + raw, tag + b":held", tag + b":fence", tag + b":queue:" + raw, tag + b":released:" + raw
    )


# For each bucket by itself: where a process used more prefixes than were kept, each lock made the keys of all buckets.
@lru_cache(maxsize=16 * BUCKETS)
def _bucket(prefix: str, bucket: int) -> LockKeys:
    """Return the beginnings of the locks' keys in this bucket."""
    tag = b"{%s:%d}" % (prefix.encode(), bucket)
    return LockKeys(tag + b":lock:", tag + b":held", tag + b":fence", tag + b":queue:", tag + b":released:")


def witness_key(keys: LockKeys, name: str) -> bytes:
    """Return the key of the witness: it exists while a computed value may be stored. A reset deletes it."""
    return keys.held[: -len(b"held")] + b"witness:" + name.encode()


def held_keys(prefix: str) -> list[bytes]:
    """Return the keys of all indexes of held locks."""
    return [_bucket(prefix, bucket).held for bucket in range(BUCKETS)]


def literal(text: str) -> str:
    """Return the pattern of Redis that matches this text only."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


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
