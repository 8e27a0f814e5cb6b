"""Failures of a computation: the form in which they are sent to the waiters, and what they mean for a transaction."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, connections

from ..exceptions import ComputationFailed

MAX_TEXT = 1000
"""Number of characters of an error's text that are sent."""
MAX_PICKLE = 32768
"""Number of bytes up to which an exception itself is sent."""


def roll_back_request() -> None:
    """Roll back the request's transactions (ATOMIC_REQUESTS), as Django does for an error that leaves the view."""
    for connection in connections.all(initialized_only=True):
        if connection.settings_dict["ATOMIC_REQUESTS"] and connection.in_atomic_block:
            connection.set_rollback(True)


def may_hide(error: BaseException) -> bool:
    """Return whether a caller may get the stale value in place of this error of its computation.

    Not within a transaction that the error has broken: the caller would go on, and commit nothing of it.
    """
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block and (
            connection.needs_rollback or (isinstance(error, DatabaseError) and not connection.is_usable())
        ):
            error.add_note(
                "The stale value is not returned in its place, because the error has broken the transaction of "
                f"database {connection.alias!r}: compute within an atomic() of its own."
            )
            return False
    return True


def dump_failure(name: str, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any], error: Exception) -> bytes:
    """Return the exception as bytes for the waiters: as text, and serialized like a value of the cache if it can be."""
    text = json.dumps(_as_text(name, error).args).encode()
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301  # pickled here
            data = dumps(error)
            if len(data) <= MAX_PICKLE and isinstance(loads(data), Exception):
                return b"=%b\n%b" % (text, data)
    except Exception:  # noqa: S110  # its own methods may raise anything, and not every serializer takes exceptions
        pass
    return b"!" + text


def load_failure(loads: Callable[[bytes], Any], data: bytes) -> Exception:
    """Return the exception from the bytes, or ComputationFailed where its class cannot be imported."""
    text, _, serialized = data[1:].partition(b"\n")
    found: Any = None
    if serialized:
        with suppress(Exception):
            found = loads(serialized)
    error = found if isinstance(found, Exception) else ComputationFailed(*json.loads(text))
    error.add_note("It was raised in another process, which computed the value for all waiting callers.")
    return error


def _as_text(name: str, error: Exception) -> ComputationFailed:
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return ComputationFailed(name, kind, str(error)[:MAX_TEXT])
