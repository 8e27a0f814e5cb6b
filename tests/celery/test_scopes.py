"""The scopes that begin with publishing, and `keep_for`, through every event of a message's life. With real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import VERSION, chain, chord, group

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import DuplicateResult
from tests.support import BUSY, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app
from tests.support.celery_site.harness import POOLS, TaskQueue, WorkerPools, all_ended, ended

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]

SCOPES = {"queued": tasks.queued, "queued+run": tasks.queued_and_run, "job": tasks.job}


@pytest.fixture(scope="module")
def worker_pools(worker_pools) -> WorkerPools:
    worker_pools.start_all()
    return worker_pools


@pytest.fixture(params=POOLS)
def pool(request) -> str:
    return request.param


only_prefork = pytest.mark.parametrize("pool", ["prefork"], indirect=True)


@pytest.fixture
def task_queue(worker_pools, pool, request) -> Iterator[TaskQueue]:
    task = request.getfixturevalue("task") if "task" in request.fixturenames else None
    task_queue = TaskQueue(worker_pools.of(pool))
    yield task_queue
    # With scope "queued" only what waits is unique: canvases, whose members are always published, may run at the same
    # time.
    if task is not tasks.queued:
        assert task_queue.run_log.events("overlap") == []


@pytest.fixture
def blocked(worker_pools, pool) -> Iterator[TaskQueue]:
    task_queue = TaskQueue(worker_pools.of(pool), blocked=True)
    yield task_queue
    task_queue.run_log.let_bodies_end()


@pytest.fixture(params=SCOPES)
def task(request):
    return SCOPES[request.param]


# How long each scope lasts


def test_while_one_waits_none_is_published(task_queue, task):
    task_queue.with_queue_of_its_own()
    first, second = task_queue.publish(task), task_queue.publish(task)
    assert type(second) is DuplicateResult
    assert second.id == first.id
    task_queue.consume()
    assert ended(second).result == f"ran {first.id}"
    wait_until(lambda: task.lock_info(task_queue.name) is None)
    third = task_queue.publish(task)
    assert not isinstance(third, DuplicateResult)
    assert ended(third).state == "SUCCESS"
    assert len(task_queue.run_log.events("start")) == 2


def test_queued_ends_with_the_start(blocked):
    first = blocked.publish(tasks.queued)
    blocked.run_log.wait_for("start")
    assert tasks.queued.lock_info(blocked.name) is None
    second = blocked.publish(tasks.queued)
    assert not isinstance(second, DuplicateResult)
    blocked.run_log.wait_for("overlap")
    blocked.run_log.let_bodies_end()
    assert {ended(first).state, ended(second).state} == {"SUCCESS"}


def test_of_queued_and_run_one_waits_and_one_runs(blocked):
    task = tasks.queued_and_run
    first = blocked.publish(task)
    blocked.run_log.wait_for("start")
    second, third = blocked.publish(task), blocked.publish(task)
    assert not isinstance(second, DuplicateResult)
    assert (type(third), third.id) == (DuplicateResult, second.id)
    wait_until(lambda: f"{second.id}] is published again" in blocked.log)
    assert blocked.publish(task).id == second.id, "it still waits"
    blocked.run_log.let_bodies_end()
    assert {ended(first).state, ended(second).state} == {"SUCCESS"}
    assert len(blocked.run_log.events("start")) == 2
    assert blocked.run_log.events("overlap") == []


@only_prefork
def test_a_refused_message_of_queued_and_run_frees_its_place(blocked):
    task = tasks.queued_and_run_refuse
    first = blocked.publish(task)
    blocked.run_log.wait_for("start")
    for _ in range(2):
        refused = blocked.publish(task)
        assert not isinstance(refused, DuplicateResult)
        assert type(ended(refused).result) is TaskAlreadyRunning
    blocked.run_log.let_bodies_end()
    assert ended(first).state == "SUCCESS"


def test_job_lasts_to_the_end(blocked):
    first = blocked.publish(tasks.job)
    blocked.run_log.wait_for("start")
    second = blocked.publish(tasks.job)
    assert (type(second), second.id) == (DuplicateResult, first.id)
    info = tasks.job.lock_info(blocked.name)
    assert info.worker in [worker.hostname for worker in blocked.workers]
    assert info.arguments == f"name='{blocked.name}'" or "..." in info.arguments
    blocked.run_log.let_bodies_end()
    assert ended(second).state == "SUCCESS"


def test_job_lasts_over_retries(task_queue):
    first = task_queue.publish(tasks.job, "retry late")
    task_queue.run_log.wait_for("end")
    assert task_queue.publish(tasks.job).id == first.id
    assert ended(first).result == 1
    wait_until(lambda: tasks.job.lock_info(task_queue.name) is None)
    assert {event["id"] for event in task_queue.run_log.events("start")} == {first.id}


@only_prefork
def test_a_retry_with_other_arguments_takes_the_lock_along(task_queue):
    """The key that it had is free, and its own is held until its end."""
    first = task_queue.publish(tasks.job, "retry elsewhere")
    task_queue.run_log.wait_for("end")
    wait_until(lambda: tasks.job.lock_info(task_queue.name) is None)
    assert tasks.job.lock_info(f"{task_queue.name}-elsewhere").label == f"{tasks.job.name}[{first.id}]"
    second = task_queue.publish(tasks.job)
    assert not isinstance(second, DuplicateResult)
    assert ended(second).result == f"ran {second.id}"
    assert ended(first).result == f"ran {first.id}"


@only_prefork
@pytest.mark.parametrize(("how", "events"), [("fail", 1), ("retry", 3), ("ignore", 1), ("reject", 1), ("replace", 1)])
@pytest.mark.parametrize("task", [tasks.queued_and_run, tasks.job], ids=lambda task: task.__name__)
def test_no_lock_is_left_however_a_task_ends(task_queue, task, how, events):
    """Its life of ten minutes is longer than any patience here."""
    first = task_queue.publish(task, how)
    task_queue.run_log.wait_for("end", events)
    assert {event["id"] for event in task_queue.run_log.events("start")} == {first.id}
    wait_until(lambda: task.lock_info(task_queue.name) is None)
    assert ended(task_queue.publish(task)).state == "SUCCESS"


# Canvases


def test_canvases_end_though_a_duplicate_waits(task_queue, task):
    """Their members are published in any case; what they find at their start is for the policy."""
    task_queue.with_queue_of_its_own()
    one, plain = (each.si(task_queue.name).set(queue=task_queue.queue) for each in (task, tasks.plain))
    task_queue.publish(task)
    results = [
        chain(one, plain).apply_async(),
        group(one, plain).apply_async(),
        chord([one, plain], tasks.gather.s().set(queue=task_queue.queue)).apply_async(),
        chain(plain, one).apply_async(),
        chord([plain, plain], one).apply_async(),
    ]
    task_queue.consume()
    all_ended(results)


@only_prefork
def test_the_same_task_thrice_in_a_chain_and_as_a_callback(task_queue, task):
    one = task.si(task_queue.name).set(queue=task_queue.queue)
    assert ended(chain(one, one, one).apply_async()).state == "SUCCESS"
    task_queue.run_log.wait_for("end", 3)
    assert ended(task_queue.publish(task, link=one)).state == "SUCCESS"
    task_queue.run_log.wait_for("end", 5)


# Messages that never start


def test_a_revoked_message_frees_its_lock(task_queue, task):
    task_queue.with_queue_of_its_own()
    result = task_queue.publish(task)
    app.control.revoke(
        result.id, destination=[worker.hostname for worker in task_queue.workers], reply=True, timeout=10
    )
    task_queue.consume()
    assert ended(result).state == "REVOKED"
    wait_until(lambda: task.lock_info(task_queue.name) is None)
    assert task_queue.run_log.events("start") == []


@only_prefork
@pytest.mark.skipif(VERSION < (5, 6), reason="the worker of Celery 5.5 tells nobody before the message's time")
def test_what_is_revoked_and_planned_anew_runs(task_queue, task):
    """The worker has the revoked message in its memory, and meets it at its time, in an hour."""
    revoked = task_queue.publish(task, countdown=3600)
    inspect = app.control.inspect([worker.hostname for worker in task_queue.workers])
    wait_until(lambda: revoked.id in str(inspect.scheduled()))
    app.control.revoke(
        revoked.id, destination=[worker.hostname for worker in task_queue.workers], reply=True, timeout=10
    )
    assert revoked.state == "REVOKED"
    again = task_queue.publish(task)
    assert not isinstance(again, DuplicateResult)
    assert ended(again).result == f"ran {again.id}"


@only_prefork
def test_a_purged_message_frees_its_lock_within_its_life(task_queue, client):
    """Nobody meets it any more; a task that publishes for itself gives it a life that it can bear."""
    task_queue.with_queue_of_its_own()
    task_queue.publish(tasks.short_queue)
    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge(task_queue.queue)
    wait_until(lambda: tasks.short_queue.lock_info(task_queue.name) is None, 1 + BUSY)
    assert not isinstance(task_queue.publish(tasks.short_queue), DuplicateResult)
    task_queue.consume()
    task_queue.run_log.wait_for("end")


@only_prefork
def test_a_message_that_outlived_its_lock_runs_all_the_same(task_queue):
    task_queue.with_queue_of_its_own()
    results = []
    for _ in range(2):
        results.append(task_queue.publish(tasks.short_queue))
        wait_until(lambda: tasks.short_queue.lock_info(task_queue.name) is None, 1 + BUSY)
    task_queue.consume()
    states = {ended(result).state for result in results}
    assert states <= {"SUCCESS", "FAILURE"}
    assert "SUCCESS" in states


# Defects of other packages


@only_prefork
@pytest.mark.parametrize("end", ["refused", "revoked"])
def test_a_duplicate_that_ends_leaves_the_lock_to_its_holder(blocked, end):
    task = tasks.job
    first = blocked.publish(task)
    blocked.run_log.wait_for("start")
    options = {"expires": -1} if end == "revoked" else {}
    duplicate = blocked.publish(task, task_id=f"duplicate-{blocked.name}", **options)
    assert ended(duplicate).state == ("REVOKED" if end == "revoked" else "FAILURE")
    assert task.lock_info(blocked.name).label == f"{task.name}[{first.id}]"
    assert blocked.publish(task).id == first.id
    blocked.run_log.let_bodies_end()
    assert ended(first).state == "SUCCESS"


# Deaths


@only_prefork
@pytest.mark.parametrize("task", [tasks.queued, tasks.queued_and_run, tasks.job], ids=lambda task: task.__name__)
def test_the_lock_of_a_message_is_free_when_the_child_was_killed_before_the_body(task_queue, task):
    """It was acknowledged, so that nobody meets the message again."""
    result = task_queue.publish(task, "killed before the start")
    assert type(ended(result).result).__name__ == "WorkerLostError"
    wait_until(lambda: task.lock_info(task_queue.name) is None, 10)
    assert ended(task_queue.publish(task)).state == "SUCCESS"


@only_prefork
def test_the_place_of_a_retry_is_free_when_the_child_was_killed_that_published_it(task_queue):
    """The task has ended for everybody who waits for it."""
    task = tasks.mortal_queued
    first = task_queue.publish(task, "retry and die")
    assert type(ended(first).result).__name__ == "WorkerLostError"
    wait_until(lambda: task.lock_info(task_queue.name) is None, 2 + 1 + BUSY)
    second = task_queue.publish(task)
    assert not isinstance(second, DuplicateResult)
    assert ended(second).state == "SUCCESS"


# keep_for


def test_keep_for_keeps_the_lock_after_the_end_and_not_between_retries(task_queue):
    task = tasks.throttled
    assert ended(task_queue.publish(task, "retry")).result == 2
    kept = task.lock_info(task_queue.name)
    assert 0 < kept.ttl <= 60
    assert (kept.expire, kept.auto_renewal) == (60, False), "its record has the seconds for which it is kept"
    assert type(ended(task_queue.publish(task)).result) is TaskAlreadyRunning
    assert task.unlock(task_queue.name)
    assert ended(task_queue.publish(task, "fail")).state == "FAILURE"
    assert task.unlock(task_queue.name)
