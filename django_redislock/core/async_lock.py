"""The lock, for asyncio."""

from __future__ import annotations

import asyncio
import inspect
import sys
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from ..exceptions import AcquireTimeout
from . import token as tokens
from .base import BaseLock
from .driver.async_server import acting_for, async_server_of
from .driver.effects import Operation
from .lease import Lease
from .records import LockInfo
from .reentrant import Reentrant
from .validation import AS_MADE, AsMade, Seconds

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


_works_for: ContextVar[Callable[[], asyncio.Task[Any] | None]] = ContextVar("works_for", default=lambda: None)
"""The task that acquired last, for threads that work for it: ``sync_to_async`` and ``asyncio.to_thread`` run in its context."""


def _coroutine_function(method: F) -> F:
    """Mark a method that returns a coroutine; it is not ``async`` itself, so as to see which task calls it."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(method)
    method._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return method


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


class AsyncLock(BaseLock):
    """A lock for asyncio: what `Lock` is for threads, for tasks; see there for the arguments.

    `client` is a `redis.asyncio.Redis` or a `redis.Redis`: it tells where the server is, and how to connect to it. Each event
    loop has two connections of its own to it. `on_lost(lock)` is called in the event loop of the task that holds the lock.

    The holder is the task that calls `acquire()`, also where another one runs it (``asyncio.wait_for`` and ``gather`` make
    tasks). A cancelled `acquire()` holds nothing, and takes back what it asked for; a cancelled `release()` has been sent.
    Neither keeps the task waiting, but for a second at most when the connection is gone.

    The renewal is done by the watchdog's thread, so that a blocked event loop loses no lock.
    """

    def _me(self) -> Any:
        return acting_for.get() or _current_task() or _works_for.get()()

    def _run(self, steps: Callable[[bool], Operation[T]]) -> Coroutine[Any, Any, T]:
        return self._run_for(_current_task(), steps)

    async def _run_for(self, caller: asyncio.Task[Any] | None, steps: Callable[[bool], Operation[T]]) -> T:
        try:
            server = async_server_of(self._server)
        except RuntimeError:
            raise RuntimeError(
                f"{type(self).__name__} is for asyncio only, and none of its event loops runs here (those of trio and others do "
                "not count): use Lock in a thread, as trio.to_thread.run_sync() does"
            ) from None
        return await server.run(steps(server.room.open), caller)

    @_coroutine_function
    def acquire(
        self,
        blocking: bool | AsMade | None = AS_MADE,
        timeout: Seconds | AsMade | None = AS_MADE,
        *,
        blocking_timeout: Seconds | None = None,
        token: str | bytes | None = None,
    ) -> Coroutine[Any, Any, bool]:
        """Acquire the lock, and tell whether it was acquired.

        Waits up to `timeout` seconds, for ever with None or inf; `blocking=False` tries once. Arguments that are not
        given come from the object; without arguments it waits as ``with`` does. `blocking_timeout` is redis-py's word
        for `timeout`. `token` is the id of this acquisition instead of a random one; of two acquisitions by one token,
        one holds the lock.

        Raises LockBackendError when Redis cannot answer. Raises AlreadyAcquired when this task holds the lock through this object, or through
        another one and would wait for itself for ever. If the lock that it holds is not renewed, or has `max_hold`, it waits
        for the end of that one.
        """
        seconds = self._wait.seconds(blocking, timeout, blocking_timeout)
        if token is not None:
            return self._run(lambda listening: tokens.acquire(self, token, seconds, listening))
        return self._run(lambda listening: self._acquire(seconds, listening))

    @_coroutine_function
    def release(self) -> Coroutine[Any, Any, None]:
        """Release the lock and wake the next waiter.

        Raises NotAcquired when this task does not hold it, LockLost when it was lost meanwhile, and LockBackendError when
        Redis cannot answer: then it may be repeated, and else the lock ends by its expiry.
        """
        return self._run(lambda _: self._release())

    if not TYPE_CHECKING:  # a type checker reports it better

        def __enter__(self):
            raise TypeError(
                f"lock {self.name!r} is for tasks of asyncio: async with alock(name); in a thread write: with lock(name)"
            )

        def __exit__(self, *error):
            """Do nothing: ``with`` looks for it before it enters."""

    async def __aenter__(self) -> Self:
        if not await self._run(partial(self._acquire, self._wait.timeout)):
            raise AcquireTimeout(self.name, self._wait.timeout)
        self._entrants.append(self._me())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = self._entered()
        if entered is not None:
            self._entrants.remove(entered)
        await self._run_for(entered, lambda _: self._exit(error))

    @_coroutine_function
    def extend(self, expire: Seconds | None = None) -> Coroutine[Any, Any, Literal[True]]:
        """Give the held lock a new life of `expire` seconds from now (None: of its own), and return True.

        Only the object that acquired the lock makes its life shorter: by a given id, a life that is longer stays.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        return self._run(lambda _: self._extend(expire))

    @_coroutine_function
    def reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Give the held lock the life again that its object was made with, and return True. Raises as `extend` does."""
        return self._run(lambda _: self._extend(self.expire))

    async def owner(self) -> LockInfo | None:
        """Return who holds the lock now, or None. Raises LockBackendError when Redis cannot answer."""
        return await self._run(lambda _: self._owner())

    async def locked(self) -> bool:
        """Return whether anybody holds the lock now."""
        return await self.owner() is not None

    @_coroutine_function
    def owned(self) -> Coroutine[Any, Any, bool]:
        """Return whether this task's acquisition (or the id given) holds the lock, asked of Redis now."""
        return self._run(lambda _: self._owned())

    async def ttl(self) -> float | None:
        """Return the seconds left of the lock's life, or None when nobody holds it."""
        holder = await self.owner()
        return None if holder is None else holder.ttl

    async def reset(self, fence: int | None = None, by: object = None, reason: str = "") -> bool:
        """Take the lock from whoever holds it, wake the next waiter, and tell whether it was held.

        With `fence`, only the acquisition of that number loses it. The former holder is not stopped: it is told of the loss
        within a third of its life. `by` is the user (or words) and `reason` the cause: both are reported to the former
        holder, in the log and to listeners. What no lock wrote at its key is not deleted: LockBackendError names the
        key.
        """
        return await self._run(lambda _: self._reset(fence, by, reason))

    def _entered(self) -> asyncio.Task[Any] | None:
        """Return the task that entered the block which the current one leaves: another one if that of a generator is closed."""
        me = self._me()
        entrants = list(self._entrants)  # tasks of another loop, in another thread, may leave meanwhile
        if me in entrants:
            return me  # type: ignore[no-any-return]
        ended = [task for task in entrants if task.done()]
        for candidates in (entrants, ended):
            if len(set(candidates)) == 1:  # through an AsyncRLock it may have entered several times
                return candidates[0]  # type: ignore[no-any-return]
        return None

    # The steps, where a task differs from a thread

    def _acquire(self, timeout: float | None, listening: bool) -> Operation[bool]:
        me = self._me()
        if me is None:
            raise RuntimeError("an AsyncLock is acquired by a task")
        _works_for.set(weakref.ref(me))
        return (yield from super()._acquire(timeout, listening))

    def _is_kept_waiting(self, me: Any) -> bool:
        return _current_task() is me  # and not another task that it made for that, which it may let wait

    def _release(self) -> Operation[None]:
        lease = self._own()
        try:
            yield from super()._release()
        except asyncio.CancelledError:
            self._forget(lease)
            raise

    def _call_on_lost(self, lease: Lease) -> None:
        if hasattr(lease.acquirer, "get_loop"):  # not every task is one of asyncio's own
            with suppress(RuntimeError):  # its loop is closed, and there is nobody left to be told
                lease.acquirer.get_loop().call_soon_threadsafe(super()._call_on_lost, lease)


class AsyncRLock(Reentrant, AsyncLock):
    """A lock that the task that holds it may acquire again, through any AsyncRLock object of the same name and database.

    Each further entry refreshes the life and proves that the lock is still held: a lost one raises LockLost. The last exit
    releases. For the arguments see `Lock`.
    """
