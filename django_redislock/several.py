"""`lock_all()` and `alock_all()`: several locks at once, always in the same order, so that no two callers wait for each
other without end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from .core.async_lock import AsyncLock
from .core.base import BaseLock
from .core.clock import monotonic
from .core.lock import Lock
from .core.validation import check_name
from .exceptions import AcquireTimeout, LossRecord
from .locks import AtomicOptions, alock, lock

L = TypeVar("L", bound=BaseLock)


def lock_all(names: Iterable[str], *, until_commit: bool | None = None, **options: Unpack[AtomicOptions]) -> Locks:
    """Return the locks of these names, to hold all of them in one ``with`` block.

    The block acquires them in the order of their sorted names, each name once, and releases them in reverse. `timeout`
    is for all of them together: if one is not free in time, those already acquired are released at once, and
    AcquireTimeout names that one. ``held["account:1"]`` is the lock of one name. All options are those of `lock`;
    `on_lost` is called with each lock that is lost.

    If one of the locks is lost, `raise_if_lost` and the end of the block raise LockLost; the others are released.

    Raises TypeError when `names` is a str or holds anything but str, and ValueError when it is empty.
    """
    return Locks({name: lock(name, until_commit=until_commit, **options) for name in _in_order("lock_all", names)})


def alock_all(names: Iterable[str], **options: Unpack[AtomicOptions]) -> AsyncLocks:
    """Return the locks of these names for asyncio: ``async with alock_all([...], timeout=5) as held: ...``.

    The order, the errors and the losses are those of `lock_all`, and the options are those of `alock`.
    """
    return AsyncLocks({name: alock(name, **options) for name in _in_order("alock_all", names)})


def _in_order(function: str, names: Iterable[str]) -> list[str]:
    """Return each name once, in the order in which every caller acquires them."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{function}() takes several names, such as a list of str, not {names!r}")
    found = sorted({check_name(name) for name in names})
    if not found:
        raise ValueError(f"{function}() needs at least one name")
    return found


class _Several(Mapping[str, L]):
    """Locks by name. The object keeps no acquisition itself, so threads or tasks may share it as they share a lock."""

    def __init__(self, locks: dict[str, L]) -> None:
        self._locks = locks
        self._timeout = next(iter(locks.values()))._wait.timeout

    def __getitem__(self, name: str) -> L:
        return self._locks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._locks)

    def __len__(self) -> int:
        return len(self._locks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {list(self._locks)!r}>"

    @property
    def lost(self) -> LossRecord | None:
        """Return why one of the locks was lost, or None while all are held. Sends no command."""
        return next((each.lost for each in self._locks.values() if each.lost is not None), None)

    def raise_if_lost(self) -> None:
        """Raise LockLost if one of the locks was lost: call it before each irreversible step. Sends no command.

        Raises NotAcquired outside of the block.
        """
        for each in self._locks.values():
            each.raise_if_lost()

    def _with_time_left(self) -> Iterator[tuple[L, float | None]]:
        """Yield each lock, and the seconds that are left for it of the timeout of all."""
        until = None if self._timeout is None else monotonic() + self._timeout
        for each in self._locks.values():
            yield each, None if until is None else max(0.0, until - monotonic())


class Locks(_Several[Lock]):
    """The locks of `lock_all` by name, for threads. A ``with`` block acquires and releases all of them."""

    def __enter__(self) -> Self:
        with ExitStack() as acquired:
            for each, seconds in self._with_time_left():
                if not each.acquire(timeout=seconds):
                    raise AcquireTimeout(each.name, self._timeout)
                # Not the lock's own end of a block: it would wait for the commit, and nothing was written yet.
                acquired.push(each._exit_now)
            acquired.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = ExitStack()  # every lock is released, even if the release of another one fails
        for each in self._locks.values():
            stack.push(each)
        stack.__exit__(kind, error, trace)


class AsyncLocks(_Several[AsyncLock]):
    """The locks of `alock_all` by name, for the tasks of asyncio. An ``async with`` block acquires and releases all of
    them."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as acquired:
            for each, seconds in self._with_time_left():
                if not await each.acquire(timeout=seconds):
                    raise AcquireTimeout(each.name, self._timeout)
                each._entrants.append(each._acquirer())
                acquired.push_async_exit(each)
            acquired.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        stack = AsyncExitStack()
        for each in self._locks.values():
            stack.push_async_exit(each)
        await stack.__aexit__(kind, error, trace)
