"""What happens to a lock, event by event, when its task stands alone, in a chain, in a group and in a chord.

The policies for duplicates are shown with the same four in test_celery_workers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from django_redislock.core import held_locks
from tests.celery_site import tasks
from tests.celery_site.app import app
from tests.celery_site.harness import KINDS, Stage, Workers, ended, member, published, workers
from tests.support import BUSY, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def crew(server, tmp_path_factory) -> Iterator[Workers]:
    with workers(server, tmp_path_factory.mktemp("canvases")) as crew:
        yield crew


@pytest.fixture
def stages(crew) -> Iterator[dict[str, Stage]]:
    stages = {kind: Stage(crew.of("prefork")) for kind in KINDS}
    yield stages
    assert [stage.diary.events("overlap") for stage in stages.values()] == [[]] * len(stages)


@pytest.fixture(autouse=True)
def no_lock_is_left(client) -> Iterator[None]:
    yield
    wait_until(lambda: not list(held_locks(client)), message="all locks are released")


def kill(stage: Stage, run: dict) -> None:
    os.kill(run["pid"], signal.SIGKILL)


def terminate(stage: Stage, run: dict) -> None:
    app.control.revoke(run["id"], terminate=True)


def unlock(stage: Stage, run: dict) -> None:
    stage.diary.wait_for("held")
    assert tasks.losing.unlock(stage.name)


class Event(NamedTuple):
    task: Any
    how: str
    outcome: str | None
    """The type of the task's error, or what its result begins with; None when nothing is stored."""
    options: dict = {}
    do: Callable[[Stage, dict], None] | None = None
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
    "autoretry": Event(tasks.autoretry, "return", "2"),
    "soft time limit": Event(tasks.refuse, "sleep", "SoftTimeLimitExceeded", {"soft_time_limit": 1}),
    "terminated": Event(tasks.refuse, "sleep", "TaskRevokedError", do=terminate),
    "hard time limit": Event(tasks.mortal, "sleep", "TimeLimitExceeded", {"time_limit": 1}, life=2 + 1),
    "child killed": Event(tasks.mortal, "sleep", "WorkerLostError", do=kill, life=2 + 1),
    "delivered again": Event(tasks.dying, "once killed", "ran ", do=kill),
    "lock lost": Event(tasks.losing, "until lost", "finished", do=unlock),
}


def told(result: Any) -> str:
    return type(result).__name__ if isinstance(result, Exception) else str(result)


def free_within(task: Any, stage: Stage, seconds: float) -> None:
    wait_until(lambda: task.lock_info(stage.name) is None, seconds, "the lock is free")


@pytest.mark.parametrize("event", EVENTS)
def test_event(stages, event):
    task, how, outcome, options, do, life = EVENTS[event]
    results = {kind: published(kind, stage, task, how, **options) for kind, stage in stages.items()}
    for stage in stages.values():
        run = stage.diary.wait_for("start")
        if do is not None:
            do(stage, run)
    for kind, result in results.items():
        if outcome is None:
            stages[kind].diary.wait_for("end")
            continue
        one = ended(member(kind, result))
        failed = isinstance(one.result, Exception)
        assert told(one.result).startswith(outcome)
        match kind:
            case "chain" if event != "terminated":  # for what comes after a revoked one, Celery stores nothing
                assert told(ended(result).result) == (told(one.result) if failed else "plain")
            case "group":
                assert ended(result.results[1]).result == "plain"
            case "chord":
                assert ended(result).state == ("FAILURE" if failed else "SUCCESS")
    for stage in stages.values():
        free_within(task, stage, life + BUSY if life else 60)
    again = [stage.publish(task) for stage in stages.values()]
    assert [ended(result).state for result in again] == ["SUCCESS"] * len(again)


@pytest.mark.parametrize("event", ["revoked", "expired", "purged"])
def test_messages_that_never_start(stages, event):
    task = tasks.short_queue if event == "purged" else tasks.job
    options = {"expires": 1} if event == "expired" else {}
    results = {kind: published(kind, stage.with_queue_of_its_own(), task, **options) for kind, stage in stages.items()}
    ones = [member(kind, result) for kind, result in results.items()]
    (worker,) = stages["single"].workers
    if event == "revoked":
        app.control.revoke([one.id for one in ones], destination=[worker.hostname], reply=True, timeout=10)
    if event == "purged":
        with app.connection_for_write() as connection:
            for stage in stages.values():
                connection.default_channel.queue_purge(stage.queue)
    if event != "revoked":
        for stage in stages.values():
            free_within(task, stage, 1 + BUSY)
    for stage in stages.values():
        stage.consume()
    if event != "purged":
        assert [ended(one).state for one in ones] == ["REVOKED"] * len(ones)
    for stage in stages.values():
        free_within(task, stage, 60)
        assert stage.diary.events("start") == []
        assert ended(stage.publish(task)).state == "SUCCESS"
