from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery, bootsteps
from kombu.transport.redis import Transport

app = Celery(
    "celery_site",
    include=["tests.support.celery_site.tasks", "tests.support.celery_site.forms", "django_redislock.tasks"],
)
app.conf.update(
    broker_connection_retry_on_startup=True,
    result_expires=600,
    worker_prefetch_multiplier=1,
    # After 4 s, the default, a worker kills a child that has not begun. On a busy machine a spawned child imports for
    # longer, and each next one did, too: no task ran any more.
    worker_proc_alive_timeout=120,
    worker_hijack_root_logger=False,
    worker_cancel_long_running_tasks_on_connection_loss=True,
)


class Keepalive(bootsteps.StartStopStep):
    """Turns the loop of a solo worker: with RabbitMQ it acknowledges a message, and gets the next, only at a turn."""

    requires = {"celery.worker.components:Timer"}

    def include_if(self, worker: Any) -> bool:
        return "solo" in worker.pool_cls.__module__

    def start(self, worker: Any) -> None:
        worker.timer.call_repeatedly(0.05, lambda: None)


class Maintenance(bootsteps.StartStopStep):
    """Looks ten times a second for children that have died, as Celery does every five seconds."""

    requires = {"celery.worker.components:Pool", "celery.worker.components:Timer"}

    def include_if(self, worker: Any) -> bool:
        return "prefork" in worker.pool_cls.__module__

    def start(self, worker: Any) -> None:
        worker.timer.call_repeatedly(0.1, worker.pool.maintain_pool)


app.steps["worker"].update({Keepalive, Maintenance})

# A worker asks Redis for the next message of all its queues, and for that long hears of no queue that is added.
Transport.brpop_timeout = 0.1

BROKER = "REDISLOCK_TEST_BROKER"
TRANSPORT = "REDISLOCK_TEST_TRANSPORT"
"""The options of the broker's transport, as JSON."""
SOFT_SHUTDOWN = "REDISLOCK_TEST_SOFT_SHUTDOWN"
"""Seconds that a worker gives its tasks before a cold shutdown."""


def use(server_url: str, broker_url: str | None = None) -> None:
    """Have the broker and the results in databases of their own, for every test empties that of the locks."""
    base = server_url.rpartition("/")[0]
    app.conf.update(
        broker_url=broker_url or f"{base}/1", result_backend=f"tests.support.celery_site.backend.Backend+{base}/2"
    )


if "REDISLOCK_TEST_TENANTS" in os.environ:
    app.conf.include = [*app.conf.include, "tests.support.celery_site.tenants"]

if TRANSPORT in os.environ:
    app.conf.broker_transport_options = json.loads(os.environ[TRANSPORT])

if SOFT_SHUTDOWN in os.environ:
    app.conf.worker_soft_shutdown_timeout = float(os.environ[SOFT_SHUTDOWN])

if "REDISLOCK_TEST_BEAT" in os.environ:
    app.conf.beat_schedule = {"it": json.loads(os.environ["REDISLOCK_TEST_BEAT"])}

if "REDISLOCK_TEST_URL" in os.environ:
    use(os.environ["REDISLOCK_TEST_URL"], os.environ.get(BROKER))
