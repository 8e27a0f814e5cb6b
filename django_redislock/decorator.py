"""``@locked``: a function that runs under a lock."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction

from .core.lock import Lock
from .core.memory_server import GRANTS_ALL
from .core.validation import check_limit, check_name, unexpected
from .exceptions import AcquireTimeout
from .locks import LockOptions, alock, asemaphore, check_flags, lock, semaphore
from .name_template import check_parameters, fields, name_from, note_self, signature_of

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


class LockedOptions(LockOptions, total=False):
    """The options of ``@locked``: those of `lock`, without `until_commit` those of `alock`, or with `limit` those of
    `semaphore`."""

    until_commit: bool | None
    reentrant: bool
    limit: int


@contextmanager
def _manager() -> Iterator[None]:
    yield


@asynccontextmanager
async def _async_manager() -> AsyncIterator[None]:
    yield


MANAGERS = _manager, _async_manager
"""What contextlib makes of generator functions: functions of the same code, which return objects of the same types."""
RUNS_LATER = (GeneratorType, AsyncGeneratorType, *(type(make()) for make in MANAGERS))
INSTEAD = "Acquire the lock inside it: with lock(name), or async with alock(name)."


class Skipping(Protocol):
    """A decorator of functions whose skipped calls return None."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R | None]: ...


@overload
def locked(function: F, /) -> F: ...
@overload
def locked(
    name: str | None = None, /, *, on_conflict: Literal["wait", "raise"] = "wait", **options: Unpack[LockedOptions]
) -> Callable[[F], F]: ...
@overload
def locked(
    *,
    name: str | Callable[..., str],
    on_conflict: Literal["wait", "raise"] = "wait",
    **options: Unpack[LockedOptions],
) -> Callable[[F], F]: ...
@overload
def locked(
    name: str | None = None, /, *, on_conflict: Literal["skip"], **options: Unpack[LockedOptions]
) -> Skipping: ...
@overload
def locked(
    *, name: str | Callable[..., str], on_conflict: Literal["skip"], **options: Unpack[LockedOptions]
) -> Skipping: ...
def locked(function: Any = None, /, *, name: Any = None, on_conflict: str = "wait", **options: Any) -> Any:
    """Hold a lock while the decorated function runs. Each call acquires it anew; a coroutine function uses asyncio.

    `name` is a format string over the function's arguments (``@locked("report:{user_id}")``), or a callable with the
    parameters of the function (``@locked(name=...)``). Without a name, also as a bare ``@locked``, all calls share one
    lock, which is named by the function's module and qualified name.

    `on_conflict`: "wait" at most `timeout` seconds and then raise AcquireTimeout, "raise" it at once, or "skip" the
    call and return None. `options` are those of `lock`, for coroutine functions those of `alock`. With `limit`, so many
    calls may run at a time, as with `semaphore`.

    If the lock is lost while the function runs, the function is not stopped; LockLost is raised when it has ended.

    Raises TypeError and ValueError that name a wrong argument: also for functions that would run without the lock
    (generator functions, also below ``@contextmanager``; objects with an async ``__call__``), and for a name with a
    field that is no parameter. A call whose result is still to run (a generator, an awaitable) raises TypeError.
    """
    bare = callable(function)
    if bare and (
        name is not None or on_conflict != "wait" or options or getattr(function, "__name__", "") == "<lambda>"
    ):
        raise TypeError(
            "locked() takes either the decorated function alone or options: write @locked, or @locked(...) with "
            "options. A function that returns the name is given as locked(name=...)."
        )
    if function is not None and not bare:
        if name is not None:
            raise TypeError("locked() takes one name")
        name = check_name(function)
    if on_conflict not in ("wait", "raise", "skip"):
        raise ValueError(f"on_conflict must be 'wait', 'raise' or 'skip', not {on_conflict!r}")
    _check_options(options, on_conflict)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        is_async = _check_function(function)
        if is_async and options.get("until_commit") is not None:
            raise TypeError("until_commit is for threads; coroutine functions cannot use it")
        of: Any = (asemaphore if is_async else semaphore) if "limit" in options else (alock if is_async else lock)
        wrap = _awaited if is_async else _called
        return wrap(function, _name_of(name, function), on_conflict == "skip", functools.partial(of, **options))

    return decorate(function) if bare else decorate


def _called(
    function: Callable[..., Any], name_of: Callable[..., str], skip: bool, make: Callable[[str], Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        held = make(name_of(*args, **kwargs))
        with ExitStack() as stack:
            try:
                stack.enter_context(held)
            except AcquireTimeout:
                if skip:
                    return None
                raise
            return _finished(function, function(*args, **kwargs))

    return wrapper


def _awaited(
    function: Callable[..., Any], name_of: Callable[..., str], skip: bool, make: Callable[[str], Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        held = make(name_of(*args, **kwargs))
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(held)
            except AcquireTimeout:
                if skip:
                    return None
                raise
            return _finished(function, await function(*args, **kwargs))

    return wrapper


def _finished(function: Callable[..., Any], result: Any) -> Any:
    """Return the result of the function, unless its code is still to run: then raise TypeError, and let it not run."""
    if not isinstance(result, RUNS_LATER) and not inspect.isawaitable(result):
        return result
    for end in ("close", "cancel"):  # of a generator and of a coroutine; of a task
        getattr(result, end, bool)()
    raise TypeError(
        f"{function!r} returned a {type(result).__name__}, which would run without the lock; use it inside the "
        f"function, or make that async def. {INSTEAD}"
    )


def _name_of(name: Any, function: Callable[..., Any]) -> Callable[..., str]:
    """Return the function that returns the name of the lock for the arguments of a call."""
    if callable(name):
        return name  # type: ignore[no-any-return]
    if name is None:
        if not hasattr(function, "__qualname__"):
            raise TypeError(f"locked() needs a name for {function!r}, which has none of its own")
        own = f"{function.__module__}.{function.__qualname__}"
        return lambda *args, **kwargs: own
    try:
        wanted = list(fields(name))
    except ValueError as error:
        raise ValueError(f"name is no format string: {error}: {name!r}") from None
    check_parameters(wanted, function, "name")
    note_self(name, function)
    signature = signature_of(function)
    return lambda *args, **kwargs: name_from(name, signature, args, kwargs)


def _check_function(function: Any) -> bool:
    """Return whether it is a coroutine function. Raises TypeError for a function that cannot run under a lock."""
    if isinstance(function, (type, staticmethod, classmethod)) or not callable(function):
        raise TypeError(
            f"locked() decorates functions, not {function!r}; write it below @staticmethod and @classmethod"
        )
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    call = type(inner).__call__
    managers = [make.__code__ for make in MANAGERS]
    if (
        any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in (inner, call))
        or getattr(inner, "__code__", None) in managers
    ):
        raise TypeError(
            f"locked() does not take the generator function {function!r}, because its body would run after the call, "
            f"without the lock. {INSTEAD}"
        )
    if iscoroutinefunction(inner):
        return True
    if iscoroutinefunction(call):
        raise TypeError(
            f"locked() does not take {function!r}, because its __call__ is async: decorate a function, or acquire the "
            "lock inside it: async with alock(name)"
        )
    return False


def _check_options(options: dict[str, Any], on_conflict: str) -> None:
    """Raise TypeError or ValueError for wrong options, and set `blocking` unless the call waits."""
    wrong = options.keys() - LockedOptions.__optional_keys__
    if wrong:
        raise unexpected("locked", wrong, LockedOptions.__optional_keys__)
    if on_conflict != "wait":
        if options.get("timeout") is not None:
            raise ValueError("timeout needs on_conflict='wait'")
        options["blocking"] = False
    check_flags(options.get("until_commit"), options.get("reentrant", False))
    own = {"using", "until_commit"}
    if "limit" in options:
        for other in ("until_commit", "reentrant"):
            if options.pop(other, None):
                raise TypeError(f"{other} cannot be used with limit: a semaphore has neither")
        own.add("limit")
        check_limit(options["limit"])
    given = {key: value for key, value in options.items() if value is not None and key not in own}
    Lock(GRANTS_ALL, "any", **given)
