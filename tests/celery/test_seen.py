"""What others see of a task that is refused or skipped: signals, Celery's events (which Flower shows), logs, Sentry."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import signals

from django_redislock import TaskAlreadyRunning
from django_redislock.core import Lock
from tests.support import name_of, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.harness import TaskQueue, ended, events

# Signals


SENT = {
    "raise": ["task_prerun", "task_failure", "task_postrun"],
    "wait": ["task_prerun", "task_failure", "task_postrun"],
    "skip": ["task_prerun", "task_postrun", "task_success"],
    "callable": ["task_prerun", "task_postrun", "task_success"],
}


@pytest.mark.parametrize("policy", SENT)
def test_the_signals_of_a_refused_task(client: Any, make: Any, policy: str) -> None:
    decision = (lambda task, error: None) if policy == "callable" else policy
    task = make(lambda self: pytest.fail("the body ran"), on_conflict=decision, wait=0.01)
    heard: list[tuple[str, Any]] = []
    receivers = {}
    for name in ("task_prerun", "task_success", "task_failure", "task_retry", "task_postrun"):

        def receive(sender: Any = None, exception: Any = None, name: str = name, **more: Any) -> None:
            if sender is task:
                heard.append((name, exception))

        receivers[name] = receive
        getattr(signals, name).connect(receive)
    try:
        with Lock(client, name_of(task), label="somebody"):
            task.apply()
    finally:
        for name, receive in receivers.items():
            getattr(signals, name).disconnect(receive)
    assert sorted(name for name, _ in heard) == sorted(SENT[policy])
    for _, exception in heard:
        assert exception is None or type(exception) is TaskAlreadyRunning, "by which an alert can tell it"


# Celery's events, and the worker's log


@pytest.mark.processes
@pytest.mark.usefixtures("no_lock_is_left")
def test_flower_and_the_log_of_a_worker(worker_pools: Any) -> None:
    worker = worker_pools.start("prefork", 0, "--task-events", name="seen", concurrency=4)
    task_queue = TaskQueue([worker.wait_ready()], blocked=True)
    with events() as heard:
        runs = [task_queue.publish(task) for task in (tasks.refuse, tasks.skip)]
        task_queue.run_log.wait_for("start", 2)
        refused, skipped = (ended(task_queue.publish(task)) for task in (tasks.refuse, tasks.skip))
        wait_until(lambda: len(heard[refused.id]) >= 3 and len(heard[skipped.id]) >= 3, 30, lambda: f"{heard}")
        task_queue.run_log.let_bodies_end()
    assert [ended(result).state for result in runs] == ["SUCCESS"] * 2
    assert (refused.state, type(refused.result)) == ("FAILURE", TaskAlreadyRunning)
    assert (skipped.state, skipped.result) == ("SUCCESS", "skipped")
    *_, last = heard[refused.id]
    assert (last["type"], last["exception"].partition("(")[0]) == ("task-failed", "TaskAlreadyRunning")
    assert heard[skipped.id][-1]["type"] == "task-succeeded"
    lines = [line for line in task_queue.log.splitlines() if refused.id in line or skipped.id in line]
    assert [line for line in lines if not re.search(r"[:/ \[]INFO[/\]:]", line)] == [], "no line is above INFO"
    assert "Traceback" not in task_queue.log
    assert sum("is skipped, because the lock has been held" in line for line in lines) == 1
    assert sum("did not get its lock" in line for line in lines if skipped.id in line) == 0


# Sentry

SENTRY = """
import logging, sentry_sdk
from celery import Celery
from celery.app.trace import build_tracer
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport
from django_redislock.celery import single_instance
from django_redislock.core import Lock
from django_redislock.connections import get_client

class Kept(Transport):
    def capture_envelope(self, envelope):
        event = envelope.get_event()
        if event is not None:
            failed = "exception" in event
            told.append([event["exception"]["values"][-1]["type"] if failed else event["logentry"]["message"]])

told = []
sentry_sdk.init(dsn="http://a@localhost/1", transport=Kept, integrations=[CeleryIntegration()])
logging.basicConfig(level=logging.INFO)
app = Celery("sentry", broker="memory://", backend="cache+memory://")

def run(task):
    # Sentry puts itself into Celery's tracer
    from celery.app import trace
    request = {"id": task.name, "root_id": task.name, "delivery_info": {}, "called_directly": False, "hostname": "h"}
    trace.build_tracer(task.name, task, app=app)(task.name, (), {}, request)

for policy in ("raise", "skip", "wait"):
    def fail():
        raise ZeroDivisionError
    app.task(name=policy)(single_instance(key=[], on_conflict=policy, wait=0.01)(fail))
    task = app.tasks[policy]
    with Lock(get_client(), f"celery:{policy}"):
        run(task)
    say(policy=policy, told=told[:])
run(task)
say(policy="free", told=told[:])
"""


def test_sentry_has_no_error_of_a_refused_or_skipped_task_and_one_of_a_task_that_fails(run_python: Any) -> None:
    lines = {line["policy"]: line["told"] for line in run_python(SENTRY).finish()}
    assert lines == {"raise": [], "skip": [], "wait": [], "free": [["ZeroDivisionError"]]}
