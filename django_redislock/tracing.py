"""OpenTelemetry spans of the waits for locks and of the time they are held; the extra `opentelemetry`.

``tracing.install()``, once per process, begins with them. A span is made when what it tells of is over, with the times at which
that began and ended, as a child of the span that is current then.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, get_tracer

from .core import events

REMEMBERED = 10_000
"""Held locks of which the begin is remembered; of more than these, the oldest have no span."""


class Spans:
    """Makes the spans of one tracer."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("django_redislock", tracer_provider=provider)
        self._since: OrderedDict[tuple[str, int], int] = OrderedDict()

    def listen(self, event: str, data: dict[str, Any]) -> None:
        """Make the span that ends with this event; never raises."""
        try:
            self._tell(event, data)
        except Exception:
            events.log.exception("The span of lock %r failed.", data.get("name"))

    def _tell(self, event: str, data: dict[str, Any]) -> None:
        now = time.time_ns()
        key = data["name"], data.get("fence") or 0
        if event == "acquired":
            self._since[key] = now
            if len(self._since) > REMEMBERED:
                self._since.popitem(last=False)
        elif event == "waited":
            outcome = "acquired" if data["acquired"] else "timeout"
            self._span("redislock wait", data, now - int(data["seconds"] * 1e9), now, {"redislock.outcome": outcome})
        elif event in ("released", "lost"):
            since = self._since.pop(key, None)
            if since is not None:
                lost = data["record"].reason if event == "lost" else None
                self._span("redislock hold", data, since, now, {"redislock.fence": key[1]}, lost)

    def _span(
        self, title: str, data: dict[str, Any], begin: int, end: int, more: dict[str, Any], error: str | None = None
    ) -> None:
        about = {"redislock.name": data["name"], "db.system.name": "redis"} | more
        span = self._tracer.start_span(title, kind=SpanKind.CLIENT, attributes=about, start_time=begin)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=end)


def install(provider: TracerProvider | None = None) -> Callable[[], None]:
    """Make spans from now on, with the global tracer provider or this one; return a function that ends it."""
    listen = Spans(provider).listen
    events.listeners.append(listen)
    return lambda: events.listeners.remove(listen)
