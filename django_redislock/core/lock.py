"""The lock, for threads."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from ..exceptions import AcquireTimeout
from . import token as tokens
from .base import BaseLock
from .records import LockInfo
from .reentrant import Reentrant
from .validation import AS_MADE, AsMade, Seconds


class Lock(BaseLock):
    __doc__ = BaseLock.__doc__

    _me = staticmethod(threading.current_thread)

    def acquire(
        self,
        blocking: bool | AsMade | None = AS_MADE,
        timeout: Seconds | AsMade | None = AS_MADE,
        *,
        blocking_timeout: Seconds | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock, and tell whether it was acquired.

        Waits up to `timeout` seconds, for ever with None or inf; `blocking=False` tries once. Arguments that are not
        given come from the object; without arguments it waits as ``with`` does. `blocking_timeout` is redis-py's word
        for `timeout`. `token` is the id of this acquisition instead of a random one; of two acquisitions by one token,
        one holds the lock.

        Raises LockBackendError when Redis cannot answer. Raises AlreadyAcquired when this thread holds the lock through this object, or through
        another one and would wait for itself for ever. If the lock that it holds is not renewed, or has `max_hold`, it waits
        for the end of that one.
        """
        seconds, listening = self._wait.seconds(blocking, timeout, blocking_timeout), self._server.room.open
        if token is not None:
            return self._server.run(tokens.acquire(self, token, seconds, listening))
        return self._server.run(self._acquire(seconds, listening))

    def release(self) -> None:
        """Release the lock and wake the next waiter.

        Raises NotAcquired when this thread does not hold it, LockLost when it was lost meanwhile, and LockBackendError when
        Redis cannot answer: then it may be repeated, and else the lock ends by its expiry.
        """
        self._server.run(self._release())

    def __enter__(self) -> Self:
        if not self._server.run(self._acquire(self._wait.timeout, self._server.room.open)):
            raise AcquireTimeout(self.name, self._wait.timeout)
        return self

    if not TYPE_CHECKING:  # a type checker reports it better

        async def __aenter__(self):
            raise TypeError(f"lock {self.name!r} is for threads; in a task of asyncio write: async with alock(name)")

        async def __aexit__(self, *error):
            """Do nothing: ``async with`` looks for it before it enters."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.run(self._exit(error))

    def extend(self, expire: Seconds | None = None) -> Literal[True]:
        """Give the held lock a new life of `expire` seconds from now (None: of its own), and return True.

        Only the object that acquired the lock makes its life shorter: by a given id, a life that is longer stays.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        return self._server.run(self._extend(expire))

    def reacquire(self) -> Literal[True]:
        """Give the held lock the life again that its object was made with, and return True. Raises as `extend` does."""
        return self._server.run(self._extend(self.expire))

    def owner(self) -> LockInfo | None:
        """Return who holds the lock now, or None. Raises LockBackendError when Redis cannot answer."""
        return self._server.run(self._owner())

    def locked(self) -> bool:
        """Return whether anybody holds the lock now."""
        return self.owner() is not None

    def owned(self) -> bool:
        """Return whether this thread's acquisition (or the id given) holds the lock, asked of Redis now."""
        return self._server.run(self._owned())

    def ttl(self) -> float | None:
        """Return the seconds left of the lock's life, or None when nobody holds it."""
        holder = self.owner()
        return None if holder is None else holder.ttl

    def reset(self, fence: int | None = None, by: object = None, reason: str = "") -> bool:
        """Take the lock from whoever holds it, wake the next waiter, and tell whether it was held.

        With `fence`, only the acquisition of that number loses it. The former holder is not stopped: it is told of the loss
        within a third of its life. `by` is the user (or words) and `reason` the cause: both are reported to the former
        holder, in the log and to listeners. What no lock wrote at its key is not deleted: LockBackendError names the
        key.
        """
        return self._server.run(self._reset(fence, by, reason))


class RLock(Reentrant, Lock):
    """A lock that the thread that holds it may acquire again, through any RLock object of the same name and database.

    Each further entry refreshes the life and proves that the lock is still held: a lost one raises LockLost. The last exit
    releases. For the arguments see `Lock`.
    """
