"""Values computed anew by a Celery worker: what the one who finds an old value writes, and what the worker does.

A message names what is to be called, so whoever can write to the broker could have anything called: a worker obeys only the
names of functions that its own code has registered.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured

from ..core.events import log
from ..core.records import new_id
from .backends.base import RedisBackend
from .lease.obtain import give_up, peek, take
from .lease.request import is_interruption
from .lease.store import digest
from .options import Asked, Options, Timeout, checked
from .single_flight import Caller, hush, refresh
from .stats import alias_of

F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, Callable[..., Any]] = {}


def refreshable(function: F) -> F:
    """Register a function of a module, so that Celery workers call it for ``refresh="celery"``.

    A worker must import the module. `cached` registers its function by itself. Raises TypeError for a local function.
    """
    name = name_of(function)
    if name is None:
        raise TypeError(f"refresh='celery' needs a function of a module, not {function!r}")
    _registered[name] = function
    return function


class OrderedMixin(RedisBackend):
    """What orders a value, and what makes it."""

    _made_with: tuple[Any, dict[str, Any]]

    def refresh_ordered(self, order: dict[str, Any]) -> None:
        """Compute a value anew that another process found to be due: what the Celery task does."""
        names = [name for name in (order["default"], order["should_cache"], order["timeout_for"]) if name]
        unknown = [name for name in names if name not in _registered]
        should_cache, timeout = _registered.get(order["should_cache"]), _registered.get(order["timeout_for"])
        if timeout is None:
            timeout = DEFAULT_TIMEOUT if order["timeout"] == "default" else order["timeout"]
        given = checked("get_or_set", **order["options"], stale=order["stale"], should_cache=should_cache)
        asked = self._asked(order["key"], None if unknown else _default_of(order), timeout, order["version"], given)
        if asked is None:
            return
        want = replace(asked.want, id=order["id"])
        if unknown:
            want.server.run(give_up(want))
            raise LookupError(
                f"{unknown[0]} is not registered in this worker, so it is not called for refresh='celery': decorate it with "
                "@django_redislock.cache.refreshable, and import its module in a tasks module."
            )
        data, _ = want.server.run(peek(want.key, with_life=False))
        if data is None or digest(data).decode() != order["old"]:
            want.server.run(give_up(want))
            return
        caller = Caller(threading.current_thread(), want.server.room)
        landing = want.server.run(refresh(want, caller, data, -math.inf))
        if landing.error is not None:
            raise landing.error

    def _order(self, asked: Asked, key: Any, default: Any, timeout: Timeout, version: int | None, old: bytes) -> None:
        """Have a Celery worker compute the value anew, unless somebody does so already.

        What fails on the way is logged: the old value is there.
        """
        from ..tasks import refresh as task

        alias = alias_of(type(self), *self._made_with)
        if not alias:
            raise ImproperlyConfigured("refresh='celery' needs a cache that is one of CACHES")
        function, args, kwargs = _taken_apart(default)
        given = asked.given
        order = {
            "key": key,
            "version": version,
            "timeout": timeout if timeout is None or isinstance(timeout, (int, float)) else "default",
            "timeout_for": path_of(timeout, "timeout") if callable(timeout) else None,
            "default": path_of(function),
            "args": list(args),
            "kwargs": kwargs,
            "options": given.settings,
            "stale": given.stale,
            "should_cache": given.should_cache and path_of(given.should_cache, "should_cache"),
            "old": digest(old).decode(),
            "id": new_id(),
        }
        want = replace(asked.want, id=order["id"])
        hush(want)
        try:
            if want.server.run(take(want, threading.current_thread(), old)):
                task.apply_async((alias, order), retry=False)
        except BaseException as error:
            want.server.run(give_up(want))
            if is_interruption(error):
                raise
            want.tally.count("errors")
            log.exception("No Celery worker could be told to compute the value of %r anew.", want.key)

    def _asked(self, key: Any, default: Any, timeout: Timeout, version: int | None, given: Options) -> Asked | None:
        raise NotImplementedError


def check_orderable(default: Any) -> None:
    """Raise TypeError when no worker would call it."""
    path_of(_taken_apart(default)[0])


def path_of(function: Any, argument: str = "default") -> str:
    """Return by what name a worker knows a function; raises TypeError."""
    name = name_of(function)
    if name is None or _registered.get(name) is not function:
        raise TypeError(
            f"{argument} must be a function decorated with @django_redislock.cache.refreshable, or for default a "
            f"functools.partial of one, with refresh='celery', not {function!r}"
        )
    return name


def name_of(function: Any) -> str | None:
    """Return the name of a function of a module, or of a class in it; None for anything else."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    return f"{module}.{name}" if module and "<" not in name else None


def _taken_apart(default: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if isinstance(default, functools.partial):
        return default.func, default.args, default.keywords
    return default, (), {}


def _default_of(order: dict[str, Any]) -> Callable[[], Any]:
    """Return the function of an order, to be called with its arguments."""
    function = _registered[order["default"]]
    if iscoroutinefunction(function):
        function = async_to_sync(function)
    return functools.partial(function, *order["args"], **order["kwargs"])
