"""Redlock: one lock on several independent servers, held while most of them hold it.

The algorithm is Redlock of Redis' documentation ("Distributed Locks with Redis"), with one change: instead of trying
again at random times, every caller acquires the servers' locks in the order in which the servers were given, and waits
in their queues. A holder of one server's lock waits only for later servers, so that no callers wait in a circle.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

from redis import Redis

from ..exceptions import AcquireTimeout, AlreadyAcquired, LockBackendError, LockError
from . import events, operations
from .acquirers import Acquirers
from .caller_view import CallerView, chain
from .clock import monotonic
from .driver.effects import Operation
from .driver.registry import server_of
from .lock import Lock
from .loss import check_reason, report_reset
from .quorum_lease import QuorumLease, majority
from .records import LockInfo
from .validation import AS_MADE, AsMade, Nothing, Seconds, unexpected, wait_of

T = TypeVar("T")


class QuorumLock(CallerView[QuorumLease]):
    """A lock that is held on most of several independent servers, so that it outlives the loss of some of them.

    `clients` are redis-py clients of at least three servers that do not replicate each other; all programs must give
    them in the same order. The other arguments and the methods are those of `Lock`, with three differences: there is
    no fence, because servers that do not know each other cannot draw increasing numbers together; there is no `id`;
    and a server that does not answer costs its client's socket timeout in every operation.

    Its limits are those of Redlock: it relies on the servers' clocks running at about the same speed, and a server that
    lost its data must stay away for one `expire`. For a lock that guards more than efficiency see `Lock` and its fence.

    Raises TypeError and ValueError for bad arguments.
    """

    def __init__(
        self,
        clients: Iterable[Redis],
        name: str,
        *,
        expire: Seconds | None = None,
        auto_renewal: bool = True,
        max_hold: Seconds | None = None,
        blocking: bool = True,
        timeout: Seconds | None = None,
        label: str | None = None,
        on_lost: Callable[[Any], object] | None = None,
        kind: str = "lock",
        prefix: str = "redislock",
        **wrong: Unpack[Nothing],
    ) -> None:
        if wrong:
            raise unexpected(type(self).__name__, wrong, QuorumLock.__init__.__kwdefaults__ or ())
        self._servers = [server_of(client) for client in clients]
        if len(self._servers) < 3 or len({server.place for server in self._servers}) < len(self._servers):
            raise ValueError(
                "clients must be of at least three different servers: most of them must outlive the others"
            )
        self._options: dict[str, Any] = {
            "expire": expire,
            "auto_renewal": auto_renewal,
            "max_hold": max_hold,
            "label": label,
            "kind": kind,
            "prefix": prefix,
        }
        checked = Lock(self._servers[0], name, on_lost=on_lost, **self._options)  # checks the arguments now
        self._keys = checked._keys
        self.name = name
        self.on_lost = on_lost
        self._wait = wait_of(blocking, timeout)
        self._leases: Acquirers[QuorumLease] = Acquirers()

    _acquirer = staticmethod(threading.current_thread)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {len(self._servers)} servers>"

    def acquire(self, blocking: bool | AsMade = AS_MADE, timeout: Seconds | AsMade | None = AS_MADE) -> bool:
        """Acquire the lock, and return whether it was acquired; arguments and errors are those of `Lock.acquire`.

        Raises LockBackendError when too many servers cannot answer.
        """
        seconds, acquirer = self._wait.seconds(blocking, timeout), self._acquirer()
        before = self._lease_of(acquirer)
        if before is not None:
            if before.loss is None:
                raise AlreadyAcquired(self.name)
            before.release_parts()  # otherwise it would wait for them
        until = math.inf if seconds is None else monotonic() + seconds
        while True:
            lease = QuorumLease(self.name, self._servers, self._options, weakref.ref(self))
            try:
                if lease.acquire_majority(until):
                    self._leases[acquirer] = lease
                    events.emit("acquired", "Quorum lock %r acquired.", self.name, name=self.name, fence=0)
                    return True
            except BaseException:
                lease.release_parts()
                raise
            lease.release_parts()
            if monotonic() >= until:
                return False

    def release(self) -> None:
        """Release the lock on all servers and wake the next waiter.

        Raises NotAcquired when this thread does not hold it, LockLost when it was lost meanwhile, and LockBackendError
        when too many servers cannot answer: then `release` may be repeated, and otherwise the lock ends by its expiry.
        """
        acquirer = self._acquirer()
        lease = self._require_lease(acquirer)
        lease.release()
        self._leases.end(acquirer, lease.loss)
        self._raise_loss(lease)
        events.emit("released", "Quorum lock %r released.", self.name, name=self.name, fence=0)

    def extend(self, expire: Seconds | None = None) -> Literal[True]:
        """Set the expiry of the held lock to `expire` seconds from now (None: to its own), and return True.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        lease = self._require_lease(self._acquirer())
        lease.extend(expire)
        self._raise_loss(lease)
        return True

    def owner(self) -> LockInfo | None:
        """Return the holder on most servers, or None. Raises LockBackendError when too many servers cannot answer."""
        replies = self._run_on_all(lambda until: operations.read([self.name], [self._keys], until))
        found = [None if stored is None else stored.info for (stored,) in replies]
        votes = Counter(info.id for info in found if info is not None)
        needed = majority(self._servers)
        for id, count in votes.most_common(1):
            if count >= needed:
                infos: list[LockInfo] = [info for info in found if info is not None and info.id == id]
                # The lock is free when this one of them has ended.
                return sorted(infos, key=lambda info: info.ttl)[count - needed]
        return None

    def locked(self) -> bool:
        """Return whether anybody holds the lock now. Raises as `owner` does."""
        return self.owner() is not None

    def owned(self) -> bool:
        """Ask the servers and return whether this thread's acquisition holds the lock now. Raises as `owner` does."""
        lease, holder = self._lease_of(self._acquirer()), self.owner()
        return lease is not None and holder is not None and holder.id == lease.id

    def ttl(self) -> float | None:
        """Return the seconds until the lock's expiry, or None when nobody holds it. Raises as `owner` does."""
        holder = self.owner()
        return None if holder is None else holder.ttl

    def reset(self, by: object = None, reason: str = "") -> bool:
        """Force-release the lock, wake the next waiter, and return whether any server held it; the rest is as for
        `Lock.reset`.

        Raises LockBackendError when too many servers cannot answer.
        """
        check_reason(reason)
        freed = 1 in self._run_on_all(lambda until: operations.reset(self.name, self._keys, None, by, reason, until))
        if freed:
            report_reset(f"Quorum lock {self.name!r}", self.name, None, by, reason)
        return freed

    def __enter__(self) -> Self:
        if not self.acquire():
            raise AcquireTimeout(self.name, self._wait.timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        acquirer = self._acquirer()
        if self._lease_of(acquirer) is None and acquirer in self._leases:  # a forked child leaves its parent's block
            return
        try:
            self.release()
        except LockError as failure:
            if error is None:
                raise
            chain(self.name, error, failure)

    def _run_on_all(self, operation: Callable[[float], Operation[T]]) -> list[T]:
        """Return the results of the servers that answer at once; raises LockBackendError when they are too few."""
        results, cause = [], ""
        for server in self._servers:
            try:
                results.append(server.run(operation(monotonic())))
            except LockBackendError as error:
                cause = error.cause
        if len(results) < majority(self._servers):
            raise LockBackendError(self.name, cause)
        return results
