"""What `get_or_set` can be told, checked."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict

from ..core.validation import Seconds, check_expire, check_share, check_timeout
from .calling import is_asynchronous
from .lease.request import ValueRequest

Timeout = float | Callable[[Any], float | None] | None
"""A value's life in seconds (None: for ever), or a function of the value that returns it."""


class ManyOptions(TypedDict, total=False):
    """The options of `get_or_set_many`, by name."""

    lock: bool
    wait: Seconds | None
    on_wait_timeout: Any
    expire: Seconds | None
    auto_renewal: bool | None
    max_hold: Seconds | None
    should_cache: Callable[[Any], object] | None
    jitter: float | None


class GetOrSetOptions(ManyOptions, total=False):
    """The options of `get_or_set`, by name."""

    stale: Seconds | None
    refresh_before: Seconds | None
    refresh: Literal["inline", "thread", "celery"]
    on_error: Literal["raise", "stale"] | None


class PageOptions(TypedDict, total=False):
    """The options of `cache_page`, by name."""

    wait: Seconds | None
    expire: Seconds | None
    auto_renewal: bool | None
    max_hold: Seconds | None
    stale: Seconds | None
    on_error: Literal["raise", "stale"] | None


WORDS = ("compute", "raise", "stale")
HOW = ("inline", "thread", "celery")


@dataclass(frozen=True, slots=True)
class Options:
    """What one call was told."""

    lock: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    """What it overrides of the alias's settings."""
    on_wait_timeout: Any = None
    stale: float = 0.0
    refresh_before: float = 0.0
    refresh: str = "inline"
    should_cache: Callable[[Any], object] | None = None

    @property
    def due(self) -> float:
        """The seconds before its end in Redis at which a value is to be computed anew; 0: it is not."""
        return self.stale + self.refresh_before

    def life(self, timeout: Timeout) -> Timeout:
        """Return the timeout for storing without a lease: 0 for a value that `should_cache` refuses."""
        wanted = self.should_cache
        if wanted is None:
            return timeout
        return lambda value: timeout_for(timeout, value) if wanted(value) else 0


PLAIN = Options()


def checked(function: str, /, **options: Any) -> Options:
    """Return the options of the function, or raise TypeError or ValueError."""
    wrong = options.keys() - (_checked.__kwdefaults__ or {}).keys()
    if wrong:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(wrong)!r}")
    return _checked(**options)


def _checked(
    *,
    lock: object = True,
    wait: Seconds | None = None,
    on_wait_timeout: Any = None,
    expire: Seconds | None = None,
    auto_renewal: object = None,
    max_hold: Seconds | None = None,
    stale: Seconds | None = None,
    refresh_before: Seconds | None = None,
    refresh: str = "inline",
    should_cache: Callable[[Any], object] | None = None,
    jitter: object = None,
    on_error: object = None,
) -> Options:
    given: dict[str, Any] = {}
    if lock is not True and lock is not False:
        raise TypeError(f"lock must be True or False, not {lock!r}")
    if wait is not None:
        given["wait"] = check_timeout(wait, "wait")
    if isinstance(on_wait_timeout, str) and on_wait_timeout not in WORDS:
        raise ValueError(
            f"on_wait_timeout must be 'compute', 'raise', 'stale' or a value, not {on_wait_timeout!r}; "
            "give a string as a function that returns it"
        )
    for argument, function in (("on_wait_timeout", on_wait_timeout), ("should_cache", should_cache)):
        if callable(function) and is_asynchronous(function):
            raise TypeError(f"{argument} must be a plain function, not the coroutine function {function!r}")
    if expire is not None:
        given["expire"] = check_expire(expire)
    if auto_renewal is not None:
        if not isinstance(auto_renewal, bool):
            raise TypeError(f"auto_renewal must be True or False, not {auto_renewal!r}")
        given["auto_renewal"] = auto_renewal
    if max_hold is not None:
        given["max_hold"] = check_expire(max_hold, "max_hold")
    if refresh not in HOW:
        raise ValueError(f"refresh must be 'inline', 'thread' or 'celery', not {refresh!r}")
    if should_cache is not None and not callable(should_cache):
        raise TypeError(f"should_cache must be a function of the value, not {should_cache!r}")
    if jitter is not None:
        given["jitter"] = check_share(jitter, "jitter")
    if on_error is not None:
        if on_error not in ("raise", "stale"):
            raise ValueError(f"on_error must be 'raise' or 'stale', not {on_error!r}")
        given["on_error"] = on_error
    return Options(
        lock,
        given,
        on_wait_timeout,
        check_timeout(stale, "stale") or 0.0,
        check_timeout(refresh_before, "refresh_before") or 0.0,
        refresh,
        should_cache,
    )


def timeout_for(timeout: Timeout, value: Any) -> float | None:
    """Return the life of this value."""
    return timeout(value) if callable(timeout) else timeout


def lengthened(pack: Callable[[Any], tuple[bytes, int | None]], given: Options, jitter: float) -> Any:
    """Return a `pack` that makes lives shorter by up to the share `jitter`, and then longer by `stale` seconds.

    It leaves the time alone in which a value is due: one that is due as soon as it is stored would be computed at each call.
    """
    return partial(_pack, pack, given, jitter) if given.stale or jitter else pack


def _pack(
    pack: Callable[[Any], tuple[bytes, int | None]], given: Options, jitter: float, value: Any
) -> tuple[bytes, int | None]:
    data, life = pack(value)
    if life:
        fresh = max(0.0, life - given.refresh_before * 1000)
        life = max(1, int(life - fresh * random.random() * jitter) + int(given.stale * 1000))  # noqa: S311
    return data, life


class Asked(NamedTuple):
    """A value that is wanted, and what its caller said of it."""

    want: ValueRequest
    wait: float | None
    on_wait_timeout: Any
    given: Options
    on_error: str

    def patience(self) -> float:
        """How long to wait while there is an old value."""
        if self.on_wait_timeout != "stale":
            return 0.0
        return threading.TIMEOUT_MAX if self.wait is None else self.wait
