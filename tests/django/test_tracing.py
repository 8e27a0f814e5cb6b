"""Spans of commands, of cached values, and of what computes them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from django.core.cache import caches
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from django_redislock import tasks, tracing
from django_redislock.cache import cached
from django_redislock.core import AsyncLock, Lock, held_locks
from tests.support import lived, wait_until
from tests.support.cache_programs import cache_at, order


@pytest.fixture
def cache(redis_url, backend):
    return cache_at(redis_url, backend)


@pytest.fixture
def tracer():
    provider = TracerProvider()
    provider.exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(provider.exporter))
    end = tracing.install(provider)
    yield provider
    end()
    provider.shutdown()


def spans_of(tracer, name):
    return [span for span in tracer.exporter.get_finished_spans() if span.name == name]


def test_the_commands_of_a_lock_are_spans_of_a_database_within_another_span(client, tracer):
    async def hold():
        async with AsyncLock(client, "a"):
            pass

    with tracer.get_tracer("view").start_as_current_span("view") as view:
        with Lock(client, "a"):
            pass
        asyncio.run(hold())
    for name in ("redislock.acquire", "redislock.release"):
        spans = spans_of(tracer, name)
        assert len(spans) == 2
        for span in spans:
            assert span.parent.span_id == view.get_span_context().span_id
            assert span.attributes["db.system.name"] == "redis"
            assert span.attributes["db.operation.name"] == "EVALSHA"
            assert span.attributes["db.stored_procedure.name"] == name
            assert span.attributes["server.port"] == client.connection_pool.connection_kwargs["port"]
    with Lock(client, "b"):
        pass
    assert len(spans_of(tracer, "redislock.acquire")) == 2  # none where nobody traces


def test_the_commands_of_a_call_to_all_nodes_of_a_cluster_are_spans_too(cluster, tracer):
    with cluster.client() as client, tracer.get_tracer("view").start_as_current_span("view"):
        list(held_locks(client))
    found = tracer.exporter.get_finished_spans()
    ports = {span.attributes["server.port"] for span in found if span.name == "redislock batch"}
    assert ports == {node.port for node in cluster.nodes}


def test_a_miss_is_a_span_with_that_of_the_computation_in_it(cache, tracer):
    assert cache.get_or_set(key="k", default=lambda: 5, timeout=60) == 5
    assert cache.get_or_set("k", lambda: 6, 60) == 5
    miss, hit = spans_of(tracer, "redislock get_or_set")
    (compute,) = spans_of(tracer, "redislock compute")
    assert compute.parent.span_id == miss.context.span_id
    assert miss.attributes["redislock.key"] == "k"
    assert (miss.attributes["redislock.outcome"], hit.attributes["redislock.outcome"]) == ("computed", "returned")
    assert cached(60, key="user:{number}")(lambda number: number)(1) == 1
    assert spans_of(tracer, "redislock get_or_set")[-1].attributes["redislock.key"] == "user:1"


def test_those_of_tasks_and_of_many_keys_are_seen_too(cache, tracer):
    inside = []

    async def load():
        inside.append(get_current_span().name)
        return 5

    async def load_many(keys):
        return dict.fromkeys(keys, 7)

    async def use():
        assert await cache.aget_or_set("k", lambda: load(), 60) == 5
        assert await cache.aget_or_set_many(["k", "l"], load_many, 60) == {"k": 5, "l": 7}

    asyncio.run(use())
    assert cache.get_or_set_many(keys=["k", "m"], default=lambda keys: dict.fromkeys(keys, 8)) == {"k": 5, "m": 8}
    for name in ("aget_or_set", "aget_or_set_many", "get_or_set_many"):
        (span,) = spans_of(tracer, f"redislock {name}")
        assert span.attributes["redislock.outcome"] == "computed"
    assert len(spans_of(tracer, "redislock compute")) == 3
    assert inside == ["redislock compute"], "the span lasts until the value is there"


def test_the_read_of_a_task_is_a_span_with_the_address_of_its_server(cache, client, tracer):
    async def read():
        with tracer.get_tracer("view").start_as_current_span("view"):
            return await cache.aget_or_set("k", lambda: 6, 60)

    cache.set("k", 5)
    assert asyncio.run(read()) == 5
    (span,) = spans_of(tracer, "GET")
    assert span.attributes["server.port"] == client.connection_pool.connection_kwargs["port"]


@pytest.mark.slow
def test_a_refresh_in_a_thread_leaves_the_ended_span_of_its_call_alone(cache, tracer, caplog):
    computed = threading.Event()
    cache.get_or_set("k", lambda: 1, 1, stale=60)
    lived(1.1)
    assert cache.get_or_set("k", lambda: computed.set() or 2, 60, stale=60, refresh="thread") == 1
    assert computed.wait(30)
    wait_until(lambda: len(spans_of(tracer, "redislock compute")) == 2)
    assert "ended span" not in caplog.text


def test_a_computation_that_fails_is_an_error_of_its_span(cache, tracer):
    with pytest.raises(ZeroDivisionError):
        cache.get_or_set("k", lambda: 1 / 0, 60)
    (compute,) = spans_of(tracer, "redislock compute")
    assert compute.status.status_code is StatusCode.ERROR


def test_only_commands_are_spans_of_a_database(cache, client, tracer):
    """New Relic shows nothing that happens within such a span, and counts it as time of the database."""
    with tracer.get_tracer("view").start_as_current_span("view"), Lock(client, "a"):
        cache.get_or_set("k", lambda: 5, 60)
    kinds = {span.name: span.kind for span in tracer.exporter.get_finished_spans()}
    assert kinds["redislock.acquire"] is kinds["redislock.lease"] is SpanKind.CLIENT
    assert kinds["redislock get_or_set"] is kinds["redislock hold"] is SpanKind.INTERNAL


@pytest.mark.parametrize("due", [True, False], ids=["due", "replaced meanwhile"])
def test_what_a_celery_worker_computes_is_seen(client, settings, server, backend, tracer, due):
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": server.url}}
    caches["default"].set("k", "old", 25)
    tasks.refresh("default", order(client) if due else order(client, old="another"))
    (refresh,) = spans_of(tracer, "redislock refresh")
    assert refresh.attributes["redislock.key"] == "k"
    assert refresh.attributes["redislock.outcome"] == ("computed" if due else "returned")
    computed = spans_of(tracer, "redislock compute")
    assert [span.parent.span_id for span in computed] == [refresh.context.span_id] * due


@pytest.mark.parametrize("method", ["get_or_set", "aget_or_set", "get_or_set_many", "aget_or_set_many"])
def test_a_call_without_a_lease_has_the_spans_of_the_call_and_its_computation(cache, tracer, method):
    keys, default = (["k"], lambda keys: {"k": 5}) if method.endswith("many") else ("k", lambda: 5)
    value = getattr(cache, method)(keys, default, 60, lock=False)
    assert (asyncio.run(value) if method.startswith("a") else value) in (5, {"k": 5})
    (request,) = spans_of(tracer, f"redislock {method}")
    (compute,) = spans_of(tracer, "redislock compute")
    assert compute.parent.span_id == request.context.span_id
    assert request.attributes["redislock.outcome"] == "computed"


def test_after_its_end_no_span_is_made(cache, client, tracer):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    end = tracing.install(provider)
    cache.get_or_set("k", lambda: 5, 60)
    end()
    seen = exporter.get_finished_spans()
    assert "redislock compute" in {span.name for span in seen}
    with tracer.get_tracer("view").start_as_current_span("view"), Lock(client, "a"):
        cache.get_or_set("l", lambda: 5, 60)
    assert exporter.get_finished_spans() == seen
    assert len(spans_of(tracer, "redislock compute")) == 2  # the other one goes on
