"""The scopes that begin with publishing, and `keep_for`, through every event of a message's life. With real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import chain, chord, group

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import DuplicateResult
from tests.support import BUSY, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app
from tests.support.celery_site.harness import POOLS, Stage, Workers, all_ended, ended

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]

SCOPES = {"queued": tasks.queued, "queued+run": tasks.queued_and_run, "job": tasks.job}


@pytest.fixture(scope="module")
def crew(crew) -> Workers:
    crew.start_all()
    return crew


@pytest.fixture(params=POOLS)
def pool(request) -> str:
    return request.param


only_prefork = pytest.mark.parametrize("pool", ["prefork"], indirect=True)


@pytest.fixture
def stage(crew, pool, request) -> Iterator[Stage]:
    task = request.getfixturevalue("task") if "task" in request.fixturenames else None
    stage = Stage(crew.of(pool))
    yield stage
    # With scope "queued" only what waits is unique: canvases, whose members are always published, may run at the same
    # time.
    if task is not tasks.queued:
        assert stage.diary.events("overlap") == []


@pytest.fixture
def gated(crew, pool) -> Iterator[Stage]:
    stage = Stage(crew.of(pool), gated=True)
    yield stage
    stage.diary.open_gate()


@pytest.fixture(params=SCOPES)
def task(request):
    return SCOPES[request.param]


# How long each scope lasts


def test_while_one_waits_none_is_published(stage, task):
    stage.with_queue_of_its_own()
    first, second = stage.publish(task), stage.publish(task)
    assert type(second) is DuplicateResult
    assert second.id == first.id
    stage.consume()
    assert ended(second).result == f"ran {first.id}"
    wait_until(lambda: task.lock_info(stage.name) is None)
    third = stage.publish(task)
    assert not isinstance(third, DuplicateResult)
    assert ended(third).state == "SUCCESS"
    assert len(stage.diary.events("start")) == 2


def test_queued_ends_with_the_start(gated):
    first = gated.publish(tasks.queued)
    gated.diary.wait_for("start")
    assert tasks.queued.lock_info(gated.name) is None
    second = gated.publish(tasks.queued)
    assert not isinstance(second, DuplicateResult)
    gated.diary.wait_for("overlap")
    gated.diary.open_gate()
    assert {ended(first).state, ended(second).state} == {"SUCCESS"}


def test_of_queued_and_run_one_waits_and_one_runs(gated):
    task = tasks.queued_and_run
    first = gated.publish(task)
    gated.diary.wait_for("start")
    second, third = gated.publish(task), gated.publish(task)
    assert not isinstance(second, DuplicateResult)
    assert (type(third), third.id) == (DuplicateResult, second.id)
    wait_until(lambda: f"{second.id}] is published again" in gated.log)
    assert gated.publish(task).id == second.id, "it still waits"
    gated.diary.open_gate()
    assert {ended(first).state, ended(second).state} == {"SUCCESS"}
    assert len(gated.diary.events("start")) == 2
    assert gated.diary.events("overlap") == []


@only_prefork
def test_a_refused_message_of_queued_and_run_frees_its_place(gated):
    task = tasks.queued_and_run_refuse
    first = gated.publish(task)
    gated.diary.wait_for("start")
    for _ in range(2):
        refused = gated.publish(task)
        assert not isinstance(refused, DuplicateResult)
        assert type(ended(refused).result) is TaskAlreadyRunning
    gated.diary.open_gate()
    assert ended(first).state == "SUCCESS"


def test_job_lasts_to_the_end(gated):
    first = gated.publish(tasks.job)
    gated.diary.wait_for("start")
    second = gated.publish(tasks.job)
    assert (type(second), second.id) == (DuplicateResult, first.id)
    info = tasks.job.lock_info(gated.name)
    assert info.worker in [worker.hostname for worker in gated.workers]
    assert info.arguments == f"name='{gated.name}'" or "..." in info.arguments
    gated.diary.open_gate()
    assert ended(second).state == "SUCCESS"


def test_job_lasts_over_retries(stage):
    first = stage.publish(tasks.job, "retry late")
    stage.diary.wait_for("end")
    assert stage.publish(tasks.job).id == first.id
    assert ended(first).result == 1
    wait_until(lambda: tasks.job.lock_info(stage.name) is None)
    assert {event["id"] for event in stage.diary.events("start")} == {first.id}


@only_prefork
def test_a_retry_with_other_arguments_takes_the_lock_along(stage):
    """The key that it had is free, and its own is held until its end."""
    first = stage.publish(tasks.job, "retry elsewhere")
    stage.diary.wait_for("end")
    wait_until(lambda: tasks.job.lock_info(stage.name) is None)
    assert tasks.job.lock_info(f"{stage.name}-elsewhere").label == f"{tasks.job.name}[{first.id}]"
    second = stage.publish(tasks.job)
    assert not isinstance(second, DuplicateResult)
    assert ended(second).result == f"ran {second.id}"
    assert ended(first).result == f"ran {first.id}"


@pytest.mark.parametrize(("how", "events"), [("fail", 1), ("retry", 3), ("ignore", 1), ("reject", 1), ("replace", 1)])
@pytest.mark.parametrize("task", [tasks.queued_and_run, tasks.job], ids=lambda task: task.__name__)
def test_no_lock_is_left_however_a_task_ends(stage, task, how, events):
    """Its life of ten minutes is longer than any patience here."""
    stage.publish(task, how)
    stage.diary.wait_for("end", events)
    wait_until(lambda: task.lock_info(stage.name) is None)
    assert ended(stage.publish(task)).state == "SUCCESS"


# Canvases


def test_canvases_end_though_a_duplicate_waits(stage, task):
    """Their members are published in any case; what they find at their start is for the policy."""
    stage.with_queue_of_its_own()
    one, plain = (each.si(stage.name).set(queue=stage.queue) for each in (task, tasks.plain))
    stage.publish(task)
    results = [
        chain(one, plain).apply_async(),
        group(one, plain).apply_async(),
        chord([one, plain], tasks.gather.s().set(queue=stage.queue)).apply_async(),
        chain(plain, one).apply_async(),
        chord([plain, plain], one).apply_async(),
    ]
    stage.consume()
    all_ended(results)


@only_prefork
def test_the_same_task_twice_in_a_chain(stage, task):
    one = task.si(stage.name).set(queue=stage.queue)
    assert ended(chain(one, one, one).apply_async()).state == "SUCCESS"
    stage.diary.wait_for("end", 3)


@only_prefork
def test_a_callback_that_is_its_own_task(stage, task):
    one = task.si(stage.name).set(queue=stage.queue)
    assert ended(stage.publish(task, link=one)).state == "SUCCESS"
    stage.diary.wait_for("end", 2)


# Messages that never start


def test_a_revoked_message_frees_its_lock(stage, task):
    stage.with_queue_of_its_own()
    result = stage.publish(task)
    app.control.revoke(result.id, destination=[worker.hostname for worker in stage.workers], reply=True, timeout=10)
    stage.consume()
    assert ended(result).state == "REVOKED"
    wait_until(lambda: task.lock_info(stage.name) is None)
    assert stage.diary.events("start") == []


@only_prefork
def test_what_is_revoked_and_planned_anew_runs(stage, task):
    """The worker has the revoked message in its memory, and meets it at its time, in an hour."""
    revoked = stage.publish(task, countdown=3600)
    inspect = app.control.inspect([worker.hostname for worker in stage.workers])
    wait_until(lambda: revoked.id in str(inspect.scheduled()))
    app.control.revoke(revoked.id, destination=[worker.hostname for worker in stage.workers], reply=True, timeout=10)
    assert revoked.state == "REVOKED"
    again = stage.publish(task)
    assert not isinstance(again, DuplicateResult)
    assert ended(again).result == f"ran {again.id}"


@only_prefork
def test_an_expired_message_frees_its_lock(stage, task):
    stage.with_queue_of_its_own()
    result = stage.publish(task, expires=0.5)
    wait_until(lambda: task.lock_info(stage.name) is None, 0.5 + BUSY)
    stage.consume()
    assert ended(result).state == "REVOKED"


@only_prefork
def test_a_purged_message_frees_its_lock_within_its_life(stage, client):
    """Nobody meets it any more; a task that publishes for itself gives it a life that it can bear."""
    stage.with_queue_of_its_own()
    stage.publish(tasks.short_queue)
    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge(stage.queue)
    wait_until(lambda: tasks.short_queue.lock_info(stage.name) is None, 1 + BUSY)
    assert not isinstance(stage.publish(tasks.short_queue), DuplicateResult)
    stage.consume()
    stage.diary.wait_for("end")


@only_prefork
def test_a_message_that_outlived_its_lock_runs_all_the_same(stage):
    stage.with_queue_of_its_own()
    results = []
    for _ in range(2):
        results.append(stage.publish(tasks.short_queue))
        wait_until(lambda: tasks.short_queue.lock_info(stage.name) is None, 1 + BUSY)
    stage.consume()
    states = {ended(result).state for result in results}
    assert states <= {"SUCCESS", "FAILURE"}
    assert "SUCCESS" in states


@only_prefork
def test_messages_of_a_foreign_producer(stage, task):
    """They hold no lock while they wait; what they find is decided at the start."""
    foreign = app.send_task(task.name, (stage.name,), queue=stage.queue)
    assert ended(foreign).state == "SUCCESS"


# Defects of other packages


@only_prefork
def test_a_retried_task_is_not_lost_as_its_own_duplicate(stage, task):
    result = stage.publish(task, "retry")
    assert ended(result).result == 2
    assert [event["id"] for event in stage.diary.events("start")] == [result.id] * 3


@only_prefork
@pytest.mark.parametrize("end", ["refused", "revoked"])
def test_a_duplicate_that_ends_leaves_the_lock_to_its_holder(gated, end):
    task = tasks.job
    first = gated.publish(task)
    gated.diary.wait_for("start")
    options = {"expires": -1} if end == "revoked" else {}
    duplicate = gated.publish(task, task_id=f"duplicate-{gated.name}", **options)
    assert ended(duplicate).state == ("REVOKED" if end == "revoked" else "FAILURE")
    assert task.lock_info(gated.name).label == f"{task.name}[{first.id}]"
    assert gated.publish(task).id == first.id
    gated.diary.open_gate()
    assert ended(first).state == "SUCCESS"


@only_prefork
def test_a_tuple_argument_does_not_leak_its_lock(gated):
    """The worker gets a list; its key is the producer's all the same."""
    task = tasks.job_of_all_arguments
    first = gated.publish(task, "return", (1, ("a", "b")))
    assert gated.publish(task, "return", [1, ["a", "b"]]).id == first.id
    gated.diary.wait_for("start")
    gated.diary.open_gate()
    assert ended(first).state == "SUCCESS"
    wait_until(lambda: task.lock_info(gated.name, "return", (1, ("a", "b"))) is None)
    again = gated.publish(task, "return", (1, ("a", "b")))
    assert not isinstance(again, DuplicateResult)
    assert ended(again).state == "SUCCESS"


# Deaths


@only_prefork
@pytest.mark.parametrize("task", [tasks.queued, tasks.queued_and_run, tasks.job], ids=lambda task: task.__name__)
def test_the_lock_of_a_message_is_free_when_the_child_was_killed_before_the_body(stage, task):
    """It was acknowledged, so that nobody meets the message again."""
    result = stage.publish(task, "killed before the start")
    assert type(ended(result).result).__name__ == "WorkerLostError"
    wait_until(lambda: task.lock_info(stage.name) is None, 10)
    assert ended(stage.publish(task)).state == "SUCCESS"


@only_prefork
def test_the_place_of_a_retry_is_free_when_the_child_was_killed_that_published_it(stage):
    """The task has ended for everybody who waits for it."""
    task = tasks.mortal_queued
    first = stage.publish(task, "retry and die")
    assert type(ended(first).result).__name__ == "WorkerLostError"
    wait_until(lambda: task.lock_info(stage.name) is None, 2 + 1 + BUSY)
    second = stage.publish(task)
    assert not isinstance(second, DuplicateResult)
    assert ended(second).state == "SUCCESS"


@only_prefork
def test_job_is_free_within_its_life_after_the_child_was_killed(stage):
    task = tasks.mortal_job
    result = stage.publish(task, "once killed")
    started = stage.diary.wait_for("start")
    stage.kill_child(started)
    wait_until(lambda: task.lock_info(stage.name) is None, 2 + 1 + BUSY)
    assert type(ended(result).result).__name__ == "WorkerLostError"
    assert ended(stage.publish(task)).state == "SUCCESS"


# keep_for


def test_keep_for_keeps_the_lock_after_the_end_and_not_between_retries(stage):
    task = tasks.throttled
    assert ended(stage.publish(task, "retry")).result == 2
    assert 0 < task.lock_info(stage.name).ttl <= 60
    assert type(ended(stage.publish(task)).result) is TaskAlreadyRunning
    assert task.unlock(stage.name)
    assert ended(stage.publish(task, "fail")).state == "FAILURE"
    assert task.unlock(stage.name)
