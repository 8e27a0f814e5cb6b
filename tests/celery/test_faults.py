"""What kills a task: limits, revokes, signals, dead children and hosts, a server that goes away. With real workers."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from django_redislock import LockBackendError
from django_redislock.core import held_locks
from tests.support import BUSY, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import SOFT_SHUTDOWN, app
from tests.support.celery_site.harness import (
    KINDS,
    POOLS,
    Stage,
    ended,
    ended_with_its_canvas,
    member,
    on_stage,
    published,
)
from tests.support.worker import Worker

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]

LIFE = 2
"""Seconds that a lock of the mortal tasks lives without its holder."""


@pytest.fixture
def stage(crew) -> Iterator[Stage]:
    yield from on_stage(Stage(crew.of("prefork")))


def runs(stage: Stage, task) -> dict:
    """Publish a task that lasts until a signal comes, and wait until it runs."""
    result = stage.publish(task, "sleep")
    return {"result": result, **stage.diary.wait_for("start")}


def run_in_all(
    worker: Worker, task, how: str = "sleep", kinds: Sequence[str] = KINDS, gated: bool = False
) -> dict[str, tuple[Stage, Any]]:
    """Have the worker run the task alone and in every canvas; return the stages and results when all have started."""
    stages = {kind: Stage([worker], gated) for kind in kinds}
    running = {kind: (stage, published(kind, stage, task, how)) for kind, stage in stages.items()}
    for stage in stages.values():
        stage.diary.wait_for("start")
    return running


def free_within(task, stage: Stage, seconds: float) -> None:
    wait_until(lambda: task.lock_info(stage.name) is None, seconds + BUSY, "the lock is free")


# Ends that the child notices: the lock is free at once, though its life is ten minutes


def test_soft_time_limit_while_waiting_for_the_lock(stage, client):
    """The waiter leaves the queue, so that the next one is served."""
    holder = runs(stage, tasks.wait)
    waiter = stage.publish(tasks.wait, soft_time_limit=4)
    wait_until(lambda: tasks.wait.lock_info(stage.name).waiting == 1)
    assert type(ended(waiter).result).__name__ == "SoftTimeLimitExceeded"
    wait_until(lambda: tasks.wait.lock_info(stage.name).waiting == 0)
    app.control.revoke(holder["result"].id, terminate=True)
    assert ended(stage.publish(tasks.wait)).state == "SUCCESS"


def test_system_exit_in_the_body(stage):
    stage.publish(tasks.refuse, "exit")
    stage.diary.wait_for("end")
    free_within(tasks.refuse, stage, 5)
    assert ended(stage.publish(tasks.refuse)).state == "SUCCESS"


# Ends that nobody can answer to: the lock ends by its life


def test_hard_time_limit(stage):
    """Celery reports it some time before the child is dead; the lock is not released for the report."""
    result = stage.publish(tasks.mortal, "deaf", time_limit=1)
    assert type(ended(result).result).__name__ == "TimeLimitExceeded"
    free_within(tasks.mortal, stage, LIFE + 1)
    assert ended(stage.publish(tasks.mortal)).state == "SUCCESS"


@pytest.fixture
def place(crew, client):
    """Have a message wait in its body's start for one that runs; return the stage and how to see the place it holds."""
    stage = Stage(crew.of("prefork"), gated=True)
    task = tasks.mortal_waiting
    stage.publish(task)
    stage.diary.wait_for("start")

    def place():
        return next((lock for lock in held_locks(client) if lock.name.startswith(f"celery-queue:{task.name}:")), None)

    yield stage, task, place
    stage.diary.open_gate()
    assert stage.diary.events("overlap") == []


def test_the_place_of_a_message_that_waits_in_its_start_is_renewed(place):
    stage, task, held = place
    second = stage.publish(task)
    wait_until(lambda: held().ttl <= 4)
    seen = [held().ttl]

    def renewed():
        seen.append(held().ttl)
        return seen[-1] > seen[-2]

    wait_until(renewed)
    assert stage.publish(task).id == second.id, "it is still the one that waits"
    stage.diary.open_gate()
    assert ended(second).state == "SUCCESS"


def test_hard_time_limit_while_waiting_for_the_lock(place):
    """Celery sends SIGTERM first, after which a child has a tenth of a second, unless it is deaf."""
    stage, task, held = place
    killed = stage.publish(task, "deaf before the start", time_limit=1)
    assert type(ended(killed).result).__name__ == "TimeLimitExceeded"
    wait_until(lambda: held() is None, 4 + 1 + BUSY, "the place is free")
    stage.diary.open_gate()
    assert ended(stage.publish(task)).state == "SUCCESS"


def test_child_killed_and_its_message_delivered_again(stage):
    """The only copy of the message meets the lock of its own dead run; it is neither dropped nor refused."""
    result = stage.publish(tasks.mortal_late, "sleep")
    first = stage.diary.wait_for("start")
    stage.kill_child(first)
    second = stage.diary.wait_for("start", 2, timeout=LIFE + 10)
    assert second["id"] == first["id"]
    app.control.revoke(result.id, terminate=True)
    free_within(tasks.mortal_late, stage, 10)


def test_main_process_and_children_killed(crew):
    worker = crew.start("prefork", name="doomed", concurrency=4).wait_ready()
    running = run_in_all(worker, tasks.mortal)
    worker.kill()
    for stage, _ in running.values():
        free_within(tasks.mortal, stage, LIFE + 1)


@pytest.mark.parametrize("pool", POOLS)
def test_warm_shutdown_lets_the_task_finish(crew, pool):
    """And another worker does what is left of its canvas."""
    kinds = KINDS if pool != "solo" else ["chain"]  # it does one thing at a time
    worker = crew.start(pool, name=f"warm-{pool}", concurrency=len(kinds)).wait_ready()
    running = run_in_all(worker, tasks.refuse, "return", kinds, gated=True)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in worker.log)
    for stage, _ in running.values():
        assert tasks.refuse.lock_info(stage.name) is not None
        stage.diary.open_gate()
    assert worker.wait() == 0
    for kind, (stage, result) in running.items():
        assert member(kind, result).state == "SUCCESS"
        assert tasks.refuse.lock_info(stage.name) is None
        stage.workers = crew.of("prefork")
        stage.consume()
        assert ended_with_its_canvas(kind, result).startswith("ran ")
        assert ended(stage.publish(tasks.refuse)).state == "SUCCESS"


def test_cold_shutdown(crew):
    worker = crew.start("prefork", name="cold", concurrency=4).wait_ready()
    running = run_in_all(worker, tasks.refuse)
    worker.signal(signal.SIGQUIT)
    worker.wait()
    for stage, _ in running.values():
        free_within(tasks.refuse, stage, 5)


@pytest.mark.parametrize("task", [tasks.late_job, tasks.job], ids=lambda task: task.__name__)
def test_cold_shutdown_ends_a_job_only_if_it_does_not_come_again(crew, task):
    """Else somebody could publish a second one, and the first would be refused when it comes."""
    cold = crew.start("prefork", name=f"cold-{task.__name__}", concurrency=1).wait_ready()
    stage = Stage([cold], gated=True)
    first = stage.publish(task)
    stage.diary.wait_for("start")
    cold.signal(signal.SIGQUIT)
    cold.wait()
    if not task.acks_late:
        free_within(task, stage, 5)
        return
    assert task.lock_info(stage.name).label == f"{task.name}[{first.id}]"
    assert stage.publish(task).id == first.id
    stage.diary.open_gate()
    stage.workers = crew.of("prefork")
    stage.consume()
    assert ended(first).result == f"ran {first.id}"


def test_soft_shutdown_ends_a_job_only_if_it_ends_in_time(crew):
    """Celery gives what runs some seconds, and its broker what does not end in them."""
    task = tasks.late_job
    soft = crew.start("prefork", name="soft", concurrency=2, env={SOFT_SHUTDOWN: "3"}).wait_ready()
    quick, slow = stages = [Stage([soft], gated=True) for _ in range(2)]
    results = [stage.publish(task) for stage in stages]
    for stage in stages:
        stage.diary.wait_for("start")
    soft.signal(signal.SIGQUIT)
    wait_until(lambda: "Initiating Soft Shutdown" in soft.log)
    quick.diary.open_gate()
    quick.diary.wait_for("end")
    free_within(task, quick, 5)
    assert task.lock_info(slow.name).id != results[1].id, "it still runs"
    soft.wait()
    assert task.lock_info(slow.name).id == results[1].id, "its message has the lock"
    assert slow.publish(task).id == results[1].id
    slow.diary.open_gate()
    for stage in stages:
        stage.workers = crew.of("prefork")
    slow.consume()
    for stage, result, runs in zip(stages, results, (1, 2), strict=True):
        assert ended(result).result == f"ran {result.id}"
        assert len(stage.diary.events("start")) == runs


def test_a_job_that_is_terminated_has_ended_though_it_is_acknowledged_late(stage):
    first = stage.publish(tasks.late_job, "sleep")
    stage.diary.wait_for("start")
    app.control.revoke(first.id, terminate=True)
    free_within(tasks.late_job, stage, 10)
    assert ended(first).state == "REVOKED"
    assert ended(stage.publish(tasks.late_job)).state == "SUCCESS"


@pytest.mark.parametrize("how", ["sleep", "deaf"])
def test_a_job_that_its_hard_time_limit_ends_has_ended_though_it_is_acknowledged_late(stage, how):
    """The child that ends by SystemExit left the lock to its message, which was acknowledged, for an hour."""
    first = stage.publish(tasks.late_job, how, time_limit=1)
    stage.diary.wait_for("start")
    assert ended(first).state == "FAILURE"
    free_within(tasks.late_job, stage, 10)
    assert ended(stage.publish(tasks.late_job)).state == "SUCCESS"


BEFORE_5_7 = not hasattr(app.Task, "retry_on_worker_lost")


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param(
            False,
            id="result stored",
            marks=pytest.mark.skipif(BEFORE_5_7, reason="Celery 5.6 cannot store a CancelledError, and tells nobody"),
        ),
        pytest.param(True, id="result ignored"),
    ],
)
def test_a_job_that_ends_by_a_cancellation_has_ended_because_a_child_acknowledges_its_message(stage, ignored):
    """It is no Exception, so the lock was left to the message. In other pools that is right: it is not acknowledged."""
    stage.publish(tasks.once_job, "cancelled", ignore_result=ignored)
    stage.diary.wait_for("start")
    free_within(tasks.once_job, stage, 10)
    assert ended(stage.publish(tasks.once_job)).state == "SUCCESS"


@pytest.mark.skipif(BEFORE_5_7, reason="the setting is new in Celery 5.7")
def test_a_job_that_celery_retries_because_its_child_was_killed_keeps_its_lock(stage):
    """The lock of the child ended after its expiry, and a duplicate was published and ran before the retry."""
    first = stage.publish(tasks.retried_job, "once killed")
    stage.kill_child(stage.diary.wait_for("start"))
    wait_until(
        lambda: tasks.retried_job.lock_info(stage.name).ttl > 60, message="the message of the retry has the lock"
    )
    assert stage.publish(tasks.retried_job).id == first.id
    assert ended(first).result == f"ran {first.id}"
    assert [run["id"] for run in stage.diary.events("start")] == [first.id] * 2
    free_within(tasks.retried_job, stage, 10)


@pytest.mark.skipif(BEFORE_5_7, reason="the option is new in Celery 5.7")
def test_children_that_were_spawned_renew_their_locks_and_leave_none_when_they_are_killed(crew):
    worker = crew.start("prefork", 0, "--pool-start-method=spawn", name="spawn", concurrency=3).wait_ready()
    running = [(task, Stage([worker])) for task in (tasks.mortal, tasks.mortal_queued, tasks.mortal_job)]
    bodies = [runs(stage, task) for task, stage in running]
    wait_until(lambda: all(task.lock_info(stage.name).age > LIFE + 1 for task, stage in running))
    for (_, stage), body in zip(running, bodies, strict=True):
        stage.kill_child(body)
    for task, stage in running:
        free_within(task, stage, LIFE + 1)
        assert ended(stage.publish(task)).state == "SUCCESS"
        assert stage.diary.events("overlap") == []


# The lock's own faults


@pytest.fixture(params=POOLS)
def pool(request) -> str:
    return request.param


def test_a_lost_lock_is_told_to_the_body_and_its_result_stands(crew, pool):
    stage = Stage(crew.of(pool))
    result = stage.publish(tasks.losing, "until lost")
    stage.diary.wait_for("held")
    assert tasks.losing.unlock(stage.name)
    assert stage.diary.wait_for("told")["error"] == "LockLost"
    assert ended(result).result == "finished all the same"
    told = rf"Lock 'celery:{tasks.losing.name}:{stage.name}' \(fence \d+\) was lost: "
    wait_until(lambda: re.search(told, stage.log))  # a thread of its own tells


@pytest.fixture
def apart(crew, own_server, settings) -> Iterator[Worker]:
    """A worker whose locks live on a server of their own, which the test may kill."""
    settings.DJANGO_REDISLOCK = {"URL": own_server.url}
    name = f"apart-{own_server.port}"
    worker = crew.start("prefork", name=name, concurrency=len(KINDS), env={"REDISLOCK_TEST_LOCKS": own_server.url})
    yield worker.wait_ready()
    worker.close()


def test_redis_down_at_the_start(apart, own_server):
    stage = Stage([apart])
    own_server.stop()
    for kind in KINDS:
        assert type(ended_with_its_canvas(kind, published(kind, stage, tasks.refuse))) is LockBackendError
    assert ended(stage.publish(tasks.run_without)).state == "SUCCESS"
    assert "runs without its lock, because Redis does not answer" in apart.log
    later = stage.publish(tasks.try_later)
    wait_until(lambda: later.state == "RETRY")
    own_server.start()
    assert ended(later).result == f"ran {later.id}"
    assert len(stage.diary.events("start")) == 2


@pytest.mark.parametrize(
    ("task", "how", "outcome", "told"),
    [
        (tasks.refuse, "return", "ran ", "could not release its lock, which ends by its expiry"),
        (tasks.mortal, "until lost", "finished", " was lost: "),
    ],
    ids=["release", "renewal"],
)
def test_redis_down_at_the_release_or_the_renewal(apart, own_server, task, how, outcome, told):
    running = run_in_all(apart, task, how, gated=True)
    own_server.stop()
    for stage, _ in running.values():
        stage.diary.open_gate()
    for kind, (_, result) in running.items():
        assert ended_with_its_canvas(kind, result).startswith(outcome)
    wait_until(lambda: apart.log.count(told) == len(running))
    own_server.start()
    for stage, _ in running.values():
        assert ended(stage.publish(task)).state == "SUCCESS"
