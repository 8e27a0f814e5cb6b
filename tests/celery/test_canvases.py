"""What happens to a lock, event by event, when its task stands alone, in a chain, in a group and in a chord.

The policies for duplicates are shown with the same four in test_celery_workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.support import BUSY, lived, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app
from tests.support.celery_site.harness import KINDS, TaskQueue, ended, ended_with_its_canvas, member, published

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]


@pytest.fixture
def queues(worker_pools) -> Iterator[dict[str, TaskQueue]]:
    queues = {kind: TaskQueue(worker_pools.of("prefork")) for kind in KINDS}
    yield queues
    assert [task_queue.run_log.events("overlap") for task_queue in queues.values()] == [[]] * len(queues)


def terminate(task_queue: TaskQueue, run: dict) -> None:
    app.control.revoke(run["id"], terminate=True)


class Event(NamedTuple):
    task: Any
    how: Any
    outcome: str | None
    """The type of the task's error, or what its result begins with; None when nothing is stored."""
    options: dict = {}
    do: Callable[[TaskQueue, dict], None] | None = None
    """What is done to its first run."""
    life: float = 0
    """Seconds for which the lock may stay."""


EVENTS = {
    "success": Event(tasks.refuse, "return", "ran "),
    "failure": Event(tasks.refuse, "fail", "ZeroDivisionError"),
    "Ignore": Event(tasks.refuse, "ignore", None),
    "Reject": Event(tasks.refuse, "reject", None),
    "replace": Event(tasks.refuse, "replace", "plain"),
    "retry": Event(tasks.refuse, "retry", "2"),
    "recursion": Event(tasks.nested, 0, "['ran "),
    "replaced by itself": Event(tasks.queued_and_run, "replace by itself", "plain"),
    "autoretry": Event(tasks.autoretry, "return", "2"),
    "soft time limit": Event(tasks.refuse, "sleep", "SoftTimeLimitExceeded", {"soft_time_limit": 1}),
    "terminated": Event(tasks.refuse, "sleep", "TaskRevokedError", do=terminate),
    "SystemExit": Event(tasks.refuse, "exit", None),
    "hard time limit": Event(tasks.mortal, "sleep", "TimeLimitExceeded", {"time_limit": 1}, life=2 + 1),
    "hard time limit, deaf": Event(tasks.mortal, "deaf", "TimeLimitExceeded", {"time_limit": 1}, life=2 + 1),
    "child killed": Event(tasks.mortal, "once killed", "WorkerLostError", do=TaskQueue.kill_child, life=2 + 1),
    "child of a job killed": Event(
        tasks.mortal_job, "once killed", "WorkerLostError", do=TaskQueue.kill_child, life=2 + 1
    ),
    "delivered again": Event(tasks.dying, "once killed", "ran ", do=TaskQueue.kill_child),
}


def told(result: Any) -> str:
    return type(result).__name__ if isinstance(result, Exception) else str(result)


def free_within(task: Any, task_queue: TaskQueue, seconds: float) -> None:
    wait_until(lambda: task.lock_info(task_queue.name) is None, seconds, "the lock is free")


@pytest.mark.parametrize("event", EVENTS)
def test_event(queues, event):
    task, how, outcome, options, do, life = EVENTS[event]
    results = {kind: published(kind, task_queue, task, how, **options) for kind, task_queue in queues.items()}
    for task_queue in queues.values():
        run = task_queue.run_log.wait_for("start")
        if do is not None:
            do(task_queue, run)
    for kind, result in results.items():
        if outcome is None:
            queues[kind].run_log.wait_for("end")
            continue
        assert told(ended_with_its_canvas(kind, result)).startswith(outcome)
    for task_queue in queues.values():
        free_within(task, task_queue, life + BUSY if life else 60)
    again = [task_queue.publish(task) for task_queue in queues.values()]
    assert [ended(result).state for result in again] == ["SUCCESS"] * len(again)


@pytest.mark.parametrize("event", ["revoked", "expired", "purged"])
def test_messages_that_never_start(queues, event):
    task = tasks.short_queue if event == "purged" else tasks.job
    options = {"expires": 1} if event == "expired" else {}
    results = {
        kind: published(kind, task_queue.with_queue_of_its_own(), task, **options)
        for kind, task_queue in queues.items()
    }
    ones = [member(kind, result) for kind, result in results.items()]
    (worker,) = queues["single"].workers
    if event == "revoked":
        app.control.revoke([one.id for one in ones], destination=[worker.hostname], reply=True, timeout=10)
    if event == "purged":
        with app.connection_for_write() as connection:
            for task_queue in queues.values():
                connection.default_channel.queue_purge(task_queue.queue)
    if event != "revoked":
        for task_queue in queues.values():
            free_within(task, task_queue, 1 + BUSY)
    if event == "expired":
        lived(1)  # a message is made later than its lock is taken, on a busy machine by half a second
    for task_queue in queues.values():
        task_queue.consume()
    if event != "purged":
        assert [ended(one).state for one in ones] == ["REVOKED"] * len(ones)
    for task_queue in queues.values():
        free_within(task, task_queue, 60)
        assert task_queue.run_log.events("start") == []
        assert ended(task_queue.publish(task)).state == "SUCCESS"
