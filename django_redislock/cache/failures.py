"""Failures of a computation or a view, in a form that can be sent to the waiters in other processes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpResponse, HttpResponseBase
from django.http.multipartparser import MultiPartParserError

from ..exceptions import ComputationFailed

PERSONAL = (Http404, PermissionDenied, SuspiciousOperation, BadRequest, MultiPartParserError)
"""Errors that Django answers with a status 4xx: they are about one request, and another request may succeed."""
MAX_TEXT = 1000
"""Number of characters of an error's text that are sent."""
MAX_PICKLE = 32768
"""Number of bytes up to which an exception itself is sent."""


def portable_error(name: str, error: Exception) -> Exception:
    """Return the exception, or ComputationFailed in place of one that cannot be pickled and unpickled."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301  # pickled here
            return error
    except Exception:  # noqa: S110  # its own methods may raise anything
        pass
    return _as_text(name, error)


def portable_response(response: HttpResponseBase) -> HttpResponseBase:
    """Return the response, or one with its status alone if it is meant for one client only or cannot be pickled."""
    control = response.get("Cache-Control", "")
    if not (response.streaming or response.cookies or "private" in control or "no-store" in control):
        try:
            pickle.dumps(response)
            return response
        except Exception:  # noqa: S110
            pass
    plain = HttpResponse(status=response.status_code, reason=response.reason_phrase)
    if "Retry-After" in response:
        plain["Retry-After"] = response["Retry-After"]
    return plain


def dump_failure(name: str, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any], error: Exception) -> bytes:
    """Return the exception as bytes for the waiters: serialized like a value of the cache, or else as text."""
    try:
        data = dumps(portable_error(name, error))
        if len(data) <= MAX_PICKLE and isinstance(loads(data), Exception):
            return b"=" + data
    except Exception:  # noqa: S110  # not every serializer takes exceptions
        pass
    return b"!" + json.dumps(_as_text(name, error).args).encode()


def load_failure(loads: Callable[[bytes], Any], data: bytes) -> Exception:
    """Return the exception from the bytes."""
    error: Exception = loads(data[1:]) if data[:1] == b"=" else ComputationFailed(*json.loads(data[1:]))
    error.add_note("It was raised in another process, which computed the value for all waiting callers.")
    return error


def _as_text(name: str, error: Exception) -> ComputationFailed:
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return ComputationFailed(name, kind, str(error)[:MAX_TEXT])
