"""The same message delivered again: not dropped while it may be the only copy, nor run beside or after its first run.

With real workers that acknowledge late. What a broker does when it has waited too long for the acknowledgement is done
here at once, by the transport's own function.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import chain

from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app
from tests.support.celery_site.harness import Stage, ended, on_stage

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]


@pytest.fixture
def stage(crew) -> Iterator[Stage]:
    yield from on_stage(Stage(crew.of("prefork")))


@pytest.fixture
def gated(crew) -> Iterator[Stage]:
    yield from on_stage(Stage(crew.of("prefork"), gated=True))


def copies(stage: Stage) -> dict[str, bytes]:
    """Return the messages of the stage that no worker has acknowledged, by their tags."""
    with app.connection_for_write() as connection:
        unacked = connection.default_channel.client.hgetall("unacked")
    return {tag.decode(): message for tag, message in unacked.items() if stage.name.encode() in message}


def deliver_again(stage: Stage) -> None:
    """Put the one message that is worked off back into its queue, as for a worker that was silent for too long."""
    (tag,) = wait_until(lambda: copies(stage))
    with app.connection_for_write() as connection:
        connection.default_channel.qos.restore_by_tag(tag)


def put_in_queue(stage: Stage, message: bytes) -> None:
    """Put back a message that was acknowledged, as for an acknowledgement that did not arrive."""
    with app.connection_for_write() as connection:
        client = connection.default_channel.client
        client.hset("unacked", "tag", message)
        client.zadd("unacked_index", {"tag": 0})
        connection.default_channel.qos.restore_by_tag("tag")


TASKS = {"run": tasks.late, "queued+run": tasks.late_queued, "job": tasks.late_job}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def test_a_copy_neither_runs_beside_its_first_run_nor_after_it(gated, task):
    neither_beside_nor_after(gated, task)


def test_on_threads_a_copy_neither_runs_beside_its_first_run_nor_after_it(crew):
    """There the same process runs both."""
    for gated in on_stage(Stage(crew.of("threads"), gated=True)):
        neither_beside_nor_after(gated, tasks.late)


def neither_beside_nor_after(gated: Stage, task) -> None:
    result = gated.publish(task)
    gated.diary.wait_for("start")
    deliver_again(gated)
    wait_until(lambda: f"[{result.id}] is running, or its worker has died" in gated.log)
    gated.diary.open_gate()
    assert ended(result).result == f"ran {result.id}"
    wait_until(lambda: f"[{result.id}] was processed before" in gated.log)
    assert len(gated.diary.events("start")) == 1
    assert result.state == "SUCCESS"


@pytest.mark.parametrize("how", ["return", "fail"])
def test_a_copy_that_comes_after_the_end_is_dropped(stage, task, how):
    stage.with_queue_of_its_own()
    result = stage.publish(task, how)
    with app.connection_for_write() as connection:
        (raw,) = connection.default_channel.client.lrange(stage.queue, 0, -1)
    stage.consume()
    state = ended(result).state
    put_in_queue(stage, as_unacked(stage, raw))
    wait_until(lambda: f"[{result.id}] was processed before" in stage.log)
    assert len(stage.diary.events("start")) == 1
    assert ended(result).state == state


def as_unacked(stage: Stage, raw: bytes) -> bytes:
    return b"[" + raw + b', "", "' + stage.queue.encode() + b'"]'


@pytest.mark.parametrize("task", [tasks.late, tasks.late_job], ids=lambda task: task.__name__)
def test_a_copy_of_a_message_that_was_retried_does_not_retry_it_again(stage, task):
    stage.with_queue_of_its_own()
    result = stage.publish(task, "retry")
    with app.connection_for_write() as connection:
        (raw,) = connection.default_channel.client.lrange(stage.queue, 0, -1)
    stage.consume()
    assert ended(result).result == 2
    put_in_queue(stage, as_unacked(stage, raw))
    wait_until(lambda: f"[{result.id}] was processed before" in stage.log)
    assert len(stage.diary.events("start")) == 3


@pytest.mark.parametrize("task", [tasks.dying, tasks.dying_job], ids=lambda task: task.__name__)
def test_the_only_copy_runs_when_the_child_was_killed(stage, task):
    result = stage.publish(task, "once killed")
    first = stage.diary.wait_for("start")
    stage.kill_child(first)
    assert ended(result).result == f"ran {result.id}"
    assert len(stage.diary.events("start")) == 2


def test_the_only_copy_runs_when_the_whole_worker_was_killed(crew):
    task = tasks.dying_job
    doomed = crew.start("prefork", name="doomed", concurrency=1).wait_ready()
    heir = Stage(crew.of("prefork"))
    stage = Stage([doomed])
    stage.diary, stage.name = heir.diary, heir.name
    result = stage.publish(task, "once killed")
    stage.diary.wait_for("start")
    doomed.kill()
    heir.queue = stage.queue
    heir.consume()
    deliver_again(stage)
    assert ended(result).result == f"ran {result.id}"
    assert len(stage.diary.events("start")) == 2
    assert stage.diary.events("overlap") == []


def test_the_only_copy_runs_when_the_child_was_killed_before_its_result_was_stored(stage):
    """The body has ended and the lock is free, but nobody knows of its result yet."""
    result = stage.publish(tasks.dying, "result kills")
    assert ended(result).result == "never mind"
    assert len(stage.diary.events("start")) == 2


def test_a_copy_within_a_chain_leaves_the_chain_whole(gated):
    task = tasks.late
    steps = [task.si(gated.name), tasks.plain.si(gated.name)]
    result = chain(*(step.set(queue=gated.queue) for step in steps)).apply_async()
    gated.diary.wait_for("start")
    deliver_again(gated)
    wait_until(lambda: f"[{result.parent.id}] is running, or its worker has died" in gated.log)
    gated.diary.open_gate()
    assert ended(result).result == "plain"
    wait_until(lambda: f"[{result.parent.id}] was processed before" in gated.log)
    assert len(gated.diary.events("plain")) == 1


def test_the_same_id_published_anew_is_no_copy(stage):
    first = stage.publish(tasks.late, task_id=f"mine-{stage.name}")
    assert ended(first).state == "SUCCESS"
    stage.publish(tasks.late, task_id=first.id)
    stage.diary.wait_for("end", 2)
