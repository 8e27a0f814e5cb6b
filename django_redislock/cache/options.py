"""The options of `get_or_set` and of what is built on it, their checks, and calls of the functions among them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT

from .. import conf
from ..core import chance
from ..core.options import LIFE, RenewalOptions
from ..core.validation import Seconds, check_timeout
from .lease.request import ValueRequest
from .lease.store import call_in_thread

Timeout = float | Callable[[Any], float | None] | None
"""Seconds until a value expires (None: never), or a function of the value that returns them."""


class ManyOptions(RenewalOptions, total=False):
    """The options of `get_or_set_many`, by name."""

    lock: bool
    wait: Seconds | None
    on_wait_timeout: Any
    should_cache: Callable[[Any], object] | None
    jitter: float | None


class GetOrSetOptions(ManyOptions, total=False):
    """The options of `get_or_set`, by name."""

    stale: Seconds | None
    refresh_before: Seconds | None
    refresh: Literal["inline", "thread", "celery"]
    on_error: Literal["raise", "stale"] | None


class PageOptions(RenewalOptions, total=False):
    """The options of `cache_page`, by name."""

    wait: Seconds | None
    stale: Seconds | None
    on_error: Literal["raise", "stale"] | None


ON_WAIT_TIMEOUT = ("compute", "raise", "stale")
REFRESH = ("inline", "thread", "celery")


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """The options of one call, checked."""

    lock: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    """The options that override settings of the alias."""
    on_wait_timeout: Any = None
    stale: float = 0.0
    refresh_before: float = 0.0
    due: float = 0.0
    """The seconds before its expiry in Redis at which a value is due for a refresh; 0: never."""
    refresh: str = "inline"
    should_cache: Callable[[Any], object] | None = None

    def timeout_without_lease(self, timeout: Timeout) -> Timeout:
        """Return the timeout for storing without a lease: 0 for a value that `should_cache` refuses."""
        should_cache = self.should_cache
        if should_cache is None:
            return timeout
        return lambda value: timeout_for(timeout, value) if should_cache(value) else 0


DEFAULTS = CheckedOptions()


def validate(function: str, /, **options: Any) -> CheckedOptions:
    """Return the checked options; raises TypeError and ValueError that name the argument."""
    wrong = options.keys() - (_validate.__kwdefaults__ or {}).keys() - set(LIFE)
    if wrong:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(wrong)!r}")
    return _validate(**options)


def _validate(
    *,
    lock: object = True,
    wait: Seconds | None = None,
    on_wait_timeout: Any = None,
    stale: Seconds | None = None,
    refresh_before: Seconds | None = None,
    refresh: str = "inline",
    should_cache: Callable[[Any], object] | None = None,
    jitter: object = None,
    on_error: object = None,
    **life: object,
) -> CheckedOptions:
    if lock is not True and lock is not False:
        raise TypeError(f"lock must be True or False, not {lock!r}")
    if isinstance(on_wait_timeout, str) and on_wait_timeout not in ON_WAIT_TIMEOUT:
        raise ValueError(
            f"on_wait_timeout must be 'compute', 'raise', 'stale' or a value, not {on_wait_timeout!r}; "
            "give a string as a function that returns it"
        )
    if not (on_wait_timeout is None or isinstance(on_wait_timeout, str) or callable(on_wait_timeout)):
        on_wait_timeout = partial(_return, on_wait_timeout)  # never compared: a table has no truth value
    for argument, function in (("on_wait_timeout", on_wait_timeout), ("should_cache", should_cache)):
        if callable(function) and is_async_callable(function):
            raise TypeError(f"{argument} must be a plain function, not the coroutine function {function!r}")
    if refresh not in REFRESH:
        raise ValueError(f"refresh must be 'inline', 'thread' or 'celery', not {refresh!r}")
    if should_cache is not None and not callable(should_cache):
        raise TypeError(f"should_cache must be a function of the value, not {should_cache!r}")
    overrides = {"wait": wait, "jitter": jitter, "on_error": on_error, **life}
    settings = {
        name: conf.check_option(conf.CacheSettings, name, value)
        for name, value in overrides.items()
        if value is not None
    }
    stale_s = check_timeout(stale, "stale") or 0.0
    refresh_before_s = check_timeout(refresh_before, "refresh_before") or 0.0
    due = stale_s + refresh_before_s
    return CheckedOptions(lock, settings, on_wait_timeout, stale_s, refresh_before_s, due, refresh, should_cache)


def _return(value: Any) -> Any:
    return value


async def call_any(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function and return its result; a plain function runs where `sync_to_async` runs it."""
    if is_async_callable(function):
        return await function(*args, **kwargs)
    value = await call_in_thread(partial(function, *args, **kwargs))
    return await value if inspect.isawaitable(value) else value


def is_async_callable(function: Any) -> bool:
    """Whether a call of the function returns a coroutine, as far as that is known before the call."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def in_thread_of_task(on_wait_timeout: Any) -> Any:
    """Return the option for a task: it awaits what a function of the site returns; a given value stays as it is."""
    if not callable(on_wait_timeout) or getattr(on_wait_timeout, "func", None) is _return:
        return on_wait_timeout
    return partial(call_in_thread, on_wait_timeout)


def timeout_for(timeout: Timeout, value: Any) -> float | None:
    """Return the timeout of this value."""
    return timeout(value) if callable(timeout) else timeout


async def atimeout_for(timeout: Timeout, value: Any) -> float | None:
    """Do as `timeout_for`, and call a function where `sync_to_async` runs it."""
    return await sync_to_async(timeout)(value) if callable(timeout) else timeout


def with_stale_and_jitter(
    dumps: Callable[[str, Any], tuple[bytes, int | None]], options: CheckedOptions, jitter: float
) -> Callable[[str, Any], tuple[bytes, int | None]]:
    """Return a `dumps` that shortens each expiry at random by up to the share `jitter`, and then adds `stale` seconds.

    It does not shorten the time `refresh_before`: a value that is due as soon as it is stored would be computed at
    each call.
    """

    def changed(redis_key: str, value: Any) -> tuple[bytes, int | None]:
        data, expiry_ms = dumps(redis_key, value)
        if expiry_ms:
            fresh = max(0.0, expiry_ms - options.refresh_before * 1000)
            shortened = int(expiry_ms - fresh * chance.random() * jitter)
            expiry_ms = max(1, shortened + int(options.stale * 1000))
        return data, expiry_ms

    return changed


class GetOrSetCall(NamedTuple):
    """One call of `get_or_set`: its request, and how long and for what it waits."""

    request: ValueRequest
    wait: float | None
    on_wait_timeout: Any
    options: CheckedOptions
    hides_errors: bool
    """Whether the stale value may replace an error."""

    def asks_timeout(self, timeout: Timeout, ttl_ms: int) -> bool:
        """Whether the timeout of the stored value decides if it is due."""
        return bool(self.options.refresh_before) and callable(timeout) and -1 != ttl_ms <= self.request.due_ms

    def of_stored(self, timeout: Timeout, value: Any, ttl_ms: int) -> GetOrSetCall:
        """Return the call about this stored value: one whose own timeout is not longer than `refresh_before` is due
        at its timeout only, because it would be due as soon as it is stored."""
        if not self.asks_timeout(timeout, ttl_ms):
            return self
        own = timeout_for(timeout, value)
        if own is None or own is DEFAULT_TIMEOUT or own > self.options.refresh_before:
            return self
        return self._replace(request=replace(self.request, due_ms=int(self.options.stale * 1000)))

    def wait_with_stale(self) -> float:
        """Return how many seconds the caller waits while there is a stale value."""
        if self.on_wait_timeout != "stale":
            return 0.0
        return threading.TIMEOUT_MAX if self.wait is None else self.wait
