"""Prometheus metrics of the locks of this process, made from their events; the extra `metrics`.

``metrics.install()``, once per process and best in an AppConfig's ``ready()``, puts them into the default registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import conf
from .connections import clients
from .core import events, operations
from .core.driver.registry import server_of
from .exceptions import LockBackendError, LossCode

BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class _Held(Collector):
    """Counts the held locks and their waiters at each scrape, with six commands for a connection at most."""

    def describe(self) -> list[Metric]:
        return list(self._families())

    def collect(self) -> Iterator[Metric]:
        locks, oldest, waiting, slots, limits, nodes = self._families()
        try:
            found, _ = clients()
        except ImproperlyConfigured:  # the checks of the settings report it
            found = {}
        for connection, client in found.items():
            server, missing = server_of(client), dict[str, str]()
            try:
                held = server.run(operations.count(server, conf.get().key_prefix, 0, missing))
            except LockBackendError:
                continue
            locks.add_metric([connection], held.locks)
            oldest.add_metric([connection], held.oldest)
            waiting.add_metric([connection], held.waiting)
            slots.add_metric([connection], held.slots)
            limits.add_metric([connection], held.limits)
            nodes.add_metric([connection], len(missing))
        yield from (locks, oldest, waiting, slots, limits, nodes)

    def _families(self) -> list[GaugeMetricFamily]:
        words = {
            "held_locks": "Locks held now, by any process.",
            "oldest_lock_seconds": "Age of the oldest lock, but for leaders; each scrape looks at 500 locks.",
            "waiting": "Callers that wait now, in any process, but for leaders; each scrape looks at 500 locks.",
            "held_slots": "Slots of semaphores held now; each scrape looks at 500 locks.",
            "slots": "Slots that the semaphores of which one is held have together; each scrape looks at 500 locks.",
            "silent_nodes": "Nodes of a Cluster whose locks are not counted, because they do not answer.",
        }
        return [GaugeMetricFamily(f"redislock_{name}", text, labels=["connection"]) for name, text in words.items()]


class _Values(Collector):
    """The results of the calls of this package's caches in this process, from their own counters."""

    def describe(self) -> list[Metric]:
        return list(self._families().values())

    def collect(self) -> Iterator[Metric]:
        from .cache import get_cache

        families = self._families()
        for alias in settings.CACHES:
            try:
                tally = get_cache(alias).stats()
            except Exception:  # noqa: S112 - of another package, or one that cannot be made: it hides no other metrics
                continue
            families["computed"].add_metric([alias], tally.computed)
            families["avoided"].add_metric([alias], max(0, tally.waited - tally.taken_over) + tally.stale_served)
        yield from families.values()

    def _families(self) -> dict[str, CounterMetricFamily]:
        words = {
            "computed": "Values that this process computed.",
            "avoided": "Computations that this process avoided, because another process or thread computed the value.",
        }
        return {
            name: CounterMetricFamily(f"redislock_cache_{name}", text, labels=["cache"]) for name, text in words.items()
        }


class Metrics:
    """The metrics of one registry. `group` returns the value of the label ``group`` for the name of a lock.

    The name itself must not be a label, because each new name would add a series for ever.
    """

    def __init__(self, registry: CollectorRegistry, group: Callable[[str], str] | None = None) -> None:
        self._group = group
        labels = [] if group is None else ["group"]

        def counter(name: str, words: str, *more: str) -> Counter:
            return Counter(f"redislock_{name}", words, [*labels, *more], registry=registry)

        self._counters = {
            "acquired": counter("acquired", "Locks acquired by this process."),
            "released": counter("released", "Locks released by this process."),
            "lost": counter("lost", "Locks lost while this process held them.", "code"),
            "force_released": counter("force_released", "Locks that this process took from their holders."),
            "conflict": counter("conflicts", "Duplicates of tasks found by this process.", "task", "on_conflict"),
            "skipped": counter("tasks_skipped", "Duplicates of tasks that this process skipped.", "task"),
            "rescheduled": counter("tasks_rescheduled", "Tasks that this process published again, for later.", "task"),
            "backend_error": counter("backend_errors", "Calls that Redis did not answer or refused."),
        }
        if group is None:
            for code in get_args(LossCode):  # a rate sees the first loss only if the series exists before
                self._counters["lost"].labels(code=code)
        self._waited = Histogram(
            "redislock_wait_seconds",
            "Seconds that this process waited for locks that were not free at once, and for values of other callers.",
            [*labels, "outcome"],
            buckets=BUCKETS,
            registry=registry,
        )
        registry.register(_Held())
        registry.register(_Values())

    def listen(self, event: str, data: dict[str, Any]) -> None:
        """Count an event; never raises."""
        try:
            self._count(event, data)
        except Exception:  # probably of `group`; it must not break the lock
            events.log.exception(
                "The metrics of lock %r could not be counted; check the function `group`.", data.get("name")
            )

    def _count(self, event: str, data: dict[str, Any]) -> None:
        labels = {} if self._group is None else {"group": self._group(data["name"])}
        if event == "waited":
            labels["outcome"] = "acquired" if data["acquired"] else "timeout"
            self._waited.labels(**labels).observe(data["seconds"])
        elif event in self._counters:
            if event == "conflict":
                policy = data["on_conflict"]
                labels |= {"task": data["task"], "on_conflict": policy if isinstance(policy, str) else "callable"}
            elif event in ("skipped", "rescheduled"):
                labels["task"] = data["task"]
            elif event == "lost":
                labels["code"] = data["record"].code
            counter = self._counters[event]
            (counter.labels(**labels) if labels else counter).inc()


def install(registry: CollectorRegistry = REGISTRY, *, group: Callable[[str], str] | None = None) -> Callable[[], None]:
    """Register the metrics and count from now on; return a function that ends the counting.

    `group` returns the value of the label ``group`` for the name of a lock. Let it return few different values, for
    example the part before the first colon. Raises ValueError when the registry has the metrics already.
    """
    listen = Metrics(registry, group).listen
    events.listeners.append(listen)
    return lambda: events.listeners.remove(listen)
