"""Helpers for tests of projects that use locks: grant every lock without Redis, hold one as somebody else does, and
assert that one was acquired."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any, Generic, TypeVar

from django.conf import settings
from django.test import SimpleTestCase, override_settings

from . import conf
from .core import AsyncLock, Lock, events
from .exceptions import LockError
from .locks import lock

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class unlocked(override_settings):
    """Grant every lock at once, without Redis, in the block, the function or the Django TestCase class that it
    decorates.

    The other settings do not change. Locks still report their acquisitions, so `assert_locked` works. For a class it
    begins before ``setUpClass``, as `override_settings` does. Raises ValueError for other classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[override_settings] = []  # a decorated function may call itself

    def enable(self) -> None:
        """Begin to grant every lock."""
        block = override_settings(**{conf.NAME: _off(getattr(settings, conf.NAME, None))})
        block.enable()
        self._blocks.append(block)

    def disable(self) -> None:
        """End the most recent block."""
        self._blocks.pop().disable()

    def decorate_class(self, cls: C) -> C:
        """Begin with the class, and end with it."""
        if not issubclass(cls, SimpleTestCase):
            raise ValueError(
                f"unlocked() decorates functions and subclasses of Django's SimpleTestCase, not {cls.__qualname__}; "
                'for a class of pytest use the fixture: @pytest.mark.usefixtures("redislock_unlocked")'
            )
        before: dict[str, Any] = cls._overridden_settings or {}  # type: ignore[attr-defined]
        ours = _off(before.get(conf.NAME, getattr(settings, conf.NAME, None)))
        cls._overridden_settings = {**before, conf.NAME: ours}  # type: ignore[attr-defined]
        return cls


class UnlockedMixin:
    """Runs the tests of a class and of its subclasses `unlocked`; write it left of Django's TestCase."""

    @classmethod
    def setUpClass(cls) -> None:
        unlocked().decorate_class(cls)
        super().setUpClass()  # type: ignore[misc]


def _off(given: Any) -> dict[str, Any]:
    """Return these settings with the locks switched off."""
    return {**(given or {}), "ENABLED": False}


class Block(Generic[T]):
    """A context manager that also decorates functions, and coroutine functions."""

    def __init__(self, begin: Callable[[], AbstractContextManager[T]]) -> None:
        self._begin = begin

    def __enter__(self) -> T:
        self._begun = self._begin()
        return self._begun.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._begun.__exit__(*error)

    def __call__(self, function: F) -> F:
        """Decorate a function. Raises TypeError for a class."""
        if isinstance(function, type):
            raise TypeError(f"held() and assert_locked() decorate functions, not the class {function.__qualname__}")

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._begin():
                return function(*args, **kwargs)

        # contextlib's decorator ends before the coroutine runs; unittest ran none, and the test passed.
        @wraps(function)
        async def inside_coroutine(*args: Any, **kwargs: Any) -> Any:
            with self._begin():
                return await function(*args, **kwargs)

        return inside_coroutine if inspect.iscoroutinefunction(function) else inside  # type: ignore[return-value]


def assert_locked(name: str) -> Block[list[str]]:
    """Assert that this process acquires a lock of this name in the block, or in the function that it decorates.

    The block gets the names of all acquired locks. A ``*`` in the name matches any text, so
    ``"celery:shop.tasks.send:*"`` is the lock of a task with any arguments. Raises AssertionError at the end of a block
    that acquired no such lock.
    """
    return Block(partial(_assert_locked, name))


@contextmanager
def _assert_locked(name: str) -> Iterator[list[str]]:
    acquired: list[str] = []

    def listen(event: str, data: dict[str, Any]) -> None:
        if event == "acquired":
            acquired.append(data["name"])

    events.listeners.append(listen)
    try:
        yield acquired
    finally:
        events.listeners.remove(listen)
    pattern = name.replace("[", "[[]").replace("?", "[?]")
    if not any(fnmatchcase(other, pattern) for other in acquired):
        raise AssertionError(
            f"No lock {name!r} was acquired. The acquired locks: {', '.join(map(repr, acquired)) or 'none'}."
        )


def held(which: str | Lock) -> Block[Lock]:
    """Hold a lock in the block, or in the function that it decorates, as somebody else does.

    So a test sees what its code does in a conflict, without a second process. `which` is the name of a `lock`, or a
    lock object, such as ``cache.lock("key")``. Another thread acquires it; the block gets the object. A lock that the
    block force-released or lost is no error.

    Raises AssertionError when the lock is not free, RuntimeError while all locks are granted (`unlocked`), and every
    other error of the acquisition.
    """
    return Block(partial(_hold, which))


@contextmanager
def _hold(which: str | Lock) -> Iterator[Lock]:
    if not conf.get().enabled:
        raise RuntimeError("held() cannot hold a lock while every lock is granted (unlocked(), or ENABLED: False)")
    if isinstance(which, AsyncLock):
        raise TypeError(f"held() takes {which.name!r} or a lock for threads: that for tasks is the same in Redis")
    wanted = lock(which, until_commit=False) if isinstance(which, str) else which
    with ThreadPoolExecutor(1, "somebody else") as somebody:
        if not somebody.submit(wanted.acquire, blocking=False).result():
            owner = wanted.owner()
            holder = owner.holder if owner else "its holder has gone"
            raise AssertionError(f"Lock {wanted.name!r} is not free: {holder}.")
        try:
            yield wanted
        finally:
            with suppress(LockError):
                somebody.submit(wanted.release).result()
