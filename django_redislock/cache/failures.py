"""Failures for those who waited: what one caller's computation or view ended with, in a form that reaches other processes."""

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
"""What Django answers by 4xx: it is about one request, and another's may be allowed what this one's is not."""
LONGEST = 1000
"""Characters of an error's text that are sent."""
LARGEST = 32768
"""Bytes of an exception that is sent itself."""


def portable(name: str, error: Exception) -> Exception:
    """Return the exception, or ComputationFailed in place of one that does not come out of a pickle as it went in."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301  # made here
            return error
    except Exception:  # noqa: S110  # its own methods may raise anything
        pass
    return _in_words(name, error)


def portable_answer(response: HttpResponseBase) -> HttpResponseBase:
    """Return the response, or one of its status alone, when it was made for one client only or cannot be sent."""
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


def packed(name: str, pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any], error: Exception) -> bytes:
    """Return the exception as those who wait are sent it: serialized as the cache's values are, or else told in words."""
    try:
        data = pack(portable(name, error))
        if len(data) <= LARGEST and isinstance(unpack(data), Exception):
            return b"=" + data
    except Exception:  # noqa: S110  # not every serializer takes exceptions
        pass
    return b"!" + json.dumps(_in_words(name, error).args).encode()


def unpacked(unpack: Callable[[bytes], Any], data: bytes) -> Exception:
    """Return the exception that was packed."""
    error: Exception = unpack(data[1:]) if data[:1] == b"=" else ComputationFailed(*json.loads(data[1:]))
    error.add_note("It was raised in another process, which computed the value for all who waited for it.")
    return error


def _in_words(name: str, error: Exception) -> ComputationFailed:
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return ComputationFailed(name, kind, str(error)[:LONGEST])
