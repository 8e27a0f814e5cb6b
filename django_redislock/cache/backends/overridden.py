"""The methods that a subclass of a backend overrides: ours go through them.

A subclass may change values in `get`, `set` and `add`, or take errors for misses there. Our methods read and write by
scripts, which lie below. So an overridden method is called with the answer of Redis, or its error, at hand: where it
calls the method of our class, that gives this answer and does not ask Redis again, or notes what is to be stored and
stores nothing. So a value stays under its lease, and the server makes no copy more.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from asgiref.sync import async_to_sync

from ..lease.request import MISSING

READING, WRITING = ("get",), ("add", "set")
READING_OF_TASKS, WRITING_OF_TASKS = ("aget", "get"), ("aadd", "add", "aset", "set")
"""The methods through which a value is read, or written: the first one that is overridden, as Django's own
`get_or_set` and `aget_or_set` call them."""

reported: ContextVar[tuple[Any, ...]] = ContextVar("redislock_reported", default=())
"""The answer of Redis that is at hand, the cache, and the key or the keys."""
_noted: ContextVar[Noted | None] = ContextVar("redislock_noted", default=None)


class Failure(NamedTuple):
    """An error of Redis in place of its answer."""

    error: BaseException


class Noted:
    """What an overridden method would store for this key, or the error that it gets."""

    def __init__(self, cache: Any, key: Any, failure: Failure | None) -> None:
        self.cache = cache
        self.key = key
        self.failure = failure
        self.stored: tuple[Any, Any] | None = None


def overridden_by(cls: type) -> frozenset[str]:
    """Return the names of the methods that the class overrides, together with its bases left of this package's."""
    names: set[str] = set()
    for kind in cls.__mro__:
        if kind.__module__.startswith("django_redislock."):
            break
        names |= vars(kind).keys() & {*READING_OF_TASKS, *WRITING_OF_TASKS}
    return frozenset(names)


def answer_at_hand(cache: Any, key: Any, default: Any) -> tuple[Any] | None:
    """Return the answer of Redis to a read of this key, if it is at hand; raise its error."""
    found = reported.get()
    if not found or found[1] is not cache or found[2] != key:
        return None
    if isinstance(found[0], Failure):
        raise found[0].error
    return (default if found[0] is MISSING else found[0],)


def note(cache: Any, key: Any, value: Any, timeout: Any) -> bool:
    """Note what is to be stored under this key, and return True, if somebody asked for that; raise its error."""
    noted = _noted.get()
    if noted is None or noted.cache is not cache or noted.key != key:
        return False
    if noted.failure is not None:
        raise noted.failure.error
    noted.stored = value, timeout
    return True


class Through(NamedTuple):
    """The overridden methods of a cache, for one value. Call it in a thread of the caller, not in an event loop."""

    cache: Any
    key: Any
    version: int | None
    by_task: bool

    @property
    def reads(self) -> bool:
        """Whether a method that reads is overridden."""
        return self._first(READING_OF_TASKS if self.by_task else READING) is not None

    def read(self, answer: Any) -> Any:
        """Return what the overridden method makes of the answer: a value, MISSING or a Failure. Raises its error."""
        name = self._first(READING_OF_TASKS if self.by_task else READING)
        if name is None:
            if isinstance(answer, Failure):
                raise answer.error
            return answer
        token = reported.set((answer, self.cache, self.key))
        try:
            return self._call(name, MISSING)
        finally:
            reported.reset(token)

    def write(self, value: Any, timeout: Any, failure: Failure | None = None) -> tuple[Any, Any] | None:
        """Return the value and the timeout that the overridden method stores, None if it stores nothing here. Raises
        the error that it makes of the failure."""
        name = self._first(WRITING_OF_TASKS if self.by_task else WRITING)
        if name is None:
            if failure is not None:
                raise failure.error
            return value, timeout
        noted = Noted(self.cache, self.key, failure)
        token = _noted.set(noted)
        try:
            self._call(name, value, timeout=timeout)
        finally:
            _noted.reset(token)
        return noted.stored

    def read_failure(self, error: BaseException) -> Any:
        """Return what the overridden method makes of an error of Redis, or raise it."""
        return self.read(Failure(error))

    def write_failure(self, value: Any, error: BaseException) -> Any:
        """Do as `read_failure` for a write of the value."""
        return self.write(value, None, Failure(error))

    def _first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self.cache._overridden), None)

    def _call(self, name: str, argument: Any, **options: Any) -> Any:
        method = getattr(self.cache, name)
        call = async_to_sync(method) if name in ("aget", "aadd", "aset") else method
        return call(self.key, argument, version=self.version, **options)
