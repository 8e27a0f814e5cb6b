"""The quorum lock, for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

from ..exceptions import AcquireTimeout, LockError
from .acquirers import chain, works_for
from .async_lock import coroutine_function, current_task
from .quorum import BaseQuorumLock
from .quorum_lease import QuorumLease
from .records import LockInfo
from .validation import AS_MADE, AsMade, Seconds


class AsyncQuorumLock(BaseQuorumLock):
    """A quorum lock for the tasks of asyncio; `QuorumLock`, its equivalent for threads, describes the arguments.

    The clients are `redis.asyncio.Redis` or `redis.Redis`. Holder and cancellation are as for `AsyncLock`.
    """

    def _acquirer(self) -> Any:
        return current_task() or works_for.get()()

    @coroutine_function
    def acquire(
        self, blocking: bool | AsMade = AS_MADE, timeout: Seconds | AsMade | None = AS_MADE
    ) -> Coroutine[Any, Any, bool]:
        """Acquire the lock for this task, and return whether it was acquired, as `QuorumLock.acquire` does."""
        return self._acquire(current_task(), self._wait.seconds(blocking, timeout))

    async def _acquire(self, acquirer: Any, seconds: float | None) -> bool:
        task = current_task()
        acquirer = acquirer or task
        works_for.set(weakref.ref(acquirer))
        for lease, until in self._attempts(acquirer, seconds, kept_waiting=task is acquirer):
            try:
                if await lease.acquire(until):
                    return self._accept(lease)
            except BaseException:
                lease.abandon()
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

    async def owner(self) -> LockInfo | None:
        """Return the holder on most servers, or None. Raises LockBackendError when too many servers cannot answer."""
        return await self._owner()

    async def locked(self) -> bool:
        """Return whether anybody holds the lock now. Raises as `owner` does."""
        return await self._owner() is not None

    @coroutine_function
    def owned(self) -> Coroutine[Any, Any, bool]:
        """Ask the servers and return whether this task's acquisition holds the lock now. Raises as `owner` does."""
        return self._owned(self._lease_of(self._acquirer()))

    async def _owned(self, lease: QuorumLease | None) -> bool:
        holder = await self._owner()
        return lease is not None and holder is not None and holder.id == lease.id

    async def ttl(self) -> float | None:
        """Return the seconds until the lock's expiry, or None when nobody holds it. Raises as `owner` does."""
        holder = await self._owner()
        return None if holder is None else holder.ttl

    async def reset(self, by: object = None, reason: str = "") -> bool:
        """Force-release the lock and wake the next waiter; all is as for `QuorumLock.reset`."""
        return await self._reset(by, reason)

    async def __aenter__(self) -> Self:
        if not await self.acquire():
            raise AcquireTimeout(self.name, self._wait.timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        acquirer = self._acquirer()
        if acquirer not in self._leases and len(self._leases) == 1:  # another task closes a generator
            (acquirer,) = self._leases
        try:
            await self._release(acquirer)
        except LockError as failure:
            if error is None:
                raise
            chain(self.name, error, failure)

    def _call_on_lost(self, lease: QuorumLease) -> None:
        with suppress(RuntimeError):  # its loop is closed, and no task is left to be notified
            lease.acquirer.get_loop().call_soon_threadsafe(super()._call_on_lost, lease)
