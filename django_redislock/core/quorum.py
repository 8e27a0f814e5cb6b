"""Redlock: one lock on several independent servers, held while most of them hold it."""

from __future__ import annotations

import asyncio
import math
import sys
import weakref
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import combinations, starmap
from types import FrameType, TracebackType
from typing import Any, Literal, Self, Unpack

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from ..exceptions import AcquireTimeout, AlreadyAcquired, LockError
from . import events
from .acquirers import Acquirers, Block, CallerView, chain, forget, holders, works_for
from .async_lock import coroutine_function, current_task
from .clock import monotonic
from .driver.cluster.cluster import is_same
from .driver.process import notice_fork
from .driver.registry import server_of
from .driver.side_by_side import run_in_loop
from .lease import calling_thread
from .lock import Lock
from .operations import SELF_WAIT
from .options import CoreOptions, checked_options
from .quorum_lease import QuorumLease
from .validation import AS_MADE, AsMade, Seconds, check_expire, wait_of

SHORTEST_EXPIRE = 0.01
"""Seconds; of a shorter expiry, the allowance for clocks leaves next to nothing."""


class BaseQuorumLock(CallerView[QuorumLease]):
    """A lock that is held on most of several independent servers, so that it outlives the loss of some of them.

    `clients` are redis-py clients of at least three servers that do not replicate each other. A Cluster is one of them,
    by `redis.RedisCluster` or `redis.asyncio.RedisCluster`. The other arguments are those of `Lock`. There is no fence,
    because servers that do not know each other cannot draw increasing numbers together, and no `id`.

    It is an ordinary lock of that name on each server. All servers are asked at the same time, and most of them
    suffice: the others are waited for during some milliseconds, and a server that did not answer is left out for two
    seconds. An attempt that gets too few gives them back, and is repeated after a random pause, so waiters are not
    served in order. `held_locks(client)` lists the lock of each server, and ``Lock(client, name).reset()`` frees it.

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
        blocking: bool = True,
        timeout: Seconds | None = None,
        **options: Unpack[CoreOptions],
    ) -> None:
        checked_options(type(self).__name__, options, ("id", "min_replicas", "reentrant"))
        self._servers = [server_of(client) for client in clients]
        if len(self._servers) < 3 or any(starmap(is_same, combinations(self._servers, 2))):
            raise ValueError(
                "clients must be of at least three different servers: most of them must outlive the others"
            )
        self._template = Lock(self._servers[0], name, **options)
        expire = self._template.expire
        if expire < SHORTEST_EXPIRE:
            raise ValueError(f"expire must be at least {SHORTEST_EXPIRE} seconds for a quorum lock, not {expire!r}")
        self._keys = self._template._keys
        self.name = name
        self.on_lost = self._template.on_lost
        self._wait = wait_of(blocking, timeout)
        self._leases: Acquirers[QuorumLease] = Acquirers()
        self._blocks = []

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
            if not before.ended:
                raise AlreadyAcquired(self.name)
            self._abandon(before)  # its release was not answered
        if seconds != 0 and kept_waiting and self._holds_through_another_object(acquirer):
            yield QuorumLease(self._servers, self._template, acquirer, self), monotonic()  # perhaps lost unnoticed
            if seconds is None:
                raise AlreadyAcquired(self.name)
            events.log.warning(SELF_WAIT, self.name, 0)
        yield QuorumLease(self._servers, self._template, acquirer, self), until

    def _holds_through_another_object(self, acquirer: Any) -> bool:
        leases = [lease for server in self._servers for lease in holders.leases_of(server, self._keys, acquirer)]
        held = [lease for lease in leases if lease.loss is None and lease.renewing and lease.renewal.max_hold is None]
        return len(held) > len(self._servers) // 2

    def _accept(self, lease: QuorumLease) -> bool:
        self._report_wait(lease, acquired=True)
        self._leases[lease.acquirer] = lease
        events.emit("acquired", "Quorum lock %r acquired.", self.name, name=self.name, fence=0)
        return True

    def _abandon(self, lease: QuorumLease) -> None:
        lease.abandon()
        if self._leases.get(lease.acquirer) is lease:  # what it gives back now would be reported as lost
            self._leases.end(lease.acquirer, None)

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
        self._raise_unless_held(lease)
        await lease.extend(None if expire is None else check_expire(expire))
        self._raise_loss(lease)
        return True


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
                self._abandon(lease)
                raise
            self._report_wait(lease, acquired=False)
        return False

    def release(self) -> None:
        """Release the lock on all servers and wake the next waiter.

        Raises NotAcquired when this thread does not hold it, LockLost when it was lost meanwhile, and LockBackendError
        when too many servers cannot answer: then `release` may be repeated, and otherwise the lock ends by its expiry.
        """
        self._release(self._acquirer())

    def _release(self, acquirer: Any) -> None:
        lease = self._require_lease(acquirer)
        run_in_loop(lease.release)
        self._end(lease)

    def extend(self, expire: Seconds | None = None) -> Literal[True]:
        """Set the expiry of the held lock to `expire` seconds from now (None: to its own), and return True.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        return run_in_loop(partial(self._extend, self._require_lease(self._acquirer()), expire))

    def __enter__(self) -> Self:
        acquirer = self._acquirer()
        block, had = Block(acquirer, sys._getframe(1)), self._leases.get(acquirer)
        try:
            if not self.acquire():
                raise AcquireTimeout(self.name, self._wait.timeout)
            self._blocks.append(block)
            return self
        except BaseException:  # perhaps of a signal handler, after the acquisition
            forget(self._blocks, block)
            lease = self._leases.get(acquirer)
            if lease is not None and lease is not had:
                self._abandon(lease)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        acquirer = None
        try:  # from the first line on: a handler may raise before the release is sent
            acquirer = self._left_by(self._acquirer(), sys._getframe(1))
            if self._lease_of(acquirer) is not None or acquirer not in self._leases:  # else of a forked child's parent
                self._release(acquirer)
        except LockError as failure:
            if error is None:
                raise
            chain(self.name, error, failure)
        except BaseException:
            lease = self._lease_of(acquirer or self._left_by(self._acquirer(), sys._getframe(1)))
            if lease is not None:
                self._abandon(lease)
            raise


class AsyncQuorumLock(BaseQuorumLock):
    """A quorum lock for the tasks of asyncio; `QuorumLock`, its equivalent for threads, describes the arguments.

    The clients are `redis.asyncio.Redis` or `redis.Redis`. Holder and cancellation are as for `AsyncLock`.
    """

    def _acquirer(self) -> Any:
        notice_fork()
        return current_task() or works_for.get()()

    @coroutine_function
    def acquire(
        self, blocking: bool | AsMade = AS_MADE, timeout: Seconds | AsMade | None = AS_MADE
    ) -> Coroutine[Any, Any, bool]:
        """Acquire the lock for this task, and return whether it was acquired, as `QuorumLock.acquire` does."""
        return self._acquire(current_task(), self._wait.seconds(blocking, timeout))

    async def _acquire(self, acquirer: Any, seconds: float | None) -> bool:
        notice_fork()
        task = current_task()
        acquirer = acquirer or task
        works_for.set(weakref.ref(acquirer))
        for lease, until in self._attempts(acquirer, seconds, kept_waiting=task is acquirer):
            try:
                if await lease.acquire(until):
                    return self._accept(lease)
            except BaseException:
                self._abandon(lease)
                raise
            self._report_wait(lease, acquired=False)
        return False

    @coroutine_function
    def release(self) -> Coroutine[Any, Any, None]:
        """Release the lock on all servers and wake the next waiter; the errors are those of `QuorumLock.release`."""
        return self._release(self._acquirer())

    async def _release(self, acquirer: Any) -> None:
        lease = self._require_lease(acquirer or self._acquirer())
        try:
            await lease.release()
        except asyncio.CancelledError:  # it has been sent
            self._leases.end(lease.acquirer, lease.loss)
            raise
        self._end(lease)

    @coroutine_function
    def extend(self, expire: Seconds | None = None) -> Coroutine[Any, Any, Literal[True]]:
        """Set the expiry of the held lock to `expire` seconds from now (None: to its own), as `QuorumLock.extend`."""
        return self._extend(self._require_lease(self._acquirer()), expire)

    @coroutine_function
    def __aenter__(self) -> Coroutine[Any, Any, Self]:
        return self._enter_block(current_task(), sys._getframe(1))

    async def _enter_block(self, acquirer: Any, frame: FrameType) -> Self:
        if not await self._acquire(acquirer, self._wait.timeout):
            raise AcquireTimeout(self.name, self._wait.timeout)
        self._blocks.append(Block(acquirer or self._acquirer(), frame))
        return self

    @coroutine_function
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return self._leave_block(sys._getframe(1), error)

    async def _leave_block(self, frame: FrameType, error: BaseException | None) -> None:
        try:
            await self._release(self._left_by(self._acquirer(), frame))
        except LockError as failure:
            if error is None:
                raise
            chain(self.name, error, failure)

    def _call_on_lost(self, lease: QuorumLease) -> None:
        with suppress(RuntimeError):  # its loop is closed, and no task is left to be notified
            lease.acquirer.get_loop().call_soon_threadsafe(super()._call_on_lost, lease)
