"""A value that is wanted, the right to compute it, and what came of it."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from logging import DEBUG
from types import TracebackType
from typing import Any, NamedTuple

from redis.exceptions import NoPermissionError

from ...core import events
from ...core.clock import monotonic
from ...core.driver.server import Server
from ...core.keys import LockKeys
from ...core.lease import Lease
from ...core.records import new_id
from ...core.validation import fitting_name
from ...exceptions import LockBackendError
from ..stats import Counters
from .cluster_slots import is_clustered, lease_keys

MISSING: Any = object()
KIND = "cache:"

Owner = threading.Thread | asyncio.Task[Any]


class ValueLease(Lease):
    """The right to compute a value for all. To lose it is no error: then others may compute the value, too."""

    ended = False
    waited = False
    """Whether it came after waiting for somebody else's."""
    has_waited = False
    """Whether its computation has waited for other values: then Redis may have an entry of that wait."""

    def report_loss(self) -> None:
        """Log it: nobody else needs to know."""
        if self.noted_loss is not None:
            events.log.info("The right to compute %r for all has ended: %s.", self.name, self.noted_loss.reason)


computing: ContextVar[tuple[ValueLease, ...]] = ContextVar("computing", default=())
"""The leases under which this thread or task computes: a value may need another one."""


@dataclass(frozen=True, slots=True)
class ValueRequest:
    """A value that is wanted, and how to come by it."""

    server: Server
    prefix: str
    key: str
    """Of the value, in Redis."""
    default: Callable[[], Any]
    pack: Callable[[Any], tuple[bytes, int | None]]
    """From a value to the bytes to store, and their life in milliseconds."""
    unpack: Callable[[bytes], Any]
    """From stored bytes to the value, or MISSING when it is too old."""
    expire: float
    auto_renewal: bool
    max_hold: float | None
    forgiving: bool
    """Without Redis compute all the same."""
    should_cache: Callable[[Any], object] | None = None
    """Whether a value is to be stored; one that is not goes to those who wait for it now."""
    tally: Counters = field(default_factory=Counters)
    pack_failure: Callable[[Exception], bytes] = lambda error: repr(error).encode()
    """From what `default` raised to what those who wait are sent."""
    unpack_failure: Callable[[bytes], Exception] = lambda data: RuntimeError(data.decode())
    id: str = ""
    """Of the lease, when another process took it for this one."""
    asked_as: Any = None
    """The key as its caller knows it, when many are wanted together."""

    @property
    def name(self) -> str:
        """The name of the lock."""
        return lease_name(self.key)

    def lease(self, owner: Owner) -> ValueLease:
        """Return a lease to be acquired."""
        name = self.name
        keys = lease_keys(self.server, self.prefix, name, self.key)
        return ValueLease(self.server, name, keys, self.id or new_id(), self.expire, owner, self.max_hold, lambda: None)


class Outcome(NamedTuple):
    """How a flight for a value ended."""

    data: bytes | None = None
    value: Any = MISSING
    """The value, made from the data for one caller alone."""
    error: BaseException | None = None
    trace: TracebackType | None = None
    """Of the error, before anybody raised it again."""
    shared: bool = False
    """Whether it answers everybody who waited for it, too."""
    absent: bool = False
    """Whether who was to compute it had nothing."""

    @property
    def empty(self) -> bool:
        """Whether it brought nothing: the time to wait was over."""
        return self.data is None and self.error is None and not self.absent


def is_interruption(error: BaseException) -> bool:
    """Whether it ends the work of one caller alone, and says nothing of the value; Celery's soft time limit is an Exception."""
    return not isinstance(error, Exception) or any(
        kind.__name__ == "SoftTimeLimitExceeded" for kind in type(error).__mro__
    )


def outer(server: Server) -> list[ValueLease]:
    """Return the leases under which the caller computes now."""
    return [lease for lease in computing.get() if lease.server is server and not lease.ended]


def is_below(server: Server, name: str = "") -> bool:
    """Whether the caller computes under a lease of a server with a higher place: then it must not wait.

    No server sees a circle of computations over several servers. If each waits only for computations on servers with a
    higher place, there is no circle. In cluster mode no script sees more than one slot: there a lease with a higher
    name counts, too.
    """
    leases = [lease for lease in computing.get() if not lease.ended]
    if not leases:
        return False
    if any(_place(lease.server) > _place(server) for lease in leases):
        return True
    return is_clustered(server) and any(lease.server is server and lease.name >= name for lease in leases)


def _place(server: Server) -> list[str]:
    return [str(server.settings.get(name)) for name in ("host", "port", "path", "db")]


_forbidden: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()
ASKED_AGAIN_AFTER = 60.0
"""Seconds after which a server that refused a lease for want of permissions is asked for one again."""


_told: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()
TOLD_AGAIN_AFTER = 60.0
"""Seconds for which an error of Redis that the cache ignores is not logged as a warning again."""


def level_of(server: Server, forgiving: bool) -> int | None:
    """Return the log level for a server that does not answer; None: the usual one."""
    return DEBUG if forgiving and monotonic() < _told.get(server, 0.0) else None


def note_told(server: Server) -> None:
    """Note that the error was logged now."""
    if level_of(server, True) is None:
        _told[server] = monotonic() + TOLD_AGAIN_AFTER


def is_forbidden(server: Server) -> bool:
    """Whether the server refused leases just now: they need more permissions than values do."""
    return monotonic() < _forbidden.get(server, 0.0)


def is_refusal(error: LockBackendError, server: Server) -> bool:
    """Whether permissions are missing for leases: then it is said, and they are done without for a while."""
    if not isinstance(error.__cause__, NoPermissionError):
        return False
    _forbidden[server] = monotonic() + ASKED_AGAIN_AFTER
    events.log.warning(
        "Values are not computed once, and what is computed may overwrite what was deleted meanwhile: the user of Redis needs "
        "+@scripting and the keys of the locks (%s). `manage.py redislock doctor` tells more.",
        error.cause,
    )
    return True


def lease_name(key: str) -> str:
    """Return the name of the lock under which the value of the key is computed."""
    return fitting_name(KIND + key, lambda: hashlib.sha256(key.encode()).hexdigest())


def era_key(keys: LockKeys) -> bytes:
    """Return the key of the era: its deletion makes all witnesses of the bucket void."""
    return keys.held[: -len(b"held")] + b"era"
