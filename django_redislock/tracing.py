"""OpenTelemetry spans of waits, holds, commands and cached values; the extra `opentelemetry`.

``tracing.install()``, once per process, starts them. The span of a wait or a hold is made at its end, with its begin
and its end, as a child of the span that is current then. ``install()`` also wraps the computing methods of the cache,
their computations, and the commands of locks; without it these cost nothing more.
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

    def command(self, place: Any, call: ScriptCall | ScriptBatch | Pipeline) -> AbstractContextManager[object]:
        """Return the span of a command, by the conventions for databases; none outside of another span."""
        if not get_current_span().get_span_context().is_valid:
            return nullcontext()
        about: dict[str, Any] = {"db.system.name": "redis", "db.operation.name": "EVALSHA"}
        match call:
            case ScriptCall():
                name = about["db.stored_procedure.name"] = f"redislock.{call.script.name}"
            case ScriptBatch():
                name = "redislock batch"
            case Pipeline():
                name = about["db.operation.name"] = call.commands[0][0].decode()
        if isinstance(place, tuple) and len(place) == 3 and place[1].isdecimal():
            about |= {"server.address": place[0], "server.port": int(place[1]), "db.namespace": place[2]}
        return self._tracer.start_as_current_span(name, kind=SpanKind.CLIENT, attributes=about)

    def wanted(self, operation: str, key: object) -> AbstractContextManager[Any]:
        """Return the span of a call that wants cached values."""
        about = {"redislock.outcome": "returned"}
        if isinstance(key, (str, int)):
            about["redislock.key"] = str(key)
        # Not a database span: New Relic, for example, hides all spans within a database span, and here values are
        # computed.
        return self._tracer.start_as_current_span(f"redislock {operation}", attributes=about)

    def computed(self, default: Any, asked: Any, by_task: bool) -> Any:
        """Return the computing function with a span around it; it also marks the span of the call as computed."""
        from .cache.async_calls import call_any

        def begin() -> AbstractContextManager[object]:
            if asked.is_recording():  # else the call has returned an old value already
                asked.set_attribute("redislock.outcome", "computed")
            return self._tracer.start_as_current_span("redislock compute")

        if not by_task:

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
        about = {
            "redislock.name": data["name"]
        } | more  # no span of a database: what is done under a lock is not its time
        span = self._tracer.start_span(title, attributes=about, start_time=begin)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=end)


def install(provider: TracerProvider | None = None) -> Callable[[], None]:
    """Make spans from now on, with the global tracer provider or this one; return a function that ends it."""
    spans = Spans(provider)
    listen = spans.listen
    events.listeners.append(listen)
    drivers = [(Server, "call"), (AsyncServer, "call")]
    undo = [*(_wrap(*driver, spans) for driver in drivers), *_wrap_cache(spans), *_wrap_orders(spans)]

    def end() -> None:
        events.listeners.remove(listen)
        for each in undo:
            each()

    return end


def _wrap(kind: Any, method: str, spans: Spans) -> Callable[[], None]:
    """Put a span around the commands of a driver; return a function that undoes it."""
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
    """Put a span around the methods that compute; return functions that undo it."""
    from .cache.compute_once import ComputeOnceMixin

    def wrap(method: str) -> Callable[[], None]:
        kind: Any = next(base for base in ComputeOnceMixin.__mro__ if method in vars(base))
        original = vars(kind)[method]

        names = ("keys" if method.endswith("many") else "key"), "default"
        by_task = method.startswith("a")

        def traced(span: Any, key: Any, default: Any, *more: Any, **options: Any) -> tuple[Any, ...]:
            if callable(default) and options.get("refresh") != "celery":  # Celery needs the function itself
                default = spans.computed(default, span, by_task)
            return key, default, *more

        def by_place(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
            return *args, *(options.pop(name) for name in names[len(args) :] if name in options)

        @wraps(original)
        def get(cache: Any, *args: Any, **options: Any) -> Any:
            given = by_place(args, options)
            with spans.wanted(method, given[0]) as span:
                return original(cache, *traced(span, *given, **options), **options)

        @wraps(original)
        async def aget(cache: Any, *args: Any, **options: Any) -> Any:
            given = by_place(args, options)
            with spans.wanted(method, given[0]) as span:
                return await original(cache, *traced(span, *given, **options), **options)

        setattr(kind, method, aget if by_task else get)
        return lambda: setattr(kind, method, original)

    return [wrap(method) for method in ("get_or_set", "aget_or_set", "get_or_set_many", "aget_or_set_many")]


def _wrap_orders(spans: Spans) -> list[Callable[[], None]]:
    """Put spans around what a Celery worker computes for ``refresh="celery"``; return functions that undo it."""
    from .cache import celery_refresh

    kind: Any = celery_refresh.CeleryRefreshMixin
    refresh_from_message, default_of = kind.refresh_from_message, celery_refresh._function_of

    @wraps(refresh_from_message)
    def refresh(cache: Any, message: dict[str, Any]) -> None:
        with spans.wanted("refresh", message["key"]):
            refresh_from_message(cache, message)

    def traced(message: dict[str, Any]) -> Any:
        return spans.computed(default_of(message), get_current_span(), False)

    kind.refresh_from_message, celery_refresh._function_of = refresh, traced
    return [
        lambda: setattr(kind, "refresh_from_message", refresh_from_message),
        lambda: setattr(celery_refresh, "_function_of", default_of),
    ]
