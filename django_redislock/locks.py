"""The locks and semaphores with the server and the defaults of the settings; several of them as one; their list, and
`reset_all()`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, Unpack

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from . import conf
from .connections import server
from .core import listing
from .core.acquirers import AsyncIfFree, Block, IfFree, forget, leave
from .core.async_lock import AsyncLock, coroutine_function
from .core.base import BaseLock
from .core.clock import monotonic
from .core.lease import calling_thread
from .core.lock import Lock
from .core.options import LockOptions as CoreLockOptions
from .core.records import LockInfo
from .core.semaphore import AsyncSemaphore, Semaphore
from .core.validation import Seconds, check_flag, check_limit, check_name, unexpected, wait_of
from .exceptions import AcquireTimeout, LockError, LossRecord
from .transactions import UNTIL_COMMIT, WARN_BEFORE_COMMIT, in_atomic

L = TypeVar("L", bound=BaseLock)


class LockOptions(CoreLockOptions, total=False):
    """The options of every lock of the settings; see `lock`."""

    timeout: Seconds | None
    using: str | None


class AtomicOptions(LockOptions, total=False):
    """The options of `locked_atomic`."""

    blocking: bool
    reentrant: bool


def lock(
    name: str,
    *,
    blocking: bool = True,
    until_commit: bool | None = None,
    reentrant: bool = False,
    **options: Unpack[LockOptions],
) -> Lock:
    """Return the lock `name` on the Redis that the settings name, or on the Redis of the cache alias `using`.

    The admin, metrics and commands look at the connection of the settings and at the caches of this package: the locks
    of another alias are seen by ``redislock list --connection ALIAS``.

    `expire` (until the lock ends without renewal), `max_hold` (of the renewal) and `timeout` (of the wait) are seconds
    or timedeltas. Missing options come from ``DJANGO_REDISLOCK``; `Lock` describes them all, and the errors and losses
    of a lock. Raises TypeError and ValueError that name a wrong argument, and ImproperlyConfigured for wrong settings.

    `until_commit`: give True when the lock protects writes to the database. Then a release inside ``atomic()``, or
    inside a request with ATOMIC_REQUESTS, happens after the commit or the rollback of the outermost block, of all
    databases in use (with autocommit off, after the next ``commit()`` or ``rollback()``). The lock is renewed until
    then, and the same transaction may acquire it again. If the lock is lost before the commit, the transaction is
    rolled back and LockLost is raised. Under REPEATABLE READ or SERIALIZABLE a transaction that read before it acquired
    the lock still sees that old state; `locked_atomic` acquires the lock first.

    With None such a release happens at once and is logged as a mistake, once for each place in the code. With False,
    for locks that protect nothing in the database, it is not logged.

    `reentrant`: the thread that holds the lock may acquire it again, through any re-entrant lock of that name; see
    `Lock`. With ``until_commit=True`` it may in any case.
    """
    if until_commit is not None or reentrant is not False:
        check_flags(until_commit, reentrant)
    settings = conf.get()
    made = _build("lock", Lock, settings, name, blocking, options, reentrant=bool(reentrant or until_commit))
    if until_commit is not False and settings.enabled:  # else nobody is kept out, and so nothing waits for the commit
        made._transactions = UNTIL_COMMIT if until_commit else WARN_BEFORE_COMMIT
    return made


def rlock(
    name: str, *, blocking: bool = True, until_commit: bool | None = None, **options: Unpack[LockOptions]
) -> Lock:
    """Return a lock that the thread that holds it may acquire again: ``lock(name, reentrant=True)``."""
    return lock(name, blocking=blocking, until_commit=until_commit, reentrant=True, **options)


def alock(name: str, *, blocking: bool = True, reentrant: bool = False, **options: Unpack[LockOptions]) -> AsyncLock:
    """Return the lock `name` for asyncio: ``async with alock("invoice:42", timeout=10): ...``.

    Options, units and errors are those of `lock`. Tasks, threads and processes share the lock and its queue. A task
    that loses the lock gets LockLost from `raise_if_lost`, `extend` and the end of the block; see `AsyncLock`.
    """
    check_flags(None, reentrant)
    return _build("alock", AsyncLock, conf.get(), name, blocking, options, reentrant=reentrant)


def semaphore(name: str, limit: int, *, blocking: bool = True, **options: Unpack[LockOptions]) -> Semaphore:
    """Return a semaphore: at most `limit` holders of `name` at a time: ``with semaphore("crm", 20, timeout=5): ...``.

    `limit` is 1 to 100, the same for all callers; `Semaphore` says what different ones do. The other options, their
    units, the errors and the losses are those of `lock`, but it is not re-entrant, and it knows no transactions.
    """
    return _build("semaphore", Semaphore, conf.get(), name, blocking, options, limit=check_limit(limit))


def asemaphore(name: str, limit: int, *, blocking: bool = True, **options: Unpack[LockOptions]) -> AsyncSemaphore:
    """Return a semaphore for asyncio: ``async with asemaphore("crm", 20): ...``. `semaphore` describes it."""
    return _build("asemaphore", AsyncSemaphore, conf.get(), name, blocking, options, limit=check_limit(limit))


def check_flags(until_commit: object, reentrant: object) -> None:
    """Raise TypeError that names the option, unless both are flags; `until_commit` may be None."""
    if until_commit is not None and not isinstance(until_commit, bool):
        raise TypeError(f"until_commit must be True, False or None, not {until_commit!r}")
    check_flag(reentrant, "reentrant")


def _build(
    function: str,
    of: Callable[..., L],
    settings: conf.Settings,
    name: str,
    blocking: bool,
    options: LockOptions,
    **own: bool | int,
) -> L:
    """Return the lock on its server, with the defaults of the settings in place of None.

    `own`: the arguments that only this kind has. Raises TypeError that names an unknown option.
    """
    if not options and blocking is True and settings.timeout is None:
        return _default_lock(of, settings, None, own)._like(name)
    if wrong := options.keys() - NAMES:
        raise unexpected(function, wrong, {*NAMES, *own, "blocking"})
    given: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
    using, timeout = given.pop("using", None), given.pop("timeout", settings.timeout if blocking else None)
    if not given:
        return _default_lock(of, settings, using, own)._like(name, wait_of(blocking, timeout))
    defaults = {**settings.lock_options, **given, **own}
    return of(server(settings, using), name, blocking=blocking, timeout=timeout, **defaults)


NAMES = LockOptions.__optional_keys__
_default_locks: tuple[conf.Settings | None, dict[tuple[Any, ...], Any]] = (None, {})
"""The settings in force, and locks with their defaults. Locks without options of their own are copies of these."""


def _default_lock(of: Callable[..., L], settings: conf.Settings, using: str | None, own: dict[str, bool | int]) -> L:
    global _default_locks
    settings_of, found = _default_locks
    if settings_of is not settings:
        _default_locks = _, found = settings, {}
    key = (of, using, *own.values())
    try:
        return found[key]  # type: ignore[no-any-return]
    except KeyError:
        default = found[key] = of(server(settings, using), "any", **settings.lock_options, **own)
        return default


def held_locks(using: str | None = None) -> Iterator[LockInfo]:
    """Yield a LockInfo of each lock held now on the Redis that the settings name, or on the Redis of the cache alias
    `using`.

    They are the locks under ``KEY_PREFIX``, in the order of their names; with ``ENABLED: False`` there are none. Raises
    LockBackendError when Redis does not answer or refuses the command.
    """
    settings = conf.get()
    return listing.held_locks(server(settings, using), settings.key_prefix)


def reset_all(using: str | None = None) -> int:
    """Force-release every lock that `held_locks` yields, and return their number.

    Changes only keys of this package. The holders are not stopped; each is notified of the loss at its next renewal.
    Raises LockBackendError when Redis does not answer or refuses a command; then some of the locks may be released.
    """
    settings = conf.get()
    return listing.reset_all(server(settings, using), settings.key_prefix)


@contextmanager
def locked_atomic(name: str, *, database: str | None = None, **options: Unpack[AtomicOptions]) -> Iterator[Lock]:
    """Hold a lock around a transaction on `database`: acquired before its begin, released after its commit or rollback.

    `options` are those of `lock`. Raises RuntimeError inside another atomic block of that database and with autocommit
    off, because its commit would come after the release, and every error of the acquisition. If the lock is lost before
    the commit, the transaction is rolled back and LockLost is raised.
    """
    wanted = lock(name, until_commit=False, **options)
    connection = connections[database or DEFAULT_DB_ALIAS]
    # `get_autocommit` would open a connection, and each waiter would keep one.
    opened = connection.connection is not None
    autocommit = connection.autocommit if opened else connection.settings_dict["AUTOCOMMIT"]
    if in_atomic(connection) or not (connection.in_atomic_block or autocommit):
        raise RuntimeError(
            f"locked_atomic({name!r}) cannot be used inside an atomic block, in a request with ATOMIC_REQUESTS or with "
            "autocommit off: the commit would come after the release. Use lock(..., until_commit=True) there."
        )
    with wanted as held, transaction.atomic(using=database):
        yield held
        held.raise_if_lost()


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
        self._blocks: list[Block] = []
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

    def attempt(self) -> IfFree[Self]:
        """Return a block that gets the locks, or None in place of AcquireTimeout when one was not free in time."""
        return IfFree(self)

    def __enter__(self) -> Self:
        acquirer = calling_thread()
        block = Block(acquirer, sys._getframe(1))
        had = {name: each._holding(acquirer) for name, each in self._locks.items()}
        try:
            for each, seconds in self._with_time_left():
                if not each.acquire(timeout=seconds):
                    raise AcquireTimeout(each.name, self._timeout)
            self._blocks.append(block)
            return self
        except BaseException as error:  # perhaps of a signal handler, after the acquisition of any of them
            forget(self._blocks, block)
            with ExitStack() as gained:
                for name, each in self._locks.items():
                    if each._has_gained(acquirer, had[name]):
                        # Not the lock's own end of a block: it would wait for the commit, and nothing was written yet.
                        gained.callback(each._end_block, acquirer, type(error), error, now=True)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        acquirer = None
        begun: dict[str, Any] = {}
        try:  # from the first line on: a handler may raise before each of the releases
            acquirer = self._left_by(sys._getframe(1))
            self._end_blocks(begun, acquirer, kind, error, trace)
        except LockError:
            raise
        except BaseException as interruption:
            acquirer = acquirer or self._left_by(sys._getframe(1))
            self._end_blocks(begun, acquirer, type(interruption), interruption, None)
            raise

    def _left_by(self, frame: FrameType) -> Any:
        acquirer = calling_thread()
        block = leave(self._blocks, acquirer, frame)
        return acquirer if block is None else block.acquirer

    def _end_blocks(self, begun: dict[str, Any], acquirer: Any, *raised: Any) -> None:
        """Leave the blocks that are not left; `begun` is for what the acquirer had at the begin of each end."""

        def end(each: Lock, *raised: Any) -> None:
            begun[each.name] = each._holding(acquirer)
            each._end_block(acquirer, *raised)
            begun[each.name] = None

        stack = ExitStack()  # every lock is released, even if the release of another one fails
        for each in self._locks.values():
            # A handler may raise in an end before it is the lock's own: then the acquirer has what it had. A lock that
            # was only noted stayed, was renewed, and each further ``with`` raised AlreadyAcquired.
            if each.name not in begun or begun[each.name] == each._holding(acquirer):
                stack.push(partial(end, each))
        stack.__exit__(*raised)


class AsyncLocks(_Several[AsyncLock]):
    """The locks of `alock_all` by name, for the tasks of asyncio. An ``async with`` block acquires and releases all of
    them."""

    def attempt(self) -> AsyncIfFree[Self]:
        """Return a block that gets the locks, or None in place of AcquireTimeout when one was not free in time."""
        return AsyncIfFree(self)

    @coroutine_function
    def __aenter__(self) -> Coroutine[Any, Any, Self]:
        return self._enter_block(sys._getframe(1))

    async def _enter_block(self, frame: FrameType) -> Self:
        async with AsyncExitStack() as acquired:
            for each, seconds in self._with_time_left():
                if not await each.acquire(timeout=seconds):
                    raise AcquireTimeout(each.name, self._timeout)
                acquired.push_async_exit(partial(each._end_block, each._acquirer()))
            acquired.pop_all()
        self._blocks.append(Block(each._acquirer(), frame))
        return self

    @coroutine_function
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return self._leave_block(sys._getframe(1), kind, error, trace)

    async def _leave_block(self, frame: FrameType, *raised: Any) -> None:
        acquirer = next(iter(self._locks.values()))._acquirer()
        block = leave(self._blocks, acquirer, frame)
        stack = AsyncExitStack()
        for each in self._locks.values():
            stack.push_async_exit(partial(each._end_block, acquirer if block is None else block.acquirer))
        await stack.__aexit__(*raised)
