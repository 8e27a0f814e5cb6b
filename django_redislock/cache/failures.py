"""Failures for those who waited: what one caller's computation or view ended with, in a form that reaches other processes."""

from __future__ import annotations

import pickle

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpResponse, HttpResponseBase
from django.http.multipartparser import MultiPartParserError

from ..exceptions import ComputationFailed

PERSONAL = (Http404, PermissionDenied, SuspiciousOperation, BadRequest, MultiPartParserError)
"""What Django answers by 4xx: it is about one request, and another's may be allowed what this one's is not."""
LONGEST = 1000
"""Characters of an error's text that are sent."""


def portable(name: str, error: Exception) -> Exception:
    """Return the exception, or ComputationFailed in place of one that does not come out of a pickle as it went in."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301  # made here
            return error
    except Exception:  # noqa: S110  # whatever its own methods raise
        pass
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return ComputationFailed(name, kind, str(error)[:LONGEST])


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
