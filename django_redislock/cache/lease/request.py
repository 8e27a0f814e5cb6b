"""The request for a value, its plain read, the lease under which it is computed, and the outcome."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import weakref
from binascii import crc_hqx
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from logging import DEBUG
from types import TracebackType
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from redis.crc import key_slot
from redis.exceptions import ClusterCrossSlotError, NoPermissionError

from ...core import events
from ...core.attempt import Attempt
from ...core.clock import monotonic
from ...core.driver.cluster.table import SLOTS
from ...core.driver.effects import CallAside, Invoke, Operation, Pipeline, with_retries
from ...core.driver.resp import NotPrimary
from ...core.driver.server import Server
from ...core.keys import BUCKETS, LockKeys, counts_key, keys_in, lock_keys, new_id, witness_key
from ...core.lease import Lease, calling_thread
from ...core.operations import report_wait
from ...core.options import Renewal
from ...core.validation import MAX_NAME, fitting_name
from ...exceptions import LockBackendError
from .counters import Counters

MISSING: Any = object()
KIND = "cache:"

Acquirer = threading.Thread | asyncio.Task[Any]


class Caller(NamedTuple):
    """The thread or task that wants a value, and the waiting room in which it sleeps."""

    acquirer: Acquirer
    room: Any

    @classmethod
    def thread(cls, server: Any) -> Caller:
        """Return the calling thread."""
        return cls(calling_thread(), server.room)

    @classmethod
    def task(cls, server: Any) -> Caller:
        """Return the running task; raises RuntimeError outside of one."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an asynchronous method of the cache must be awaited in a task")
        return cls(task, server.room)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of a task."""
        return self.acquirer.get_loop() if isinstance(self.acquirer, asyncio.Task) else None


class Mode(NamedTuple):
    """How far a caller goes for a value that another one may compute."""

    until: float
    """It waits until this time on the monotonic clock; -inf: not at all."""
    alone: bool = False
    """Whether it does not wait for other processes: it computes for itself what another one computes, and stores the
    value only while that one's lease stands."""
    old: bytes | None = None
    """The stale value that is to be replaced."""


class ValueKeys(NamedTuple):
    """The keys of a value beside those of its lease's lock."""

    value: bytes
    witness: bytes
    era: bytes
    """The witness and the era show whether the value was invalidated since the lease was acquired."""
    counts: bytes
    failures: bytes
    """The number of failed computations of a stale value."""


class ValueLease(Lease):
    """The right to compute a value for all processes. Its loss is no error: other processes may compute, too."""

    of_value: ValueKeys
    ended = False
    waited = False
    """Whether its caller waited for another lease of the same value before."""

    def report_loss(self) -> None:
        """Log the loss; no other code needs to know."""
        if self.noted_loss is not None:
            events.log.info("The lease of the value %r ended early: %s.", self.name, self.noted_loss.reason)


class ValueAttempt(Attempt):
    """The calls of one caller for the lease of a value."""

    __slots__ = ()
    lease: ValueLease


computing: ContextVar[tuple[ValueLease, ...]] = ContextVar("computing", default=())
"""The leases of what this thread or task computes, also of what it computes without having them; there are several
when one value needs another one."""


LARGE_TO_DECODE = 131072
"""Bytes from which on a task has a thread decode a value: 50 MB of compressed data held up the loop for 0.7 s."""


@dataclass(slots=True)  # not frozen, which sets each of its fields by a call
class ValueRequest:
    """One caller's request for a value, with the functions that compute, serialize and deserialize it."""

    server: Server
    prefix: str
    key: str
    """The key of the value in Redis."""
    default: Callable[[], Any]
    dumps: Callable[[str, Any], tuple[bytes, int | None]]
    """Turns a key and its value into the bytes to store, and their expiry in milliseconds (None: never)."""
    loads: Callable[[str, bytes], Any]
    """Turns a key and stored bytes into the value, or into MISSING when it is too old."""
    renewal: Renewal
    """The life of the lease."""
    ignore_errors: bool
    """Whether to compute without a lease when Redis cannot be reached (IGNORE_EXCEPTIONS)."""
    should_cache: Callable[[Any], object] | None = None
    """Decides whether a value is stored; a value that is not stored still goes to the current waiters."""
    calls_site: bool = False
    """Whether functions of the site, for the timeout or `should_cache`, take part when a value is serialized."""
    not_in_loop: type[Exception] | tuple[()] = ()
    """What `dumps` raises when it must not run in an event loop: a lazy QuerySet asks the database."""
    counters: Counters = field(default_factory=Counters)
    dump_failure: Callable[[str, Exception], bytes] = lambda key, error: repr(error).encode()
    """Turns an error of `default` into the bytes that are sent to the waiters."""
    load_failure: Callable[[str, bytes], Exception] = lambda key, data: RuntimeError(data.decode())
    id: str = ""
    """The owner id of the lease, when another process acquired it for this one."""
    due_ms: int = 0
    """The milliseconds before its expiry at which a stale value is due for a refresh; 0: unknown."""
    caller_key: Any = None
    """The key as the caller gave it."""
    is_silent: bool = False
    """Whether the server did not answer the caller a moment ago, and the caller ignores that: it is not asked again,
    because each question takes one more time-out."""
    through: Any = None
    """The methods of a value that a subclass of the cache overrides (`Through`), None if there are none."""

    @property
    def name(self) -> str:
        """The name of the lease's lock."""
        return lease_name(self.key)

    @property
    def is_own(self) -> bool:
        """Whether the caller computes this value now: its lease would be waited for by its own computation."""
        own = computing.get() and enclosing_leases()
        return any(lease.name == self.name and lease.server.place == self.server.place for lease in own)

    def report_wait(self, began: float, answered: bool) -> None:
        """Count the seconds of a wait for another caller's computation that began then, and report it as a wait for the
        lease's lock; 0: there was none."""
        if began:
            self.counters.count("seconds_waited", monotonic() - began)
            report_wait(self.name, began, answered)

    def decode(self, data: bytes) -> Operation[Any]:
        """Return what `loads` makes of stored bytes; the loop of a task goes on meanwhile if they are many."""
        if self.through is not None and self.through.by_task:
            return (yield from self.call_overridden(partial(self.loads, self.key, data)))
        if len(data) < LARGE_TO_DECODE:
            return self.loads(self.key, data)
        return (yield CallAside(partial(self.loads, self.key, data)))

    def call_overridden(self, function: Callable[[], Any]) -> Operation[Any]:
        """Call a function that calls an overridden method, for a task where Django's own methods call it."""
        value, error = yield Invoke(sync_to_async(function) if self.through.by_task else function)
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # it refers to this frame

    @property
    def forgives(self) -> bool:
        """Whether an error of Redis may be a miss, so that it is not waited for the server."""
        return self.ignore_errors or (self.through is not None and self.through.reads)

    def forgive(self, error: LockBackendError, call: Callable[[BaseException], Any] | None) -> Operation[None]:
        """Raise the error unless the request ignores it, or the overridden method that `call` calls with it does."""
        if self.ignore_errors:
            return
        if self.through is None or call is None:
            raise error
        own = redis_error(error)
        try:
            yield from self.call_overridden(partial(call, own))
        except Exception as raised:
            if raised is own:
                raise error from own
            raise LockBackendError(*error.args) from raised

    def encode(self, value: Any) -> tuple[bytes, int | None]:
        """Return the bytes of the value, and their expiry in milliseconds (None: never; 0: it is not stored)."""
        data, expiry_ms = self.dumps(self.key, value)
        is_refused = self.should_cache is not None and not self.should_cache(value)
        return data, 0 if is_refused else expiry_ms

    def lease(self, acquirer: Acquirer) -> ValueLease:
        """Return a lease that is not acquired yet."""
        name = self.name
        keys = lock_keys(self.prefix, name)
        if self.server.splits:
            keys = lease_keys(self.server, self.prefix, name, self.key)
        lease = ValueLease(self.server, name, keys, self.id or new_id(), self.renewal, acquirer)
        lease.of_value = value_keys(keys, self.key)
        return lease


class Verdict(Enum):
    """What a caller of a value is told, and so has to do."""

    VALUE = "the value is there"
    LARGE = "a large value is there, and has to be fetched"
    FAILED = "the caller that computed it failed"
    COMPUTE = "the caller has the lease, and computes for all callers"
    WAIT = "another caller computes it"
    PAUSED = "a refresh failed a moment ago, and the caller has a stale value"
    OWN = "the caller computes it itself now, and needs it for that: it computes without waiting"
    UNREACHABLE = "the server cannot be reached, and the request ignores errors"
    FORBIDDEN = "the server allows no leases"


class Answer(NamedTuple):
    """The verdict, and what belongs to it."""

    verdict: Verdict
    data: bytes = b""
    """The value or the error, serialized; of a large value the message about it, or b""."""
    value: Any = MISSING
    """The value, deserialized for this caller."""
    fence: bytes = b""
    """The fence of the lease, whoever holds it."""
    old_digest: bytes = b""
    """The digest of the stale value that is to be replaced, b"" if there is none."""
    old_expires_at: bytes = b""
    """The time at which the stale value expires."""


class Outcome(NamedTuple):
    """The result of a request: a value, an error, or neither when the time to wait ended."""

    data: bytes | None = None
    value: Any = MISSING
    """The value, deserialized for one caller alone."""
    error: BaseException | None = None
    trace: TracebackType | None = None
    """The traceback of the error, before it is raised again."""
    shared: bool = False
    """Whether it is also the outcome of all followers."""
    absent: bool = False
    """Whether the function for many keys returned no value for this key."""

    @property
    def empty(self) -> bool:
        """Whether there is neither a value nor an error, because the time to wait ended."""
        return self.data is None and self.error is None and not self.absent


def enclosing_leases() -> list[ValueLease]:
    """Return the leases of the values that the caller computes now, on all servers."""
    return [lease for lease in computing.get() if not lease.ended]


_forbidden: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()
ASK_AGAIN_AFTER_REFUSAL = 60.0
"""Seconds for which a server that refused a lease, because permissions are missing, is not asked again."""

_logged: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()
_ignored: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()
LOG_AGAIN_AFTER = 60.0
"""Seconds for which the next ignored error of the same server is logged as DEBUG only."""


def log_level(server: Server, ignore_errors: bool) -> int | None:
    """Return the level at which an error of the server is logged; None: the usual one."""
    return DEBUG if ignore_errors and monotonic() < _logged.get(server, 0.0) else None


def note_logged(server: Server) -> None:
    """Remember that an error of the server was ignored and logged now."""
    _ignored[server] = monotonic()
    if log_level(server, True) is None:
        _logged[server] = monotonic() + LOG_AGAIN_AFTER


def report_silence(request: ValueRequest, error: LockBackendError) -> None:
    """Report that the server did not answer, and that the caller ignored it."""
    level = log_level(request.server, True)
    events.emit("backend_error", "%s", str(error), name=request.name, cause=error.cause, level=level)
    note_logged(request.server)


def was_ignored_since(server: Server, began: float) -> bool:
    """Whether an error of the server was ignored since this time on the monotonic clock."""
    return _ignored.get(server, -math.inf) >= began


def redis_error(error: LockBackendError) -> BaseException:
    """Return the error of redis-py that the base class would raise."""
    cause = error.__cause__ or error
    return cause.reply if isinstance(cause, NotPrimary) else cause


def is_forbidden(server: Server) -> bool:
    """Whether the server refused a lease in the last minute, because a lease needs more permissions than a value."""
    return monotonic() < _forbidden.get(server, 0.0)


def is_refusal(error: LockBackendError, server: Server) -> bool:
    """Whether permissions are missing for leases. If so, log it, and do not ask the server for a lease for a while."""
    if not isinstance(error.__cause__, NoPermissionError):
        return False
    _forbidden[server] = monotonic() + ASK_AGAIN_AFTER_REFUSAL
    events.log.warning(
        "The Redis user may not use leases of values (%s). For the next %g s several processes may compute the same "
        "value, and a computed value may overwrite a later delete. Give the user +@scripting and access to the keys of "
        "the locks; `manage.py redislock doctor` shows the missing permissions.",
        error.cause,
        ASK_AGAIN_AFTER_REFUSAL,
    )
    return True


def lease_name(key: str) -> str:
    """Return the name of the lock that is the lease of the key's value."""
    name = KIND + key
    if len(name) <= MAX_NAME // 4:  # a character has four bytes at most
        return name
    return fitting_name(name, lambda: hashlib.sha256(key.encode()).hexdigest())


def era_key(keys: LockKeys) -> bytes:
    """Return the key of the era. Its deletion makes all witnesses of the bucket void."""
    return keys.held[: -len(b"held")] + b"era"


def value_keys(keys: LockKeys, key: str) -> ValueKeys:
    """Return the keys of a value beside those of its lease."""
    failures = keys.held.removesuffix(b"held") + b"failed:" + keys.name
    return ValueKeys(key.encode(), witness_key(keys), era_key(keys), counts_key(keys), failures)


def lease_keys(server: Server, prefix: str, name: str, key: str) -> LockKeys:
    """Return the keys of the lease of this name, whose value has this key.

    In cluster mode all keys of one script must be in one slot, that of the value. Such a server is recognised by its
    answer CROSSSLOT to the first script that names a value and its lease. From then on the lease of a value has its
    keys in the value's slot. Such a server never grants a lease under other keys, so all processes agree.
    """
    if not server.splits:
        return lock_keys(prefix, name)
    number = _numbers(prefix)[key_slot(key.encode())]
    return keys_in(b"{%b:%d}" % (prefix.encode(), number), name)


@lru_cache(maxsize=4)
def _numbers(prefix: str) -> dict[int, int]:
    """Return for each slot a number whose hash tag is in that slot; none of them is the number of a bucket."""
    found: dict[int, int] = {}
    start, number = crc_hqx(prefix.encode() + b":", 0), BUCKETS
    while len(found) < SLOTS:
        found.setdefault(crc_hqx(b"%d" % number, start) % SLOTS, number)
        number += 1
    return found


def read_value(key: str, with_ttl: bool) -> Operation[tuple[bytes | None, int]]:
    """Read a value and its time to live in milliseconds (-1: it never expires; -2: unknown, or it has just expired)."""
    commands = ((b"GET", key.encode()),) + (((b"PTTL", key.encode()),) if with_ttl else ())
    _, replies = yield from with_retries(lease_name(key), Pipeline(commands), monotonic())
    return replies[0], replies[1] if with_ttl else -2


RENDERING_LIFE_MS = 3_600_000
"""Longer than a rendering of a page takes: one that takes longer is not stored."""


def begin_rendering(mark: str, token: str) -> Operation[str]:
    """Write the mark of a rendering, unless other renderings of the page have written it; return what it holds."""
    key = mark.encode()
    commands = ((b"SET", key, token.encode(), b"NX", b"PX", b"%d" % RENDERING_LIFE_MS), (b"GET", key))
    _, (_, value) = yield from with_retries(lease_name(mark), Pipeline(commands), monotonic())
    return (value or b"").decode()


def end_rendering(mark: str) -> Operation[tuple[bytes | None, int]]:
    """Delete the mark, and return what it held, as `read_value` does."""
    commands = ((b"GET", mark.encode()), (b"DEL", mark.encode()))
    _, (value, _) = yield from with_retries(lease_name(mark), Pipeline(commands), monotonic())
    return value, -2


def read_values(server: Server, keys: list[str]) -> Operation[list[bytes | None]]:
    """Read many values: by one command, or by one for each value if they are in several slots."""
    name, raw = lease_name(keys[0]), [key.encode() for key in keys]
    if not server.splits:
        try:
            _, replies = yield from with_retries(name, Pipeline(((b"MGET", *raw),)), monotonic())
            return list(replies[0])
        except LockBackendError as error:
            if not isinstance(error.__cause__, ClusterCrossSlotError):
                raise
    _, replies = yield from with_retries(name, Pipeline(tuple((b"GET", key) for key in raw)), monotonic())
    return list(replies)
