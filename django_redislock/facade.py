"""`lock()`, `alock()` and `@locked`: the lock with the client and the defaults of the settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, ParamSpec, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from . import conf, signals  # noqa: F401  (signals: so that they are sent)
from .connections import get_client
from .core.aio import AsyncLock
from .core.base import BaseLock
from .core.keys import MAX_SECONDS, Seconds, check_name
from .core.lock import Lock
from .core.server import UNLOCKED
from .exceptions import AcquireTimeout
from .transactions import UntilCommitLock, WatchedLock, in_atomic

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound=BaseLock)


def lock(
    name: str,
    *,
    expire: Seconds | None = None,
    auto_renewal: bool | None = None,
    max_hold: Seconds | None = None,
    id: str | None = None,
    blocking: bool = True,
    timeout: Seconds | None = None,
    label: str | None = None,
    on_lost: Callable[[Lock], object] | None = None,
    using: str | None = None,
    kind: str = "lock",
    until_commit: bool | None = None,
) -> Lock:
    """Return the lock `name` on the Redis that the settings name, or on that of the cache alias `using`.

    What is not given comes from ``DJANGO_REDISLOCK``; see `Lock` for the rest.

    `until_commit`: True for what is written to the database under the lock. Then a release inside ``atomic()``, or inside a
    request with ATOMIC_REQUESTS, happens after the commit or the rollback of the outermost block, of all databases in use (with
    autocommit off, after the next ``commit()`` or ``rollback()``). The lock is renewed until then, and the same transaction
    may take it again. If it is lost before the commit, the transaction is rolled back and LockLost raised. Under REPEATABLE
    READ or SERIALIZABLE a transaction that has read before it took the lock still sees the state of then; `locked_atomic`
    takes the lock first.

    With None such a release happens at once and is logged as a mistake, once for each place in the code; with False, for
    locks that guard nothing in the database, it is not logged.
    """
    if until_commit is not None and not isinstance(until_commit, bool):
        raise TypeError(f"until_commit must be True, False or None, not {until_commit!r}")
    kind_of_lock = WatchedLock if until_commit is None else UntilCommitLock if until_commit else Lock
    if not conf.get().enabled:
        kind_of_lock = Lock
    return _made(
        kind_of_lock,
        name,
        using,
        expire=expire,
        auto_renewal=auto_renewal,
        max_hold=max_hold,
        id=id,
        blocking=blocking,
        timeout=timeout,
        label=label,
        on_lost=on_lost,
        kind=kind,
    )


def alock(
    name: str,
    *,
    expire: Seconds | None = None,
    auto_renewal: bool | None = None,
    max_hold: Seconds | None = None,
    id: str | None = None,
    blocking: bool = True,
    timeout: Seconds | None = None,
    label: str | None = None,
    on_lost: Callable[[AsyncLock], object] | None = None,
    using: str | None = None,
    kind: str = "lock",
) -> AsyncLock:
    """Return the lock `name` as `lock` does, for asyncio: ``async with alock("invoice:42", timeout=10): ...``.

    Tasks, threads and processes share its name and its queue. See `AsyncLock` for what differs for tasks.
    """
    return _made(
        AsyncLock,
        name,
        using,
        expire=expire,
        auto_renewal=auto_renewal,
        max_hold=max_hold,
        id=id,
        blocking=blocking,
        timeout=timeout,
        label=label,
        on_lost=on_lost,
        kind=kind,
    )


def _made(kind_of_lock: type[L], name: str, using: str | None, **options: Any) -> L:
    """Return the lock with the client of the settings, and with their defaults for what is None."""
    settings = conf.get()
    if not settings.enabled:
        told = {key: options[key] for key in ("id", "label", "kind")}
        return kind_of_lock(UNLOCKED, name, expire=MAX_SECONDS, auto_renewal=False, **told)
    defaults = ["expire", "auto_renewal", "max_hold"] + (["timeout"] if options["blocking"] else [])
    for key in defaults:
        if options[key] is None:
            options[key] = getattr(settings, key)
    return kind_of_lock(get_client(using, settings), name, prefix=settings.key_prefix, **options)


@contextmanager
def locked_atomic(name: str, *, database: str | None = None, **options: Any) -> Iterator[Lock]:
    """Hold a lock around a transaction on `database`: taken before its begin, released after its commit or rollback.

    `options` are those of `lock`. Raises RuntimeError inside another atomic block of that database, whose commit would come
    too late, and what taking the lock raises. When the lock was lost before the commit, the transaction is rolled back and
    LockLost raised.
    """
    if in_atomic(connections[database or DEFAULT_DB_ALIAS]):
        raise RuntimeError(
            f"locked_atomic({name!r}) cannot be used inside an atomic block, or a request with ATOMIC_REQUESTS, which ends "
            "after it. Use lock(..., until_commit=True) there."
        )
    with lock(name, until_commit=False, **options) as held, transaction.atomic(using=database):
        yield held
        held.raise_if_lost()


def locked(
    name: str | Callable[..., str],
    *,
    on_conflict: Literal["wait", "raise", "skip"] = "wait",
    **options: Any,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Hold a lock while the decorated function runs: a new lock for each call.

    `name` is a format string over the function's bound arguments (``"report:{user_id}"``) or a callable that takes what the
    function takes. `on_conflict`: "wait" for at most `timeout` seconds and then raise AcquireTimeout, "raise" it at once, or
    "skip" the call and return None. `options` are those of `lock`.
    """
    if on_conflict not in ("wait", "raise", "skip"):
        raise ValueError(f"on_conflict must be 'wait', 'raise' or 'skip', not {on_conflict!r}")
    if not callable(name):
        check_name(name)
    wrong = options.keys() - (inspect.signature(lock).parameters.keys() - {"name", "blocking"})
    if wrong:
        raise TypeError(f"locked() got an unexpected argument {sorted(wrong)[0]!r}")
    if on_conflict != "wait":
        if options.get("timeout") is not None:
            raise ValueError("timeout needs on_conflict='wait'")
        options["blocking"] = False

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        if inspect.iscoroutinefunction(function):
            raise TypeError("locked() does not take coroutine functions")
        signature = inspect.signature(function)

        def name_of(*args: P.args, **kwargs: P.kwargs) -> str:
            if callable(name):
                return name(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return name.format(**bound.arguments)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            held = lock(name_of(*args, **kwargs), **options)
            with ExitStack() as stack:
                try:
                    stack.enter_context(held)
                except AcquireTimeout:
                    if on_conflict == "skip":
                        return None
                    raise
                return function(*args, **kwargs)

        return wrapper

    return decorate
