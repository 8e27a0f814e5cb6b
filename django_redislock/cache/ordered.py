"""Values computed anew by a Celery worker: what the one who finds an old value writes, and what the worker does."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..core.compute import digest
from ..core.flight import give_up, peek, take
from ..core.owner import new_id
from .base import RedisBackend
from .counters import alias_of
from .flights import Caller, refresh
from .options import Asked, Options, checked


class OrderedMixin(RedisBackend):
    """What orders a value, and what makes it."""

    _made_with: tuple[Any, dict[str, Any]]

    def refresh_ordered(self, order: dict[str, Any]) -> None:
        """Compute a value anew that another process found to be due: what the Celery task does."""
        timeout = DEFAULT_TIMEOUT if order["timeout"] == "default" else order["timeout"]
        should_cache = order["should_cache"] and import_string(order["should_cache"])
        given = checked(**order["options"], stale=order["stale"], should_cache=should_cache)
        asked = self._asked(order["key"], _default_of(order), timeout, order["version"], given)
        if asked is None:
            return
        want = replace(asked.want, id=order["id"])
        data, _ = want.server.run(peek(want.key, with_life=False))
        if data is None or digest(data).decode() != order["old"]:
            want.server.run(give_up(want))
            return
        caller = Caller(threading.current_thread(), want.server.room)
        landing = want.server.run(refresh(want, caller, data, -math.inf))
        if landing.error is not None:
            raise landing.error

    def _order(
        self, asked: Asked, key: Any, default: Any, timeout: float | None, version: int | None, old: bytes
    ) -> None:
        """Have a Celery worker compute the value anew, unless somebody does so already."""
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
        if not want.server.run(take(want, threading.current_thread(), old)):
            return
        try:
            task.delay(alias, order)
        except BaseException:
            want.server.run(give_up(want))
            raise

    def _asked(
        self, key: Any, default: Any, timeout: float | None, version: int | None, given: Options
    ) -> Asked | None:
        raise NotImplementedError


def check_orderable(default: Any) -> None:
    """Raise TypeError when no other process could call it."""
    path_of(_taken_apart(default)[0])


def path_of(function: Any, argument: str = "default") -> str:
    """Return by what a function can be imported; raises TypeError."""
    path = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    try:
        found = import_string(path)
    except ImportError:
        found = None
    if found is None or (found is not function and getattr(found, "function", None) is not function):
        raise TypeError(
            f"{argument} must be a function of a module, or for default a functools.partial of one, with refresh='celery', "
            f"not {function!r}"
        )
    return path


def _taken_apart(default: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if isinstance(default, functools.partial):
        return default.func, default.args, default.keywords
    return default, (), {}


def _default_of(order: dict[str, Any]) -> Callable[[], Any]:
    """Return the function of an order, to be called with its arguments."""
    function = import_string(order["default"])
    function = getattr(function, "function", function)  # of a cached one, the one behind it
    if iscoroutinefunction(function):
        function = async_to_sync(function)
    return functools.partial(function, *order["args"], **order["kwargs"])
