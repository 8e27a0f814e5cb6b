"""Redlock: one lock on several independent servers, held while most of them hold it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, starmap
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from ..exceptions import AcquireTimeout, AlreadyAcquired, LockBackendError, LockError
from . import events, operations
from .acquirers import Acquirers, CallerView, chain, holders
from .clock import monotonic
from .driver.cluster.cluster import is_same
from .driver.effects import Operation
from .driver.registry import server_of
from .driver.server import Server
from .driver.side_by_side import on_servers, run_in_loop
from .lease import calling_thread
from .lock import Lock
from .loss import check_reason, report_reset
from .operations import SELF_WAIT
from .quorum_lease import QuorumLease
from .records import LockInfo, StoredLock
from .validation import AS_MADE, AsMade, Nothing, Seconds, check_expire, unexpected, wait_of

SHORTEST_EXPIRE = 0.01
"""Seconds; of a shorter expiry, the allowance for clocks leaves next to nothing."""
T = TypeVar("T")


class BaseQuorumLock(CallerView[QuorumLease]):
    """A lock that is held on most of several independent servers, so that it outlives the loss of some of them.

    `clients` are redis-py clients of at least three servers that do not replicate each other. A Cluster is one of them,
    by `redis.RedisCluster` or `redis.asyncio.RedisCluster`. The other arguments and the methods are those of `Lock`,
    with two differences: there is no fence, because servers that do not know each other cannot draw increasing numbers
    together, and there is no `id`.

    All servers are asked at the same time. Most of them suffice: the others are waited for during some milliseconds,
    and a server that did not answer is left out for two seconds. A part that a server lost is taken anew while the
    lock is held.

    Its limits are those of Redlock: it relies on the servers' clocks running at about the same speed (it allows for 1 %
    of `expire`), and a server that lost its data must stay away for one `expire`. For a lock that guards more than
    efficiency see `Lock` and its fence.

    Raises TypeError and ValueError for bad arguments.
    """

    def __init__(
        self,
        clients: Iterable[Redis | AsyncRedis],
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
            raise unexpected(type(self).__name__, wrong, BaseQuorumLock.__init__.__kwdefaults__ or ())
        self._servers = [server_of(client) for client in clients]
        if len(self._servers) < 3 or any(starmap(is_same, combinations(self._servers, 2))):
            raise ValueError(
                "clients must be of at least three different servers: most of them must outlive the others"
            )
        self._template = Lock(
            self._servers[0],
            name,
            expire=expire,
            auto_renewal=auto_renewal,
            max_hold=max_hold,
            label=label,
            on_lost=on_lost,
            kind=kind,
            prefix=prefix,
        )
        if self._template.expire < SHORTEST_EXPIRE:
            raise ValueError(f"expire must be at least {SHORTEST_EXPIRE} seconds for a quorum lock, not {expire!r}")
        self._keys = self._template._keys
        self.name = name
        self.on_lost = on_lost
        self._wait = wait_of(blocking, timeout)
        self._leases: Acquirers[QuorumLease] = Acquirers()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {len(self._servers)} servers>"

    def _attempts(
        self, acquirer: Any, seconds: float | None, kept_waiting: bool = True
    ) -> Iterator[tuple[QuorumLease, float]]:
        """Yield the acquisitions to try, each with the time at which to give it up, until one succeeds.

        `kept_waiting`: the acquirer can do nothing else meanwhile.
        """
        until = math.inf if seconds is None else monotonic() + seconds
        before = self._lease_of(acquirer)
        if before is not None and before.loss is None:
            raise AlreadyAcquired(self.name)
        if seconds != 0 and kept_waiting and self._holds_through_another_object(acquirer):
            yield QuorumLease(self._servers, self._template, acquirer, self), monotonic()  # perhaps lost unnoticed
            if seconds is None:
                raise AlreadyAcquired(self.name)
            events.log.warning(SELF_WAIT, self.name, 0)
        yield QuorumLease(self._servers, self._template, acquirer, self), until

    def _holds_through_another_object(self, acquirer: Any) -> bool:
        leases = [lease for server in self._servers for lease in holders.leases_of(server, self._keys, acquirer)]
        held = [lease for lease in leases if lease.loss is None and lease.renewing and lease.max_hold is None]
        return len(held) >= majority(self._servers)

    def _accept(self, lease: QuorumLease) -> bool:
        self._report_wait(lease, acquired=True)
        self._leases[lease.acquirer] = lease
        events.emit("acquired", "Quorum lock %r acquired.", self.name, name=self.name, fence=0)
        return True

    def _report_wait(self, lease: QuorumLease, acquired: bool) -> None:
        if lease.waited:
            message, name, seconds = "Quorum lock %r was waited for %.3f s (acquired: %s).", self.name, lease.waited
            events.emit("waited", message, name, seconds, acquired, name=name, seconds=seconds, acquired=acquired)

    def _end(self, lease: QuorumLease) -> None:
        """Forget an acquisition that was released. Raises LockLost when it was lost."""
        self._leases.end(lease.acquirer, lease.loss)
        self._raise_loss(lease)
        events.emit("released", "Quorum lock %r released.", self.name, name=self.name, fence=0)

    async def _extend(self, lease: QuorumLease, expire: Seconds | None) -> Literal[True]:
        await lease.extend(None if expire is None else check_expire(expire))
        self._raise_loss(lease)
        return True

    async def _owner(self) -> LockInfo | None:
        def votes(stored: dict[Server, list[StoredLock | None]]) -> list[tuple[str, int]]:
            held = [lock for (lock,) in stored.values() if lock is not None]
            return Counter(root_of(lock.id) for lock in held).most_common(1) or [("", 0)]

        def is_decided(stored: dict[Server, list[StoredLock | None]], unanswered: int) -> bool:
            return not needed - unanswered <= votes(stored)[0][1] < needed

        needed = majority(self._servers)
        stored, cause = await self._on_all(lambda until: operations.read([self.name], [self._keys], until), is_decided)
        if not is_decided(stored, len(self._servers) - len(stored)):
            raise LockBackendError(self.name, cause)
        ((id, count),) = votes(stored)
        if count < needed:
            return None
        infos = [lock.info for (lock,) in stored.values() if lock is not None and root_of(lock.id) == id]
        # The lock ends with this part: from then on, too few parts are held.
        return replace(sorted(infos, key=lambda info: info.ttl)[count - needed], id=id)

    async def _reset(self, by: object, reason: str) -> bool:
        check_reason(reason)
        needed = majority(self._servers)
        replies, cause = await self._on_all(
            lambda until: operations.reset(self.name, self._keys, None, by, reason, until),
            lambda replies, _: len(replies) >= needed,
        )
        if len(replies) < needed:
            raise LockBackendError(self.name, cause)
        freed = 1 in replies.values()
        if freed:
            report_reset(f"Quorum lock {self.name!r}", self.name, None, by, reason)
        return freed

    async def _on_all(
        self, operation: Callable[[float], Operation[T]], enough: Callable[[dict[Server, T], int], bool]
    ) -> tuple[dict[Server, T], str]:
        return await on_servers({server: operation(monotonic()) for server in self._servers}, enough)


class QuorumLock(BaseQuorumLock):
    __doc__ = BaseQuorumLock.__doc__

    _acquirer = staticmethod(calling_thread)

    def acquire(self, blocking: bool | AsMade = AS_MADE, timeout: Seconds | AsMade | None = AS_MADE) -> bool:
        """Acquire the lock, and return whether it was acquired; arguments and errors are those of `Lock.acquire`.

        Raises LockBackendError when too many servers cannot answer.
        """
        for lease, until in self._attempts(self._acquirer(), self._wait.seconds(blocking, timeout)):
            try:
                if run_in_loop(partial(lease.acquire, until)):
                    return self._accept(lease)
            except BaseException:
                lease.abandon()
                raise
            self._report_wait(lease, acquired=False)
        return False

    def release(self) -> None:
        """Release the lock on all servers and wake the next waiter.

        Raises NotAcquired when this thread does not hold it, LockLost when it was lost meanwhile, and LockBackendError
        when too many servers cannot answer: then `release` may be repeated, and otherwise the lock ends by its expiry.
        """
        lease = self._require_lease(self._acquirer())
        run_in_loop(lease.release)
        self._end(lease)

    def extend(self, expire: Seconds | None = None) -> Literal[True]:
        """Set the expiry of the held lock to `expire` seconds from now (None: to its own), and return True.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        return run_in_loop(partial(self._extend, self._require_lease(self._acquirer()), expire))

    def owner(self) -> LockInfo | None:
        """Return the holder on most servers, or None. Raises LockBackendError when too many servers cannot answer."""
        return run_in_loop(self._owner)

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
        return run_in_loop(partial(self._reset, by, reason))

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


def majority(servers: list[Server]) -> int:
    """Return the smallest number of the servers that is more than half of them."""
    return len(servers) // 2 + 1


def root_of(id: str) -> str:
    """Return the id of a quorum lock's acquisition by the id of one of its parts."""
    return id.partition(".")[0]
