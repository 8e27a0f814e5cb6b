"""`cached`: the values of a function are kept in a cache, and each is computed once for all callers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.db import transaction

from ..core.async_lock import coroutine_function
from ..name_template import check_parameters, fields, name_from, note_self
from .compute_once import ComputeOnceMixin
from .lease.request import MISSING
from .options import CheckedOptions, GetOrSetOptions, Timeout, atimeout_for, is_async_callable, timeout_for, validate
from .refresh import refreshable

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


def cached(
    timeout: Timeout = DEFAULT_TIMEOUT,
    *,
    key: str | Callable[..., str] | None = None,
    using: str = "default",
    version: int | None = None,
    **options: Unpack[GetOrSetOptions],
) -> Callable[[Callable[P, R]], Cached[P, R]]:
    """Keep the values of the decorated function in the cache `using` for `timeout` seconds; one of all callers
    computes.

    `timeout` may be a function of the value. `key` is a format string over the function's bound arguments
    (``"user:{user_id}"``, ``"cart:{self.pk}"``) or a callable that takes the same arguments; only a callable may return
    one key for all arguments. A function without parameters needs no key: its own name is the key then. `options` are
    those of `get_or_set`. The function may be a coroutine function, and a method; above ``@classmethod`` and
    ``@staticmethod``. ``function.invalidate(...)`` and ``await function.ainvalidate(...)`` delete the value for these
    arguments; a running computation of it is not stored.

    Raises TypeError and ValueError for bad arguments. A call raises what `get_or_set` raises; the loss of a lease is
    no error.
    """
    validate("cached", **options)
    if not (key is None or callable(key) or isinstance(key, str)):
        raise TypeError(f"key must be a format string or a function, not {key!r}")

    def decorate(function: Any) -> Cached[P, R]:
        kind = type(function)
        if kind in (classmethod, staticmethod):
            function = function.__func__
        if not callable(function):
            raise TypeError(f"cached() decorates functions, not {function!r}; write @cached(timeout, key=...)")
        if options.get("refresh") == "celery":
            for named in (function, options.get("should_cache"), timeout):
                if callable(named):
                    refreshable(named)
        return Cached(function, timeout, key, using, version, options, kind)

    return decorate


class Cached(Generic[P, R]):
    """A function whose values are kept in a cache."""

    def __init__(
        self,
        function: Callable[P, R],
        timeout: Timeout,
        key: str | Callable[..., str] | None,
        using: str,
        version: int | None,
        options: GetOrSetOptions,
        kind: type,
    ) -> None:
        signature, name = inspect.signature(function), getattr(function, "__qualname__", repr(function))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"cached() cannot keep what the generator function {name}() yields: return a list")
        if key is None and signature.parameters:
            raise TypeError(f"cached() needs a key for {name}(), which has parameters")
        if isinstance(key, str) and signature.parameters:
            if next(fields(key), None) is None:  # every user got the value of the first one
                raise ValueError(
                    f"key={key!r} is the same for all arguments of {name}(): write a parameter in braces, as in "
                    f"key='{key}:{{{next(iter(signature.parameters))}}}', or give a function that returns the key"
                )
            check_parameters(fields(key), function, f"key={key!r}")
            note_self(key, function)
        if key is None and not hasattr(function, "__qualname__"):
            raise TypeError(f"cached() needs a key for {name}, which has no name")
        if key is None and "<locals>" in name and getattr(inspect.unwrap(function), "__closure__", None):
            # Two functions that were made by two calls have one name.
            raise TypeError(f"cached() needs a key for {name}(), which uses variables of the function around it")
        functools.update_wrapper(self, function)
        self.function = function
        """The function itself, without the cache."""
        self._signature = signature
        self._timeout = timeout
        self._key = key
        self._using = using
        self._version = version
        self._options = options
        self._instance: Any = None
        self._kind = kind
        self._takes_class = next(iter(signature.parameters), "") == "cls" and "." in name.rpartition("<locals>.")[2]
        self._is_async = is_async_callable(function)
        if self._is_async:
            coroutine_function(self)  # type: ignore[type-var]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the value for these arguments, or its coroutine if the function is a coroutine function."""
        bound = self._with_instance(args)
        default = functools.partial(self.function, *bound, **kwargs)
        cache: Any = caches[self._using]
        if self._is_async and callable(self._key):
            return self._get_by_own_key(cache, sync_to_async(self._key)(*bound, **kwargs), default)  # type: ignore[return-value]
        return self._get(cache, self._key_of(bound, kwargs), default)  # type: ignore[no-any-return]

    async def _get_by_own_key(self, cache: Any, key: Awaitable[str], default: Callable[[], Any]) -> Any:
        return await self._get(cache, await key, default)

    def _get(self, cache: Any, key: str, default: Callable[[], Any]) -> Any:
        if not isinstance(cache, ComputeOnceMixin):  # a cache of another package
            return self._get_without_lock(cache, key, default)
        get = cache.aget_or_set if self._is_async else cache.get_or_set
        return get(key, default, self._timeout, self._version, **self._options)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Cached[P, R]: ...
    @overload
    def __get__(self: Cached[Concatenate[Any, Q], R], instance: object, owner: type | None = None) -> Cached[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Cached[Any, R]:
        """Return the method of the instance, or of the class."""
        if self._kind is classmethod:
            instance = type(instance) if owner is None else owner
        if instance is None or self._kind is staticmethod:
            return self
        bound: Cached[Any, R] = object.__new__(Cached)  # a new one would read the signature again
        vars(bound).update(vars(self), _instance=instance)
        return bound

    def __repr__(self) -> str:
        return f"<cached {self.function!r}>"

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the key of the value for these arguments."""
        return self._key_of(self._with_instance(args), kwargs)

    def invalidate(self, *args: Any, on_commit: bool = False, **kwargs: Any) -> bool | None:
        """Delete the value for these arguments; return whether there was one. A running computation of it is not
        stored.

        With `on_commit` the value is deleted when the default database's transaction commits, and the answer is None. A
        delete before the commit is too early, because another caller would compute a value from the old data.
        """
        delete = functools.partial(self._delete, self.key(*args, **kwargs))
        return transaction.on_commit(delete) if on_commit else delete()  # type: ignore[func-returns-value]

    async def ainvalidate(self, *args: Any, on_commit: bool = False, **kwargs: Any) -> bool | None:
        """Do as `invalidate`."""
        if on_commit:
            return await sync_to_async(self.invalidate)(*args, on_commit=True, **kwargs)
        if callable(self._key):
            key = await sync_to_async(self.key)(*args, **kwargs)
        else:
            key = self.key(*args, **kwargs)
        return bool(await caches[self._using].adelete(key, version=self._version))

    def _delete(self, key: str) -> bool:
        return bool(caches[self._using].delete(key, version=self._version))

    def _get_without_lock(self, cache: Any, key: str, default: Callable[[], Any]) -> Any:
        should_cache = self._options.get("should_cache")
        timeout = CheckedOptions(should_cache=should_cache).timeout_without_lease(self._timeout)
        if not self._is_async and not callable(timeout):
            return cache.get_or_set(key, default, timeout, self._version)
        if not self._is_async:
            value = cache.get(key, MISSING, version=self._version)
            if value is MISSING:
                value = default()
                cache.set(key, value, timeout_for(timeout, value), version=self._version)
            return value

        async def get() -> Any:
            value = await cache.aget(key, MISSING, version=self._version)
            if value is MISSING:
                value = await default()
                await cache.aset(key, value, await atimeout_for(timeout, value), version=self._version)
            return value

        return get()

    def _with_instance(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        bound = args if self._instance is None else (self._instance, *args)
        if self._takes_class and not isinstance(next(iter(bound), None), type):
            # From Python 3.13 on @classmethod does not say its class to key() and invalidate(), which took the next
            # argument for it, and deleted another value.
            raise TypeError(f"{self.function!r} needs its class: write @cached above @classmethod")
        return bound

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._key is None:
            self._signature.bind(*args, **kwargs)
            return f"{self.function.__module__}.{self.function.__qualname__}"
        if callable(self._key):
            return self._key(*args, **kwargs)
        return name_from(self._key, self._signature, args, kwargs)
