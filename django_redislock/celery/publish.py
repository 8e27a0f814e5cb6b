"""Publishing: how long a message holds its lock, what a duplicate is given, and what is told of the arguments."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601, maybe_make_aware
from django.db.models import Model
from django.views.debug import get_default_exception_reporter_filter

from ..core.keys import MAX_SECONDS

LONGEST = 300
"""Characters of the arguments that are told."""


if TYPE_CHECKING:
    _AsyncResult = AsyncResult[Any]
else:
    _AsyncResult = AsyncResult  # which Celery 5.6 knows no type arguments of


class DuplicateResult(_AsyncResult):
    """The result of the task that holds the lock, in place of one that was not published."""


def life(app: Celery, queue_life: float, countdown: object, eta: object, expires: object) -> float:
    """Return for how many seconds a message holds its lock: until it should have started, and no longer than it may start."""
    begins = countdown if countdown is not None else _seconds_until(app, eta)
    seconds = queue_life + max(0.0, begins if isinstance(begins, (int, float)) else 0.0)
    ends = _seconds_until(app, expires)
    if ends is not None:
        seconds = min(seconds, max(0.001, ends))
    return min(seconds, MAX_SECONDS)


def _seconds_until(app: Celery, when: object) -> float | None:
    """Return the seconds until then, or None for what is no time: it is for Celery to refuse that."""
    if isinstance(when, (int, float)):
        return float(when)
    try:
        moment = maybe_iso8601(when) if isinstance(when, str) else when
    except ValueError:
        return None
    if not isinstance(moment, datetime):
        return None
    return (maybe_make_aware(moment, app.timezone) - app.now()).total_seconds()


class _Shortened(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Model):  # its own repr() may ask the database
            return f"{x._meta.label}:{x.pk}"
        return super().repr_instance(x, level)


_shortened = _Shortened()


def shown(bound: inspect.BoundArguments) -> str:
    """Return the arguments in words: shortened, and without those that Django's error pages hide."""
    cleanse = get_default_exception_reporter_filter().cleanse_setting
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    parts = []
    for name, value in arguments.items():
        try:
            hidden = cleanse(name, dict(value) if isinstance(value, Mapping) else value)
            parts.append(f"{name}={_shortened.repr(hidden)}")
        except Exception:  # of somebody's repr()
            parts.append(f"{name}=?")
    text = ", ".join(parts)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
