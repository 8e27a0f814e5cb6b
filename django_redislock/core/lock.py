"""The lock, for threads."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ..exceptions import AcquireTimeout, LockError, NotAcquired
from .acquirers import Block, IfFree, chain, forget
from .base import BaseLock
from .lease import calling_thread
from .records import LockInfo
from .validation import AS_MADE, AsMade, Seconds


class Lock(BaseLock):
    __doc__ = BaseLock.__doc__

    _acquirer = staticmethod(calling_thread)

    def acquire(
        self,
        blocking: bool | AsMade | None = AS_MADE,
        timeout: Seconds | AsMade | None = AS_MADE,
        *,
        blocking_timeout: Seconds | None = None,
    ) -> bool:
        """Acquire the lock, and return whether it was acquired.

        Waits up to `timeout` seconds, without limit with None or inf; `blocking=False` tries once. Arguments that are
        not given come from the object; without arguments it waits as ``with`` does. `blocking_timeout` is redis-py's
        word for `timeout`.

        Raises LockBackendError when Redis cannot answer. Raises AlreadyAcquired when this thread holds the lock through
        this object, or holds it through another object and would wait for itself without end. If the held lock is not
        renewed, or has `max_hold`, the thread waits for its end.
        """
        seconds, acquirer = self._wait.seconds(blocking, timeout, blocking_timeout), self._acquirer()
        had = self._holding(acquirer)
        try:
            return self._server.carry_out(self._acquire(acquirer, seconds))
        except BaseException:
            self._take_back(acquirer, had)
            raise

    def release(self) -> None:
        """Release the lock and wake the next waiter.

        Raises NotAcquired when this thread does not hold it, LockLost when it was lost meanwhile, and LockBackendError
        when Redis cannot answer: then `release` may be repeated, or `acquire` called, which repeats it; otherwise the
        lock ends by its expiry. It counts as held no more.
        """
        acquirer = self._acquirer()
        if self._transactions is None or not self._transactions.postpones(self, acquirer):
            self._server.carry_out(self._release(self._require_lease(acquirer)))

    def __enter__(self) -> Self:
        acquirer = self._acquirer()
        block, had = Block(acquirer, sys._getframe(1)), self._holding(acquirer)
        try:
            if not self._server.carry_out(self._acquire(acquirer, self._wait.timeout)):
                raise AcquireTimeout(self.name, self._wait.timeout)
            self._blocks.append(block)
            return self
        except BaseException:
            forget(self._blocks, block)
            self._take_back(acquirer, had)
            raise

    def attempt(self) -> IfFree[Self]:
        """Return a block that gets the lock, or None in place of AcquireTimeout when it was not free in time: ``with
        lock("a", blocking=False).attempt() as held: if held: ...``"""
        return IfFree(self)

    if not TYPE_CHECKING:  # a type checker reports it better

        async def __aenter__(self):
            raise TypeError(f"lock {self.name!r} is for threads; in a task of asyncio write: async with alock(name)")

        async def __aexit__(self, *error):
            """Do nothing: ``async with`` needs this method before it enters."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        acquirer = None
        try:  # from the first line on: a handler may raise before the release is sent
            acquirer = self._left_by(self._acquirer(), sys._getframe(1))
            if self._transactions is None or not self._is_postponed(acquirer, error):
                self._server.carry_out(self._exit(acquirer, error))
        except LockError:
            raise
        except BaseException:
            acquirer = acquirer or self._left_by(self._acquirer(), sys._getframe(1))
            if self._transactions is None or not self._is_postponed(acquirer, error):
                self._exit_interrupted(acquirer)
            raise

    def _end_block(self, acquirer: Any, *raised: Any, now: bool = False) -> None:
        """Leave a block of the acquirer's, after the transactions that are open; or now."""
        try:  # from the first line on, as in `__exit__`
            error = raised[1] if raised else None
            if now or self._transactions is None or not self._is_postponed(acquirer, error):
                self._server.carry_out(self._exit(acquirer, error))
        except LockError:
            raise
        except BaseException:
            if now or self._transactions is None or not self._is_postponed(acquirer, raised[1] if raised else None):
                self._exit_interrupted(acquirer)
            raise

    def _is_postponed(self, acquirer: Any, error: BaseException | None) -> bool:
        """Return whether transactions leave the block later, or left it already. Raises NotAcquired."""
        try:
            return self._transactions is not None and self._transactions.postpones(self, acquirer)
        except NotAcquired as failure:
            if error is None:
                raise
            chain(self.name, error, failure)
            return True

    def extend(self, expire: Seconds | None = None) -> Literal[True]:
        """Set the expiry of the held lock to `expire` seconds from now (None: to its own), and return True.

        Only the object that acquired the lock shortens its expiry, by an `expire` that ends earlier. By a given id, and
        without `expire`, a later end in Redis stays.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        return self._server.carry_out(self._extend(self._acquirer(), expire))

    def reacquire(self) -> Literal[True]:
        """Set the expiry of the held lock back to the object's own, and return True. Raises as `extend` does."""
        return self._server.carry_out(self._extend(self._acquirer(), self.expire))

    def owner(self) -> LockInfo | None:
        """Return the holder of the lock, or None. Raises LockBackendError when Redis cannot answer."""
        return self._server.run(self._owner())

    def locked(self) -> bool:
        """Return whether anybody holds the lock now. Raises LockBackendError when Redis cannot answer."""
        return self.owner() is not None

    def owned(self) -> bool:
        """Ask Redis and return whether this thread's acquisition (or the given id) holds the lock now.

        Raises LockBackendError when Redis cannot answer.
        """
        return self._server.carry_out(self._owned(self._acquirer()))

    def ttl(self) -> float | None:
        """Return the seconds until the lock's expiry, or None when nobody holds it.

        Raises LockBackendError when Redis cannot answer.
        """
        holder = self.owner()
        return None if holder is None else holder.ttl

    def recall(self, fence: int | None = None, by: object = None, reason: str = "") -> bool:
        """Ask the holder to give the lock back, and return whether the lock was held.

        Redis refuses its renewals from now on. So the holder learns of the loss within a third of the expiry; it is
        told who asked (`by`) and why (`reason`). Nobody else gets the lock before the holder has released it, or its
        expiry has passed: no two callers ever believe that they hold it. A lock that is not renewed is held until its
        expiry. A second call changes nothing. `fence` and the errors are those of `reset`.
        """
        return self._server.run(self._reset(fence, by, reason, recalls=True))

    def reset(self, fence: int | None = None, by: object = None, reason: str = "") -> bool:
        """Force-release the lock of any holder, wake the next waiter, and return whether the lock was held.

        With `fence`, only the acquisition of that number loses the lock. The former holder is not stopped: its watchdog
        reports the loss within a third of the expiry. `by` is the user (or words) and `reason` the cause: both are
        reported to the former holder, in the log and to listeners.

        Raises LockBackendError when Redis cannot answer, and when something other than a lock wrote the key: then the
        error names the key, and nothing is deleted.
        """
        return self._server.run(self._reset(fence, by, reason))
