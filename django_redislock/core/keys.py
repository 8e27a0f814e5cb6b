"""The keys of a lock in Redis, and what an acquirer writes there: its owner id, its record and an expiry.

All keys of one lock begin with the hash tag ``{prefix:bucket}``, so that they share a Cluster slot with each other and
with the bucket's index of held locks and its fence counter. The bucket is a hash of the name; of a task's lock, of the
key in the name.
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
from .validation import MAX_LIMIT

BUCKETS = 256


class LockKeys(NamedTuple):
    """The keys of one lock."""

    lock: bytes
    held: bytes
    fence: bytes
    queue: bytes
    receipts: bytes
    """The acquisitions that were released lately."""
    name: bytes
    """The name in the index of held locks; of a slot, with its number."""
    others: tuple[bytes, ...] = ()
    """The lock keys of the slots 2 and up, where it is not known which slot it is; `lock` is slot 1 then."""

    @property
    def last(self) -> bytes:
        """The key of the last slot that the caller looks at. The waiters of a process are grouped by it, of whom
        the first one looks by itself: a waiter with a lower limit does not see the slots of the others."""
        return self.others[-1] if self.others else self.lock

    def slot(self, number: int) -> LockKeys:
        """Return the keys of one slot of a semaphore; `self` are those of `slots_keys`."""
        lock, held, fence, queue, receipts, name, _ = self
        digits = b"%d" % number
        return LockKeys(lock[:-1] + digits, held, fence, queue, receipts, name + digits)

    def slots(self, first: int, last: int = MAX_LIMIT) -> tuple[bytes, ...]:
        """Return the lock keys of these slots of a semaphore; `self` are those of `slots_keys`."""
        lock = self.lock[:-1]
        return tuple([lock + b"%d" % number for number in range(first, last + 1)])


def lock_keys(prefix: str, name: str) -> LockKeys:
    """Return the keys of the lock `name`."""
    try:
        raw = name.encode()
    except UnicodeEncodeError:  # a name from a list: of a slot
        of, number = split_slot(name)
        return slots_keys(prefix, of, 1).slot(number)
    lock, held, fence, queue, receipts, _, _ = _bucket(prefix, bucket_of(raw))
    if raw.startswith(SLOT):
        raw = SLOT + raw + b":lock"
    return LockKeys(lock + raw, held, fence, queue + raw, receipts + raw, raw)


OF_RUN, OF_WAITING, OF_MESSAGE = "celery", "celery-queue", "celery-message"
"""How the names of tasks' locks begin: of runs and jobs, of waiting messages, of the runs of one message."""


def bucket_of(name: bytes) -> int:
    """Return the bucket of a lock.

    That of a task's lock is the bucket of its key, which is in each name behind the task or its group. So one script
    takes the lock of a run and gives back that of its message.
    """
    if name.startswith(b"celery"):  # a test that costs other locks nothing
        kind, _, rest = name.partition(b":")
        if kind in (b"celery", b"celery-queue"):
            name = rest.partition(b":")[2]
        elif kind == b"celery-message":
            name = rest.partition(b":")[2].rsplit(b":", 3)[0]  # a message has three parts
    return zlib.crc32(name) % BUCKETS


SLOT = b"slot:"
"""In Redis, a slot of the semaphore `x` has the name ``slot:x:<number>``, and what all its slots share ``slot:x:``. A
lock whose own name begins so is called ``slot:<name>:lock`` there, so that no lock has the name of a slot."""
SLOT_IN_TEXT = "\udcff"
"""Stands between a semaphore's name and the number of a slot in a listed name. No name of a lock has it, because it is
not valid Unicode."""


def listed_name(raw: bytes) -> str:
    """Return the name that an index or a count has, as a str from which `lock_keys` makes the keys.

    Of bytes that are no name of a lock it makes one that nobody holds.
    """
    if not raw.startswith(SLOT):
        return raw.decode(errors="replace")
    name, _, number = raw.removeprefix(SLOT).decode(errors="replace").rpartition(":")
    return name if number == "lock" else name + SLOT_IN_TEXT + number


def with_slot(name: str, slot: int) -> str:
    """Return the listed name of a semaphore's slot; of a lock (slot 0) its name."""
    return f"{name}{SLOT_IN_TEXT}{slot}" if slot else name


def queue_name(listed: str) -> str:
    """Return one name for all slots of a semaphore, because they have one queue; of a lock its name."""
    name, slot, _ = listed.partition(SLOT_IN_TEXT)
    return name + slot


def split_slot(listed: str) -> tuple[str, int]:
    """Return the name and the number of the slot that a listed name has; of a lock the number is 0."""
    name, _, number = listed.partition(SLOT_IN_TEXT)
    return name, int(number) if number.isdecimal() else 0


def slots_keys(prefix: str, name: str, limit: int) -> LockKeys:
    """Return the keys of a semaphore: each slot has a lock key of its own, and all slots share the other keys.

    All of them are in the bucket of the name, so that fences grow over all slots.
    """
    raw = name.encode()
    bucket, raw = _bucket(prefix, bucket_of(raw)), SLOT + raw + b":"
    lock = bucket.lock + raw
    one = LockKeys(lock + b"1", bucket.held, bucket.fence, bucket.queue + raw, bucket.receipts + raw, raw)
    return one._replace(others=one.slots(2, limit))


def keys_in(tag: bytes, name: str) -> LockKeys:
    """Return the keys of a lock in the slot of a hash tag."""
    raw = name.encode()
    queue, receipts = tag + b":queue:" + raw, tag + b":released:" + raw
    return LockKeys(tag + b":lock:" + raw, tag + b":held", tag + b":fence", queue, receipts, raw)


# For each bucket by itself: where a process used more prefixes than were kept, each lock made the keys of all buckets.
@lru_cache(maxsize=16 * BUCKETS)
def _bucket(prefix: str, bucket: int) -> LockKeys:
    """Return the beginnings of the locks' keys in this bucket."""
    return keys_in(b"{%s:%d}" % (prefix.encode(), bucket), "")


def witness_key(keys: LockKeys) -> bytes:
    """Return the key of the witness: it exists while a computed value may be stored. A reset deletes it."""
    return keys.held[: -len(b"held")] + b"witness:" + keys.name


def counts_key(keys: LockKeys) -> bytes:
    """Return the key of the counts of the bucket: of waits, and of work that was saved."""
    return keys.held[: -len(b"held")] + b"counts"


def counts_keys(prefix: str) -> list[bytes]:
    """Return the keys of the counts of all buckets."""
    return [counts_key(_bucket(prefix, bucket)) for bucket in range(BUCKETS)]


def undone_key(keys: LockKeys, attempt: bytes) -> bytes:
    """Return the key of the note that an attempt to acquire was given up."""
    return keys.held[: -len(b"held")] + b"undone:" + attempt


def held_keys(prefix: str) -> list[bytes]:
    """Return the keys of all indexes of held locks."""
    return [_bucket(prefix, bucket).held for bucket in range(BUCKETS)]


def literal(text: str) -> str:
    """Return the pattern of Redis that matches this text only."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


def new_id() -> str:
    """Return a random owner id."""
    return os.urandom(16).hex()


def id_with_limit(id: str, limit: int) -> str:
    """Return the owner id of an acquisition of a slot. It ends with its limit, because the scripts that wake the first
    waiter of the queue must know which slots are for that waiter."""
    return f"{id}/{limit}"


def another_id(id: str) -> str:
    """Return a new owner id, with the message of an execution in front and the limit of a slot behind, as this one."""
    message, colon, own = id.rpartition(":")
    _, slash, limit = own.partition("/")
    return message + colon + new_id() + slash + limit


@lru_cache(maxsize=1024)
def _static(pid: int, thread: str, kind: str, label: str, expire: float, auto_renewal: bool, limit: int) -> bytes:
    fields = {"host": process.HOST, "pid": pid, "thread": thread, "kind": kind, "label": label}
    fields |= {"expire": expire, "auto_renewal": auto_renewal} | ({"limit": limit} if limit else {})
    return json.dumps(fields, separators=(",", ":")).encode()


def record(kind: str, label: str, expire: float, auto_renewal: bool, limit: int = 0) -> bytes:
    """Return the record that this thread writes into a lock that it acquires, or into a slot with this limit."""
    return _static(process.pid, threading.current_thread().name, kind, label, expire, auto_renewal, limit)


def milliseconds(seconds: float) -> bytes:
    """Return a checked expiry for Redis, rounded up, so that the lock expires there no earlier than its holder
    believes.

    It is bytes, because hiredis 3.5 can crash while it formats an int.
    """
    return b"%d" % math.ceil(seconds * 1000)
