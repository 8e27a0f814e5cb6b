"""OpenTelemetry spans of waits, holds, commands and cached values; the extra `opentelemetry`.

``tracing.install()``, once per process, starts them. The span of a wait or a hold is made at its end, with its start
and end times, as a child of the span that is current then. The spans of commands, of calls of the cache and of their
computations are current themselves.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, get_current_span, get_tracer

from .core import events
from .core.driver.effects import Pipeline, ScriptBatch, ScriptCall

REMEMBERED = 10_000
"""Held locks whose start time is remembered. With more held locks, the oldest get no span."""


class Spans:
    """Makes the spans of one tracer."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("django_redislock", tracer_provider=provider)
        self._started: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._requests: WeakSet[Span] = WeakSet()

    def listen(self, event: str, data: dict[str, Any]) -> None:
        """Make the span that ends with this event; never raises."""
        try:
            self._record(event, data)
        except Exception:
            events.log.exception("The span of lock %r could not be made.", data.get("name"))

    def _record(self, event: str, data: dict[str, Any]) -> None:
        now = time.time_ns()
        key = data["name"], data.get("fence") or 0
        if event == "acquired":
            self._started[key] = now
            if len(self._started) > REMEMBERED:
                self._started.popitem(last=False)
        elif event == "waited":
            outcome = "acquired" if data["acquired"] else "timeout"
            self._span("redislock wait", data, now - int(data["seconds"] * 1e9), now, {"redislock.outcome": outcome})
        elif event in ("released", "lost"):
            started = self._started.pop(key, None)
            if started is not None:
                lost = data["record"].reason if event == "lost" else None
                self._span("redislock hold", data, started, now, {"redislock.fence": key[1]}, lost)

    def around(self, step: str, about: Any) -> AbstractContextManager[object]:
        """Return the span of a step."""
        if step == "command":
            return self._command(*about)
        if step == "compute":
            return self._computation()
        return self._request(step, about)

    def _command(self, place: Any, call: ScriptCall | ScriptBatch | Pipeline) -> AbstractContextManager[object]:
        """Return the span of a command, by OpenTelemetry's conventions for databases; without a parent there is
        none."""
        if not get_current_span().get_span_context().is_valid:
            return nullcontext()
        attributes: dict[str, Any] = {"db.system.name": "redis", "db.operation.name": "EVALSHA"}
        match call:
            case ScriptCall():
                name = attributes["db.stored_procedure.name"] = f"redislock.{call.script.name}"
            case ScriptBatch():
                name = "redislock batch"
            case Pipeline():
                name = attributes["db.operation.name"] = call.commands[0][0].decode()
        if isinstance(place, tuple) and len(place) == 3 and place[1].isdecimal():
            attributes |= {"server.address": place[0], "server.port": int(place[1]), "db.namespace": place[2]}
        return self._tracer.start_as_current_span(name, kind=SpanKind.CLIENT, attributes=attributes)

    @contextmanager
    def _request(self, operation: str, key: object) -> Iterator[None]:
        """Make the span of a call that requests cached values."""
        attributes = {"redislock.outcome": "returned"}
        if isinstance(key, (str, int)):
            attributes["redislock.key"] = str(key)
        # Not a database span, because New Relic, for example, hides the spans within a database span, and the span of a
        # computation is within this one.
        with self._tracer.start_as_current_span(f"redislock {operation}", attributes=attributes) as span:
            self._requests.add(span)
            yield

    def _computation(self) -> AbstractContextManager[object]:
        """Return the span of a computation. It also sets the outcome of the request around it to "computed"."""
        request = get_current_span()
        if request in self._requests and request.is_recording():  # else it has already returned a stale value
            request.set_attribute("redislock.outcome", "computed")
        return self._tracer.start_as_current_span("redislock compute")

    def _span(
        self, title: str, data: dict[str, Any], begin: int, end: int, more: dict[str, Any], error: str | None = None
    ) -> None:
        # Not a database span, because the time under a lock is not the time of a command.
        attributes = {"redislock.name": data["name"]} | more
        span = self._tracer.start_span(title, attributes=attributes, start_time=begin)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=end)


def install(provider: TracerProvider | None = None) -> Callable[[], None]:
    """Make spans from now on, with this tracer provider or the global one; return a function that ends it."""
    spans = Spans(provider)
    listen, around = spans.listen, spans.around
    events.listeners.append(listen)
    events.observers.append(around)

    def end() -> None:
        events.listeners.remove(listen)
        events.observers.remove(around)

    return end
