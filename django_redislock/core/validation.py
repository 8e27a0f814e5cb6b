"""Checks of the arguments of locks: names, ids and times. Each function returns the checked value or raises."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from enum import Enum
from typing import Final, NamedTuple, TypedDict

MAX_NAME = 1000
"""Bytes in UTF-8."""
MAX_SECONDS = 10 * 366 * 86400.0

Seconds = float | timedelta


class AsMade(Enum):
    """The type of the default of ``acquire()``'s arguments: the lock object's own value counts."""

    AS_MADE = "as the lock object was made"

    def __repr__(self) -> str:
        return self.name


AS_MADE: Final = AsMade.AS_MADE


def check_name(name: object, argument: str = "name") -> str:
    """Return the name of a lock.

    Raises TypeError for anything but a str, ValueError when it is empty, longer than 1,000 bytes in UTF-8, or not valid
    Unicode.
    """
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a str, not {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{argument} must be valid Unicode: {error}") from None
    if not 1 <= size <= MAX_NAME:
        raise ValueError(f"{argument} must have 1 to {MAX_NAME} bytes in UTF-8, not {size}")
    return name


def fitting_name(name: str, digest: Callable[[], str]) -> str:
    """Return the name of a lock: a name that is too long is cut, and ends with the digest."""
    raw = name.encode()
    if len(raw) <= MAX_NAME:
        return name
    end = f":{digest()}"
    return raw[: MAX_NAME - len(end)].decode(errors="ignore") + end


def check_prefix(prefix: object, argument: str = "prefix") -> str:
    """Return the key prefix; it must not contain braces, which would break the Cluster hash tag."""
    prefix = check_name(prefix, argument)
    if "{" in prefix or "}" in prefix:
        raise ValueError(f"{argument} must not contain braces: {prefix!r}")
    return prefix


def check_id(id: object, argument: str = "id") -> str:
    """Return an owner id: 1 to 200 printable ASCII characters without spaces."""
    if not isinstance(id, str):
        raise TypeError(f"{argument} must be a str, not {type(id).__name__}")
    if not (1 <= len(id) <= 200 and id.isascii() and id.isprintable() and " " not in id):
        raise ValueError(f"{argument} must be 1 to 200 printable ASCII characters without spaces: {id!r}")
    return id


def check_expire(expire: object, argument: str = "expire") -> float:
    """Return an expiry in seconds: at least 1 ms, at most ten years."""
    seconds = _seconds(expire, argument)
    if not 0.001 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{argument} must be between 0.001 and {MAX_SECONDS:.0f} seconds, not {expire!r}")
    return seconds


def check_timeout(timeout: object, argument: str = "timeout") -> float | None:
    """Return the seconds to wait; None waits without limit, 0 tries once."""
    if timeout is None:
        return None
    seconds = _seconds(timeout, argument)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{argument} must be None or between 0 and {MAX_SECONDS:.0f} seconds, not {timeout!r}")
    return seconds


def check_wait(blocking: object, timeout: object) -> float | None:
    """Return the seconds to wait. Raises ValueError for a timeout without `blocking`, as `threading.Lock` does."""
    if blocking:
        endless = isinstance(timeout, (int, float)) and timeout > MAX_SECONDS
        return None if endless else check_timeout(timeout)
    if timeout is not None:
        raise ValueError("timeout cannot be given with blocking=False")
    return 0.0


class Wait(NamedTuple):
    """How long ``acquire()`` of a lock object waits by default."""

    blocking: bool
    timeout: float | None
    """Seconds; None without limit. 0 without `blocking`."""
    if_blocking: float | None = None
    """Seconds for an ``acquire(blocking=True)`` of a lock that is not `blocking`."""

    def seconds(self, blocking: object, timeout: object, blocking_timeout: object = None) -> float | None:
        """Return the seconds to wait by these arguments of ``acquire()``, and by `self` where they are not given.

        `blocking_timeout` is redis-py's word for `timeout`: None means that it is not given, and with
        ``blocking=False`` it is ignored.
        """
        if blocking is None:
            blocking = AS_MADE
        if blocking_timeout is not None:
            if timeout is not AS_MADE:
                raise TypeError("acquire() takes either timeout or blocking_timeout: both mean the same")
            seconds = check_timeout(blocking_timeout, "blocking_timeout")
            return seconds if (self.blocking if blocking is AS_MADE else blocking) else 0.0
        if timeout is not AS_MADE:
            return check_wait(True if blocking is AS_MADE else blocking, timeout)
        if blocking is AS_MADE or (blocking and self.blocking):
            return self.timeout
        return self.if_blocking if blocking else 0.0


def wait_of(blocking: object, timeout: object) -> Wait:
    """Return how long a lock object waits; raises as `check_wait` does."""
    return Wait(bool(blocking), check_wait(blocking, timeout))


def wait_as_redis(blocking: object, blocking_timeout: object) -> Wait:
    """Return the wait by redis-py's words: without `blocking` the timeout is for ``acquire(blocking=True)``."""
    seconds = check_timeout(blocking_timeout, "blocking_timeout")
    return Wait(True, seconds) if blocking else Wait(False, 0.0, seconds)


class Nothing(TypedDict):
    """The type of keyword arguments that a function refuses with an error of its own."""


OTHER_WORDS = {
    "wait": "timeout",
    "wait_timeout": "timeout",
    "blocking_timeout": "timeout",
    "acquire_timeout": "timeout",
    "ttl": "expire",
    "lock_timeout": "expire",
    "lease_time": "expire",
    "px": "expire",
    "ex": "expire",
}
"""The words of other packages for `timeout` and `expire`."""
MEANINGS = {"timeout": "how long to wait for the lock", "expire": "the expiry without renewal"}


def nearest(word: str, known: Collection[str]) -> str:
    """Return the known word that is meant by one of another package, or by a misspelt one; "" without a guess."""
    meant = OTHER_WORDS.get(word, word)
    if meant == "timeout" and meant not in known:  # tasks and caches have no other wait
        meant = "wait"
    near = [meant] if meant in known else difflib.get_close_matches(word, known, n=1)
    return near[0] if near else ""


def unexpected(function: str, given: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return the error for unknown arguments, with the right name if it can be guessed."""
    word = min(given)
    text = f"{function}() got an unexpected keyword argument {word!r}"
    meant = OTHER_WORDS.get(word, "")
    if meant:
        return TypeError(f"{text}: {MEANINGS[meant]} is {meant}=, in seconds")
    near = difflib.get_close_matches(word, known, n=1)
    return TypeError(f"{text}: did you mean {near[0]!r}?" if near else text)


def check_flag(value: object, argument: str) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, not {value!r}")
    return value


def check_replicas(value: object, argument: str = "min_replicas") -> int:
    """Return a number of replicas from 0 to 100."""
    return _whole(value, argument, "a number of replicas", 0, 100)


MAX_LIMIT = 100
"""Slots of a semaphore; a script looks at all of them."""


def check_limit(value: object, argument: str = "limit") -> int:
    """Return the number of slots of a semaphore."""
    return _whole(value, argument, "a whole number of holders", 1, MAX_LIMIT)


def _whole(value: object, argument: str, what: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be {what}, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{argument} must be from {least} to {most}, not {value!r}")
    return value


def check_share(value: object, argument: str = "value") -> float:
    """Return a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number from 0 to 1, not {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"{argument} must be a number from 0 to 1, not {value!r}")
    return float(value)


def _seconds(value: object, argument: str) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number of seconds or a timedelta, not {type(value).__name__}")
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError(f"{argument} is too large: {value!r}") from None
    if math.isnan(seconds):
        raise ValueError(f"{argument} must not be nan")
    return seconds
