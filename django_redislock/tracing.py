"""OpenTelemetry spans of waits, holds, commands and cached values; the extra `opentelemetry`.

``tracing.install()``, once per process, starts them. The span of a wait or a hold is made at its end, with its start
and end times, as a child of the span that is current then. ``install()`` also wraps the computing methods of the cache,
their computations, and the commands of locks; without ``install()`` there is no cost.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, get_current_span, get_tracer

from .core import events
from .core.driver.async_server import AsyncServer
from .core.driver.effects import Pipeline, ScriptBatch, ScriptCall
from .core.driver.server import Server

REMEMBERED = 10_000
"""Held locks whose start time is remembered. With more held locks, the oldest get no span."""


class Spans:
    """Makes the spans of one tracer."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("django_redislock", tracer_provider=provider)
        self._started: OrderedDict[tuple[str, int], int] = OrderedDict()

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

    def command(self, place: Any, call: ScriptCall | ScriptBatch | Pipeline) -> AbstractContextManager[object]:
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

    def request(self, operation: str, key: object) -> AbstractContextManager[Any]:
        """Return the span of a call that requests cached values."""
        attributes = {"redislock.outcome": "returned"}
        if isinstance(key, (str, int)):
            attributes["redislock.key"] = str(key)
        # Not a database span, because New Relic, for example, hides the spans within a database span, and the span of a
        # computation is within this one.
        return self._tracer.start_as_current_span(f"redislock {operation}", attributes=attributes)

    def computed(self, default: Any, requested: Any, is_async: bool) -> Any:
        """Return the computing function in a span. It also sets the outcome of the call's span to "computed"."""
        from .cache.async_calls import call_any

        def begin() -> AbstractContextManager[object]:
            if requested.is_recording():  # else the call has already returned a stale value
                requested.set_attribute("redislock.outcome", "computed")
            return self._tracer.start_as_current_span("redislock compute")

        if not is_async:

            @wraps(default, updated=())
            def compute(*args: Any) -> Any:
                with begin():
                    return default(*args)

            return compute

        @wraps(default, updated=())
        async def compute_soon(*args: Any) -> Any:
            with begin():
                return await call_any(default, *args)

        return compute_soon

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
    listen = spans.listen
    events.listeners.append(listen)
    drivers = [(Server, "call"), (AsyncServer, "call")]
    undo = [*(_wrap(*driver, spans) for driver in drivers), *_wrap_cache(spans), *_wrap_celery_refresh(spans)]

    def end() -> None:
        events.listeners.remove(listen)
        for restore in undo:
            restore()

    return end


def _wrap(kind: Any, method: str, spans: Spans) -> Callable[[], None]:
    """Put a span around each command of a driver; return a function that undoes it."""
    original = vars(kind)[method]
    if kind is AsyncServer:

        @wraps(original)
        async def call_soon(server: Any, call: Any) -> Any:
            with spans.command(server.place, call):
                return await original(server, call)

        setattr(kind, method, call_soon)
    else:

        @wraps(original)
        def call_now(server: Any, call: Any, *args: Any) -> Any:
            with spans.command(server.place, call):
                return original(server, call, *args)

        setattr(kind, method, call_now)
    return lambda: setattr(kind, method, original)


def _wrap_cache(spans: Spans) -> list[Callable[[], None]]:
    """Put a span around each call of the computing methods; return functions that undo it."""
    from .cache.compute_once import ComputeOnceMixin

    def wrap(method: str) -> Callable[[], None]:
        kind: Any = next(base for base in ComputeOnceMixin.__mro__ if method in vars(base))
        original = vars(kind)[method]

        names = ("keys" if method.endswith("many") else "key"), "default"
        is_async = method.startswith("a")

        def traced(span: Any, key: Any, default: Any, *more: Any, **options: Any) -> tuple[Any, ...]:
            if callable(default) and options.get("refresh") != "celery":  # Celery needs the function itself
                default = spans.computed(default, span, is_async)
            return key, default, *more

        def by_place(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
            return *args, *(options.pop(name) for name in names[len(args) :] if name in options)

        @wraps(original)
        def get(cache: Any, *args: Any, **options: Any) -> Any:
            given = by_place(args, options)
            with spans.request(method, given[0]) as span:
                return original(cache, *traced(span, *given, **options), **options)

        @wraps(original)
        async def aget(cache: Any, *args: Any, **options: Any) -> Any:
            given = by_place(args, options)
            with spans.request(method, given[0]) as span:
                return await original(cache, *traced(span, *given, **options), **options)

        setattr(kind, method, aget if is_async else get)
        return lambda: setattr(kind, method, original)

    return [wrap(method) for method in ("get_or_set", "aget_or_set", "get_or_set_many", "aget_or_set_many")]


def _wrap_celery_refresh(spans: Spans) -> list[Callable[[], None]]:
    """Put spans around the computations of a Celery worker for ``refresh="celery"``; return functions that undo it."""
    from .cache import refresh as refreshes

    kind: Any = refreshes.CeleryRefreshMixin
    refresh_from_message, default_of = kind.refresh_from_message, refreshes._function_of

    @wraps(refresh_from_message)
    def refresh(cache: Any, message: dict[str, Any]) -> None:
        with spans.request("refresh", message["key"]):
            refresh_from_message(cache, message)

    def traced(message: dict[str, Any]) -> Any:
        return spans.computed(default_of(message), get_current_span(), False)

    kind.refresh_from_message, refreshes._function_of = refresh, traced
    return [
        lambda: setattr(kind, "refresh_from_message", refresh_from_message),
        lambda: setattr(refreshes, "_function_of", default_of),
    ]
