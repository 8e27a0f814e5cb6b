"""Prometheus metrics and OpenTelemetry spans, made from what happens to real locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from redis.credentials import CredentialProvider

from django_redislock import metrics, tracing
from django_redislock.core import Lock, events, operations
from django_redislock.exceptions import LockBackendError, LockLost
from tests.support import counting, wait_in_a_thread, wait_until
from tests.support.admin_pages import hold, rewrite

pytestmark = pytest.mark.usefixtures("locks_by_url")


class FailingProvider(CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        raise ZeroDivisionError


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    end = metrics.install(registry)
    yield registry
    end()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    end = tracing.install(provider)
    yield exporter
    end()
    provider.shutdown()


def test_acquired_released_and_held(client: redis.Redis, registry: CollectorRegistry) -> None:
    with Lock(client, "a"), Lock(client, "b"):
        assert registry.get_sample_value("redislock_acquired_total") == 2
        assert registry.get_sample_value("redislock_held_locks", {"connection": "url"}) == 2
        assert not Lock(client, "a").acquire(blocking=False)
    assert registry.get_sample_value("redislock_released_total") == 2
    assert registry.get_sample_value("redislock_held_locks", {"connection": "url"}) == 0
    for outcome in ("acquired", "timeout"):
        assert registry.get_sample_value("redislock_wait_seconds_count", {"outcome": outcome}) is None, "no wait"


def test_the_age_of_the_oldest_lock_and_those_who_wait_now(
    client: redis.Redis, registry: CollectorRegistry, listen: Callable[..., None]
) -> None:
    def value(name: str, connection: str = "url") -> float | None:
        return registry.get_sample_value(f"redislock_{name}", {"connection": connection})

    assert (value("oldest_lock_seconds"), value("waiting")) == (0, 0)
    listen("redislock:wake:0:1:web")
    for name, seconds in (("new", 0), ("old", 7200)):
        lock = hold(client, name)
        rewrite(client, lock, younger_by=-seconds)
        client.zadd(lock._keys.queue, {f"redislock:wake:0:1:web\n{number}": 1 + number for number in range(2)})
    client.set(hold(client, "odd")._keys.lock, "of another program")
    leader = hold(client, "leader:beat", kind="leader")  # held for days, with others that wait, and nothing is wrong
    client.zadd(leader._keys.queue, {"redislock:wake:0:1:web\n1": 1})
    rewrite(client, leader, younger_by=-864_000)
    assert value("held_locks") == 4
    assert 7200 <= (value("oldest_lock_seconds") or 0) < 7300
    assert value("waiting") == 4


def test_of_many_locks_each_scrape_looks_at_some_and_all_scrapes_at_all(
    client: redis.Redis, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "LOOKED_AT", 4)
    for number in range(20):
        hold(client, f"young {number}")
    rewrite(client, hold(client, "old"), younger_by=-7200)

    def oldest() -> float:
        return registry.get_sample_value("redislock_oldest_lock_seconds", {"connection": "url"}) or 0

    wait_until(lambda: oldest() >= 7200)
    wait_until(lambda: oldest() < 7200)


@pytest.mark.slow
def test_waits_by_outcome(client: redis.Redis, registry: CollectorRegistry) -> None:
    wait_in_a_thread(client, "a")
    with Lock(client, "b"):
        assert not Lock(client, "b").acquire(timeout=2)
    assert registry.get_sample_value("redislock_wait_seconds_count", {"outcome": "acquired"}) == 1
    assert registry.get_sample_value("redislock_wait_seconds_count", {"outcome": "timeout"}) == 1
    # The wait begins when the first try was refused: the time of that try is part of the timeout and not of the wait.
    assert registry.get_sample_value("redislock_wait_seconds_sum", {"outcome": "timeout"}) >= 0.5


def test_lost_force_released_and_errors(client: redis.Redis, registry: CollectorRegistry) -> None:
    lock = Lock(client, "a", auto_renewal=False)
    assert lock.acquire()
    assert Lock(client, "a").reset()
    with pytest.raises(LockLost):
        lock.release()
    with redis.Redis(port=1) as nowhere, pytest.raises(LockBackendError):
        Lock(nowhere, "a").acquire(blocking=False)
    assert registry.get_sample_value("redislock_lost_total", {"code": "force_released"}) == 1
    assert registry.get_sample_value("redislock_lost_total", {"code": "expired"}) == 0
    for name in ("force_released", "backend_errors"):
        assert registry.get_sample_value(f"redislock_{name}_total") == 1, name
    assert registry.get_sample_value("redislock_released_total") == 0


def test_duplicates_of_tasks(registry: CollectorRegistry) -> None:
    for policy in ("skip", "skip", print):
        events.emit("conflict", "", name="task:1", holder=None, task="shop.rebuild", task_id="7", on_conflict=policy)
    for event in ("skipped", "rescheduled", "rescheduled"):
        events.emit(event, "", name="task:1", task="shop.rebuild", task_id="7")
    labels = {"task": "shop.rebuild"}
    assert registry.get_sample_value("redislock_tasks_skipped_total", labels) == 1
    assert registry.get_sample_value("redislock_tasks_rescheduled_total", labels) == 2
    labels |= {"on_conflict": "skip"}
    assert registry.get_sample_value("redislock_conflicts_total", labels) == 2
    assert registry.get_sample_value("redislock_conflicts_total", labels | {"on_conflict": "callable"}) == 1


def test_values_computed_by_the_caches(registry: CollectorRegistry) -> None:
    def computed() -> float:
        return registry.get_sample_value("redislock_cache_computed_total", {"cache": "default"}) or 0

    before = computed()
    assert caches["default"].get_or_set("metrics", lambda: 1) == 1
    assert caches["default"].get_or_set("metrics", lambda: 2) == 1
    assert computed() == before + 1
    assert registry.get_sample_value("redislock_cache_avoided_total", {"cache": "default"}) is not None


class CacheOfAnotherPackage(LocMemCache):
    def stats(self) -> tuple[int, int]:
        """Return what diskcache's cache returns."""
        return 7, 2


def test_a_thousand_names_are_no_series_of_their_own(client: redis.Redis, registry: CollectorRegistry) -> None:
    def series() -> int:
        return len(generate_latest(registry).splitlines())

    with Lock(client, "a"):
        pass
    before = series()
    for number in range(1000):
        with Lock(client, f"a:{number}"):
            pass
    assert series() == before


def test_a_scrape_is_one_command_for_each_connection_and_two_more_where_locks_are_held(
    client: redis.Redis, registry: CollectorRegistry
) -> None:
    generate_latest(registry)
    with counting(client) as counts:
        generate_latest(registry)
    assert counts["evalsha"] == 1
    with Lock(client, "a"), Lock(client, "b"), counting(client) as counts:
        generate_latest(registry)
    assert counts["evalsha"] == 3


def test_a_connection_that_is_down_is_left_out(settings: Any, registry: CollectorRegistry) -> None:
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    assert registry.get_sample_value("redislock_held_locks", {"connection": "url"}) is None
    assert registry.get_sample_value("redislock_held_locks", {"connection": "default"}) == 0


def test_a_function_for_the_password_that_fails_hides_no_other_metrics(
    settings: Any, redis_url: str, registry: CollectorRegistry
) -> None:
    settings.DJANGO_REDISLOCK = {}
    options = {"credential_provider": FailingProvider()}
    backend = "django.core.cache.backends.redis.RedisCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": redis_url, "OPTIONS": options}}
    assert b"redislock_held_locks" in generate_latest(registry)


def test_groups_that_the_program_names(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    end = metrics.install(registry, group=lambda name: {"invoice": "invoices"}[name.partition(":")[0]])
    try:
        with Lock(client, "invoice:42"), Lock(client, "unknown:1"):  # the second one's failure harms no lock
            pass
    finally:
        end()
    assert registry.get_sample_value("redislock_acquired_total", {"group": "invoices"}) == 1
    assert "The metrics of lock 'unknown:1' could not be counted; check the function `group`." in caplog.messages


def test_the_page_can_be_parsed_and_is_registered_once(client: redis.Redis, registry: CollectorRegistry) -> None:
    families = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert {"redislock_acquired", "redislock_held_locks", "redislock_wait_seconds"} <= families
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.install(registry)
    with Lock(client, "a"):
        pass
    assert registry.get_sample_value("redislock_acquired_total") == 1


def test_spans_of_a_hold_and_a_wait(client: redis.Redis, spans: InMemorySpanExporter) -> None:
    wait_in_a_thread(client, "invoice:42")
    finished = spans.get_finished_spans()
    assert sorted(span.name for span in finished) == ["redislock hold", "redislock hold", "redislock wait"]
    [wait] = [span for span in finished if span.name == "redislock wait"]
    assert wait.attributes is not None
    assert wait.attributes["redislock.name"] == "invoice:42"
    assert wait.attributes["redislock.outcome"] == "acquired"
    for span in finished:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
        assert span.status.status_code is StatusCode.UNSET


def test_the_span_of_a_lost_lock_is_an_error(client: redis.Redis, spans: InMemorySpanExporter) -> None:
    lock = Lock(client, "a", auto_renewal=False)
    assert lock.acquire()
    Lock(client, "a").reset()
    with pytest.raises(LockLost):
        lock.release()
    [span] = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR


def test_spans_are_remembered_for_no_more_than_so_many(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "REMEMBERED", 2)
    spans = tracing.Spans(TracerProvider())
    for fence in range(1, 6):
        spans.listen("acquired", {"name": "a", "fence": fence})
    assert len(spans._started) == 2


def test_a_cache_or_a_setting_that_is_wrong_does_not_hide_the_other_metrics(
    settings: Any, registry: CollectorRegistry
) -> None:
    """With diskcache each scrape failed: AttributeError, a tuple has no `computed`."""
    disk = {"BACKEND": f"{__name__}.{CacheOfAnotherPackage.__name__}"}
    settings.CACHES = {"disk": disk, "wrong": {"BACKEND": "django_redislock.cache.Missing"}} | settings.CACHES
    assert registry.get_sample_value("redislock_cache_computed_total", {"cache": "default"}) is not None
    assert registry.get_sample_value("redislock_cache_computed_total", {"cache": "disk"}) is None
    settings.DJANGO_REDISLOCK = {"EXPIRE": "wrong"}
    text = generate_latest(registry).decode()
    assert "redislock_acquired_total" in text
    assert 'redislock_cache_computed_total{cache="default"}' in text
