"""Refreshes by a Celery worker: the message of the caller that finds a stale value, and the work of the worker.

A message names the function to be called, and anybody who can write to the broker can send a message. So a worker
calls only functions that its own code has registered.
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
from ..core.keys import new_id
from .backends.base import RedisBackend
from .lease.obtain import cancel_refresh, reserve_refresh
from .lease.read import read_value
from .lease.request import is_interruption
from .lease.single_flight import Caller, pause_refresh, refresh
from .lease.store import digest, settle_as_failed
from .options import CheckedOptions, GetOrSetCall, Timeout, validate
from .stats import alias_of

F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, Callable[..., Any]] = {}


def refreshable(function: F) -> F:
    """Register a function of a module, so that Celery workers may call it for ``refresh="celery"``.

    The worker must import the module. `cached` registers its function itself. Raises TypeError for a local function.
    """
    name = import_path(function)
    if name is None:
        raise TypeError(f"refresh='celery' needs a function of a module, not {function!r}")
    _registered[name] = function
    return function


class CeleryRefreshMixin(RedisBackend):
    """The two ends of ``refresh="celery"``: the caller that sends a message, and the worker that processes it."""

    _constructor_args: tuple[Any, dict[str, Any]]

    def refresh_from_message(self, message: dict[str, Any]) -> None:
        """Refresh the value of a message. This is the work of the Celery task.

        Raises the error of the computation, and LookupError when the worker does not know the function of the message.
        """
        paths = [path for path in (message["default"], message["should_cache"], message["timeout_for"]) if path]
        unknown = [path for path in paths if path not in _registered]
        should_cache, timeout = _registered.get(message["should_cache"]), _registered.get(message["timeout_for"])
        if timeout is None:
            timeout = DEFAULT_TIMEOUT if message["timeout"] == "default" else message["timeout"]
        checked = validate("get_or_set", **message["options"], stale=message["stale"], should_cache=should_cache)
        call = self._prepare(
            message["key"], None if unknown else _function_of(message), timeout, message["version"], checked
        )
        if call is None:
            return
        request = replace(call.request, id=message["id"], due_ms=message.get("due_ms", 0))
        if unknown:
            request.server.run(cancel_refresh(request))
            raise LookupError(
                f"{unknown[0]} is not registered in this worker, so it is not called for refresh='celery': decorate it "
                "with @django_redislock.cache.refreshable, and import its module in a tasks module."
            )
        data, _ = request.server.run(read_value(request.key, with_ttl=False))
        if data is None or digest(data).decode() != message["old"]:
            request.server.run(cancel_refresh(request))
            return
        caller = Caller.thread(request.server)
        outcome = request.server.run(refresh(request, caller, data, -math.inf))
        if outcome.error is not None:
            raise outcome.error

    def _refresh_in_celery(
        self, call: GetOrSetCall, key: Any, default: Any, timeout: Timeout, version: int | None, old: bytes, ttl_ms: int
    ) -> None:
        """Have a Celery worker refresh the value, unless another process refreshes it.

        The message expires with the value, in `ttl_ms` milliseconds.

        An error of the broker is logged, because the caller has the stale value.
        """
        from ..tasks import refresh as task

        alias = alias_of(type(self), *self._constructor_args)
        if not alias:
            raise ImproperlyConfigured("refresh='celery' needs a cache that is one of CACHES")
        function, args, kwargs = _split_partial(default)
        checked = call.options
        message = {
            "key": key,
            "version": version,
            "timeout": timeout if timeout is None or isinstance(timeout, (int, float)) else "default",
            "timeout_for": registered_name(timeout, "timeout") if callable(timeout) else None,
            "default": registered_name(function),
            "args": list(args),
            "kwargs": kwargs,
            "options": checked.settings,
            "stale": checked.stale,
            "should_cache": checked.should_cache and registered_name(checked.should_cache, "should_cache"),
            "old": digest(old).decode(),
            "due_ms": call.request.due_ms,
            "id": new_id(),
        }
        request = replace(call.request, id=message["id"])
        pause_refresh(request)
        job = None
        try:
            job = request.server.run(reserve_refresh(request, threading.current_thread(), old))
            if job is not None:
                task.apply_async((alias, message), expires=max(ttl_ms, 1000) / 1000)
        except BaseException as error:
            interrupted = is_interruption(error)
            # A broker that is away counts as a failed refresh: each process tried it once a second.
            failed = None if job is None or interrupted else settle_as_failed(job)
            request.server.run(failed or cancel_refresh(request))
            if interrupted:
                raise
            request.counters.count("errors")
            log.exception(
                "The message to refresh the value of %r could not be sent to Celery; callers get the stale value until "
                "it expires.",
                request.key,
            )

    def _prepare(
        self, key: Any, default: Any, timeout: Timeout, version: int | None, checked: CheckedOptions
    ) -> GetOrSetCall | None:
        raise NotImplementedError


def check_importable(default: Any) -> None:
    """Raise TypeError when no worker would call the function."""
    registered_name(_split_partial(default)[0])


def registered_name(function: Any, argument: str = "default") -> str:
    """Return the name under which a worker knows the function; raises TypeError if it is not registered."""
    name = import_path(function)
    if name is None or _registered.get(name) is not function:
        raise TypeError(
            f"{argument} must be a function decorated with @django_redislock.cache.refreshable, or for default a "
            f"functools.partial of one, with refresh='celery', not {function!r}"
        )
    return name


def import_path(function: Any) -> str | None:
    """Return the name of a function of a module, or of a class in it; None for anything else."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    return f"{module}.{name}" if module and "<" not in name else None


def _split_partial(default: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if isinstance(default, functools.partial):
        return default.func, default.args, default.keywords
    return default, (), {}


def _function_of(message: dict[str, Any]) -> Callable[[], Any]:
    """Return the function of the message with its arguments."""
    function = _registered[message["default"]]
    if iscoroutinefunction(function):
        function = async_to_sync(function)
    return functools.partial(function, *message["args"], **message["kwargs"])
