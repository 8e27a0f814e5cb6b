"""The locks held now: listed, and reset all at once; the leases of values that no index lists; and the last hour.

The waits for locks, and the work that locks saved, in the last hour are counted in bounded space by scripts, and read
here. The script that ends a wait counts the wait, and the script that stores a computed value counts its waiters. A
prevented duplicate of a task is counted by a call of its own.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple
from urllib.parse import unquote

from redis.exceptions import RedisError

from ..exceptions import LockBackendError
from . import operations, scripts
from .clock import monotonic
from .driver.cluster.by_slot import Missing, by_slot
from .driver.cluster.cluster import Cluster
from .driver.effects import At, Operation, Pipeline, ScriptCall, with_retries, with_retries_each
from .driver.registry import Client, server_of
from .driver.server import Server
from .keys import BUCKETS, LockKeys, counts_keys, keys_in, listed_name, lock_keys, split_slot
from .lease import report_reset
from .lock import Lock
from .operations import BATCH
from .records import LockInfo, StoredLock
from .validation import check_prefix

KEYS_OF_A_SCAN = b"1000"
MAX_WAITERS = 20
"""Waiters of a queue that are listed at most."""


def held_locks(client: Client | Server, prefix: str = "redislock") -> Iterator[LockInfo]:
    """Yield a description of each lock held now under the key prefix, in the order of their names.

    The cost grows with the number of held locks, not with that of other keys. Raises LockBackendError when Redis
    cannot answer.
    """
    return (stored.info for stored in list_locks(client, prefix))


def list_locks(
    client: Client | Server,
    prefix: str,
    *,
    matching: Callable[[str], object] | None = None,
    retry_for: float = math.inf,
    missing: Missing | None = None,
    foreign: Missing | None = None,
) -> Iterator[StoredLock]:
    """Yield the locks as `held_locks` does; the record of each is read only when it is needed.

    `matching` selects locks by name. An unreachable server is tried again for `retry_for` seconds, at least once, and
    no longer than by any other call. `missing` gets the nodes of a Cluster whose locks are missing, and why; without
    it, one such node raises LockBackendError. `foreign` gets the names of locks whose value no lock wrote, and why;
    without it, one such value raises LockBackendError.
    """
    server = server_of(client)
    names = server.run(operations.names(server, check_prefix(prefix), monotonic() + retry_for, missing))
    picked = filter(matching, names)
    yield from read_locks(server, picked, prefix, retry_for=retry_for, missing=missing, foreign=foreign)


def read_locks(
    client: Client | Server,
    names: Iterable[str],
    prefix: str,
    *,
    retry_for: float = math.inf,
    missing: Missing | None = None,
    foreign: Missing | None = None,
) -> Iterator[StoredLock]:
    """Yield the locks of these names that are held now, as `list_locks` does."""
    server = server_of(client)
    until = monotonic() + retry_for
    names = sorted(names)
    for start in range(0, len(names), BATCH):
        batch = names[start : start + BATCH]
        keys = [lock_keys(prefix, name) for name in batch]
        stored = server.run(operations.read_many(server, batch, keys, until, missing, foreign))
        yield from sorted(filter(None, stored), key=attrgetter("name"))


class QueuedWaiter(NamedTuple):
    """One waiter for a lock, as far as its entry in the queue describes it."""

    host: str
    pid: int
    seconds: float
    """How long it has waited so far."""


def read_queue(client: Client | Server, name: str, prefix: str, *, retry_for: float = math.inf) -> list[QueuedWaiter]:
    """Return the first `MAX_WAITERS` waiters for the lock. Raises LockBackendError when Redis cannot answer."""
    call = ScriptCall(scripts.QUEUE, (lock_keys(prefix, name).queue,), (b"%d" % MAX_WAITERS,))
    _, (micros, entries) = server_of(client).run(with_retries(name, call, monotonic() + retry_for))
    now = int(micros) / 1e6
    waiting = []
    for entry, ticket in zip(entries[::2], entries[1::2], strict=True):
        channel = entry.partition(b"\n")[0].decode(errors="replace")
        pid, _, host = channel.partition("wake:")[2].partition(":")[2].partition(":")
        seconds = max(0.0, now - float(ticket) / 1e6)
        waiting.append(QueuedWaiter(unquote(host), int(pid) if pid.isdecimal() else 0, seconds))
    return waiting


def reset_all(client: Client | Server, prefix: str = "redislock") -> int:
    """Force-release every lock held now under the key prefix, and return how many there were.

    Touches only this package's own keys. The holders are not stopped: their watchdogs report the loss. On a server in
    cluster mode it scans all keys for the leases of values. Raises LockBackendError when Redis cannot answer.
    """
    server, freed, reason = server_of(client), 0, "all locks were reset"
    held: list[tuple[str, LockKeys, int | None]]
    held = [(stored.name, lock_keys(prefix, stored.name), stored.fence) for stored in list_locks(server, prefix)]
    if server.splits:
        held += [(name, keys, None) for name, keys in server.run(find_slot_locks(server, prefix)).held]
    for start in range(0, len(held), BATCH):
        batch = held[start : start + BATCH]
        calls = [operations.reset_call(keys, fence, None, reason) for _, keys, fence in batch]
        replies = server.run(with_retries_each(prefix, calls, math.inf, [server] * len(calls)))
        for (listed, _, fence), reply in zip(batch, replies, strict=True):
            if reply == 1:
                freed += 1
                name = split_slot(listed)[0]
                report_reset(f"Lock {name!r} (fence {'any' if fence is None else fence})", name, fence, None, reason)
        refused = [reply for reply in replies if isinstance(reply, LockBackendError)]
        if refused:
            raise refused[0]
    return freed


def force_release(
    client: Client | Server,
    listed: str,
    prefix: str,
    fence: int,
    by: object = None,
    reason: str = "",
    recalls: bool = False,
) -> bool:
    """Force-release (`Lock.reset`) or recall the lock or the slot of this listed name from the acquisition with that
    fence."""
    lock = Lock(client, split_slot(listed)[0], prefix=prefix)._copy(_keys=lock_keys(prefix, listed))
    return (lock.recall if recalls else lock.reset)(fence=fence, by=by, reason=reason)


class SlotLocks(NamedTuple):
    """What a scan found."""

    held: list[tuple[str, LockKeys]]
    """The names and the keys of the locks."""
    tags: set[bytes]
    """The hash tags of all keys beyond the buckets."""


def find_slot_locks(server: Server, prefix: str) -> Operation[SlotLocks]:
    """Find the leases of values on a server in cluster mode, in no order: locks in the slots of their values.

    No index lists them, so all keys are scanned. Raises LockBackendError.
    """
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


MINUTES = 60
MINUTE, WINDOW, WINDOWS = 60_000_000, 600_000_000, 6
"""Microseconds of a minute, and of the ten minutes for which names are counted; and how many of these make an hour."""


@dataclass
class Waits:
    """The waits for one lock, or the waits that ended in one minute."""

    seconds: float = 0.0
    """The length of all waits together."""
    waits: int = 0
    gave_up: int = 0
    """The number of waits that ended without the lock."""
    duplicates: int = 0
    """How often a task was not published, or did not run, because the same task was queued or running."""
    avoided: int = 0
    """How often a process received a value that another process computed meanwhile."""

    @property
    def saved(self) -> int:
        """How often the same work was not done twice."""
        return self.duplicates + self.avoided


class Contention(NamedTuple):
    """The counts of about the last hour; of many names, only the highest counts."""

    names: dict[str, Waits]
    """By name, of a semaphore by its `queue_name`: the name with the longest waits first; of equal waits, the name that
    saved most."""
    minutes: list[Waits]
    """One for each minute, the current minute last; only `seconds` and `waits` are counted."""


def contention(
    client: Client | Server,
    prefix: str = "redislock",
    *,
    retry_for: float = math.inf,
    missing: Missing | None = None,
) -> Contention:
    """Return the counts of about the last hour under the key prefix.

    Needs one command, and more with many names. `missing` gets the nodes of a Cluster whose counts are missing, and
    why; without it, one such node raises LockBackendError. Raises it also when Redis cannot answer.
    """
    server, until, waiting = server_of(client), monotonic() + retry_for, counts_keys(check_prefix(prefix))
    names: dict[str, Waits] = defaultdict(Waits)
    minutes = [Waits() for _ in range(MINUTES)]
    while waiting:
        replies = server.run(by_slot(server, waiting, lambda counts: counts, _call, until, missing))
        waiting = []
        for some, (now, after, found) in replies:
            for field, value in zip(found[::2], found[1::2], strict=True):
                if field.startswith(b"n"):
                    _add_counts(names[listed_name(field[1:])], value, int(now) // WINDOW)
                else:
                    minute, ms, count = map(int, value.split())
                    ago = int(now) // MINUTE - minute
                    if 0 <= ago < MINUTES:
                        minutes[-1 - ago].seconds += ms / 1000
                        minutes[-1 - ago].waits += count
            if after:
                waiting += some[after - 1 :]
    found_names = [item for item in names.items() if item[1].waits or item[1].saved]
    highest = sorted(found_names, key=lambda item: (item[1].seconds, item[1].saved), reverse=True)
    return Contention(dict(highest), minutes)


def _add_counts(waits: Waits, text: bytes, window: int) -> None:
    """Add the counts of a name in the last hour, as counts.lua writes them."""
    for counts in filter(None, text.split(b";")):
        at, ms, number, gave_up, duplicates, avoided = map(int, counts.split())
        if at >= window - WINDOWS:
            waits.seconds += ms / 1000
            waits.waits += number
            waits.gave_up += gave_up
            waits.duplicates += duplicates
            waits.avoided += avoided


def _call(counts: list[bytes]) -> ScriptCall:
    return ScriptCall(scripts.WAITS, tuple(counts), (b"1",))
