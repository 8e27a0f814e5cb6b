"""The lock, for asyncio."""

from __future__ import annotations

import asyncio
import inspect
import sys
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from ..exceptions import AcquireTimeout
from .acquirers import AsyncIfFree, Block, works_for
from .base import BaseLock
from .driver.async_server import async_server_of
from .driver.effects import Operation
from .driver.process import notice_fork
from .lease import Lease
from .records import LockInfo
from .validation import AS_MADE, AsMade, Seconds

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


def coroutine_function(method: F) -> F:
    """Mark a method that returns a coroutine. It is not ``async``, because it must run in the task that calls it."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(method)
    method._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return method


def current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class AsyncLock(BaseLock):
    """A lock for the tasks of asyncio; `Lock`, its equivalent for threads, describes the arguments.

    `client` is a `redis.asyncio.Redis` or a `redis.Redis`: it says where the server is, and how to connect to it. Each
    event loop has two connections of its own to the server. `on_lost(lock)` is called in the event loop of the task
    that holds the lock.

    The holder is the task that calls `acquire()`, also where another task runs the call (``asyncio.wait_for`` and
    ``gather`` make tasks). A cancelled `acquire()` holds nothing and is undone on the server; a cancelled `release()`
    has been sent. Neither keeps the task waiting, except for a second at most when the connection is gone.

    The watchdog's thread renews the lock, so that a blocked event loop loses no lock.
    """

    def _acquirer(self) -> Any:
        notice_fork()
        return current_task() or works_for.get()()

    def _run(self, operation: Callable[[Any], Operation[T]]) -> Coroutine[Any, Any, T]:
        """Run the operation for the task that calls now, whichever task awaits the result."""
        return self._run_for(current_task(), operation)

    async def _run_for(self, acquirer: Any, operation: Callable[[Any], Operation[T]]) -> T:
        try:
            server = async_server_of(self._server)
        except RuntimeError:
            raise RuntimeError(
                f"{type(self).__name__} is for asyncio only, and none of its event loops runs here (those of trio and "
                "others do not count): use Lock in a thread, as trio.to_thread.run_sync() does"
            ) from None
        return await server.run(operation(acquirer or self._acquirer()))

    @coroutine_function
    def acquire(
        self,
        blocking: bool | AsMade | None = AS_MADE,
        timeout: Seconds | AsMade | None = AS_MADE,
        *,
        blocking_timeout: Seconds | None = None,
    ) -> Coroutine[Any, Any, bool]:
        """Acquire the lock for this task, and return whether it was acquired, as `Lock.acquire` does."""
        seconds = self._wait.seconds(blocking, timeout, blocking_timeout)
        return self._run(lambda acquirer: self._acquire(acquirer, seconds))

    @coroutine_function
    def release(self) -> Coroutine[Any, Any, None]:
        """Release the lock and wake the next waiter; the errors are those of `Lock.release`."""
        return self._run(lambda acquirer: self._release(self._require_lease(acquirer)))

    def attempt(self) -> AsyncIfFree[Self]:
        """Return a block that gets the lock, or None in place of AcquireTimeout: ``async with alock("a",
        blocking=False).attempt() as held``."""
        return AsyncIfFree(self)

    if not TYPE_CHECKING:  # a type checker reports it better

        def __enter__(self):
            raise TypeError(
                f"lock {self.name!r} is for tasks of asyncio: async with alock(name); in a thread write: with "
                "lock(name)"
            )

        def __exit__(self, *error):
            """Do nothing: ``with`` needs this method before it enters."""

    @coroutine_function
    def __aenter__(self) -> Coroutine[Any, Any, Self]:
        return self._enter_block(current_task(), sys._getframe(1))

    async def _enter_block(self, acquirer: Any, frame: FrameType) -> Self:
        if not await self._run_for(acquirer, lambda acquirer: self._acquire(acquirer, self._wait.timeout)):
            raise AcquireTimeout(self.name, self._wait.timeout)
        self._blocks.append(Block(acquirer or self._acquirer(), frame))
        return self

    @coroutine_function
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return self._leave_block(sys._getframe(1), error)

    async def _leave_block(self, frame: FrameType, error: BaseException | None) -> None:
        await self._end_block(self._left_by(self._acquirer(), frame), None, error)

    async def _end_block(self, acquirer: Any, *raised: Any) -> None:
        """Leave a block of the acquirer's."""
        error = raised[1]
        if isinstance(error, GeneratorExit) and not _loop_runs():  # the loop was closed, and the task is destroyed
            self._exit_interrupted(acquirer)
            return
        await self._run_for(acquirer, lambda acquirer: self._exit(acquirer, error))

    @coroutine_function
    def extend(self, expire: Seconds | None = None) -> Coroutine[Any, Any, Literal[True]]:
        """Set the expiry of the held lock to `expire` seconds from now (None: to its own), as `Lock.extend` does."""
        return self._run(lambda acquirer: self._extend(acquirer, expire))

    @coroutine_function
    def reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Set the expiry of the held lock back to the object's own, and return True. Raises as `extend` does."""
        return self._run(lambda acquirer: self._extend(acquirer, self.expire))

    async def owner(self) -> LockInfo | None:
        """Return the holder of the lock, or None. Raises LockBackendError when Redis cannot answer."""
        return await self._run(lambda _: self._owner())

    async def locked(self) -> bool:
        """Return whether anybody holds the lock now. Raises LockBackendError when Redis cannot answer."""
        return await self.owner() is not None

    @coroutine_function
    def owned(self) -> Coroutine[Any, Any, bool]:
        """Ask Redis and return whether this task's acquisition (or the given id) holds the lock now.

        Raises LockBackendError when Redis cannot answer.
        """
        return self._run(self._owned)

    async def ttl(self) -> float | None:
        """Return the seconds until the lock's expiry, or None when nobody holds it. Raises as `owner` does."""
        holder = await self.owner()
        return None if holder is None else holder.ttl

    async def recall(self, fence: int | None = None, by: object = None, reason: str = "") -> bool:
        """Ask the holder to give the lock back, and return whether it was held; all is as for `Lock.recall`."""
        return await self._run(lambda _: self._reset(fence, by, reason, recalls=True))

    async def reset(self, fence: int | None = None, by: object = None, reason: str = "") -> bool:
        """Force-release the lock, wake the next waiter, and return whether it was held; all is as for `Lock.reset`."""
        return await self._run(lambda _: self._reset(fence, by, reason))

    # The operations, where a task differs from a thread

    def _acquire(self, acquirer: Any, timeout: float | None) -> Operation[bool]:
        if acquirer is None:
            raise RuntimeError("an AsyncLock is acquired by a task")
        acquired = yield from super()._acquire(acquirer, timeout)
        works_for.set(weakref.ref(acquirer))  # not sooner, because the wait asks who let this task work
        return acquired

    def _is_subscribed(self) -> bool:
        return async_server_of(self._server).room.open

    def _is_kept_waiting(self, acquirer: Any) -> bool:
        # Where another task runs the call, the acquirer may do something else meanwhile.
        return current_task() is acquirer

    def _release(self, lease: Lease) -> Operation[None]:
        try:
            yield from super()._release(lease)
        except asyncio.CancelledError:
            self._forget(lease)
            raise

    def _call_on_lost(self, lease: Lease) -> None:
        if hasattr(lease.acquirer, "get_loop"):  # not every task is one of asyncio's own
            with suppress(RuntimeError):  # its loop is closed, and no task is left to be notified
                lease.acquirer.get_loop().call_soon_threadsafe(super()._call_on_lost, lease)
