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
from tests.support.celery_site.harness import TaskQueue, checked_queue, ended

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]


@pytest.fixture
def task_queue(worker_pools) -> Iterator[TaskQueue]:
    yield from checked_queue(TaskQueue(worker_pools.of("prefork")))


@pytest.fixture
def pool() -> str:
    return "prefork"


@pytest.fixture
def blocked(worker_pools, pool) -> Iterator[TaskQueue]:
    yield from checked_queue(TaskQueue(worker_pools.of(pool), blocked=True))


def copies(task_queue: TaskQueue) -> dict[str, bytes]:
    """Return the messages of the queue that no worker has acknowledged, by their tags."""
    with app.connection_for_write() as connection:
        unacked = connection.default_channel.client.hgetall("unacked")
    return {tag.decode(): message for tag, message in unacked.items() if task_queue.name.encode() in message}


def deliver_again(task_queue: TaskQueue) -> None:
    """Put the one message that is worked off back into its queue, as for a worker that was silent for too long."""
    (tag,) = wait_until(lambda: copies(task_queue))
    with app.connection_for_write() as connection:
        connection.default_channel.qos.restore_by_tag(tag)


def put_in_queue(task_queue: TaskQueue, message: bytes) -> None:
    """Put back a message that was acknowledged, as for an acknowledgement that did not arrive."""
    with app.connection_for_write() as connection:
        client = connection.default_channel.client
        client.hset("unacked", "tag", message)
        client.zadd("unacked_index", {"tag": 0})
        connection.default_channel.qos.restore_by_tag("tag")


TASKS = {"run": tasks.late, "two at once": tasks.late_two, "queued+run": tasks.late_queued, "job": tasks.late_job}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


BOTH = [*(("prefork", each) for each in TASKS.values()), ("threads", tasks.late)]


@pytest.mark.parametrize(("pool", "task"), BOTH, ids=lambda one: getattr(one, "__name__", one))
def test_a_copy_neither_runs_beside_its_first_run_nor_after_it(blocked, task):
    """On threads the same process runs both."""
    result = blocked.publish(task)
    blocked.run_log.wait_for("start")
    deliver_again(blocked)
    wait_until(lambda: f"[{result.id}] is running, or its worker has died" in blocked.log)
    blocked.run_log.let_bodies_end()
    assert ended(result).result == f"ran {result.id}"
    wait_until(lambda: f"[{result.id}] was processed before" in blocked.log)
    assert len(blocked.run_log.events("start")) == 1
    assert result.state == "SUCCESS"


@pytest.mark.parametrize("how", ["return", "fail"])
def test_a_copy_that_comes_after_the_end_is_dropped(task_queue, task, how):
    task_queue.with_queue_of_its_own()
    result = task_queue.publish(task, how)
    raw = raw_message(task_queue)
    task_queue.consume()
    state = ended(result).state
    put_in_queue(task_queue, as_unacked(task_queue, raw))
    wait_until(lambda: f"[{result.id}] was processed before" in task_queue.log)
    assert len(task_queue.run_log.events("start")) == 1
    assert ended(result).state == state


def raw_message(task_queue: TaskQueue) -> bytes:
    """Return the one message that is in the queue."""
    with app.connection_for_write() as connection:
        (raw,) = connection.default_channel.client.lrange(task_queue.queue, 0, -1)
    return raw


def as_unacked(task_queue: TaskQueue, raw: bytes) -> bytes:
    return b"[" + raw + b', "", "' + task_queue.queue.encode() + b'"]'


@pytest.mark.parametrize("task", [tasks.late, tasks.late_two, tasks.late_job], ids=lambda task: task.__name__)
def test_a_copy_of_a_message_that_was_retried_does_not_retry_it_again(task_queue, task):
    task_queue.with_queue_of_its_own()
    result = task_queue.publish(task, "retry")
    raw = raw_message(task_queue)
    task_queue.consume()
    assert ended(result).result == 2
    put_in_queue(task_queue, as_unacked(task_queue, raw))
    wait_until(lambda: f"[{result.id}] was processed before" in task_queue.log)
    assert len(task_queue.run_log.events("start")) == 3


@pytest.mark.parametrize("task", [tasks.dying, tasks.dying_two, tasks.dying_job], ids=lambda task: task.__name__)
def test_the_only_copy_runs_when_the_child_was_killed(task_queue, task):
    result = task_queue.publish(task, "once killed")
    first = task_queue.run_log.wait_for("start")
    task_queue.kill_child(first)
    assert ended(result).result == f"ran {result.id}"
    assert len(task_queue.run_log.events("start")) == 2


def test_the_only_copy_runs_when_the_child_was_killed_before_its_result_was_stored(task_queue):
    """The body has ended and the lock is free, but nobody knows of its result yet."""
    result = task_queue.publish(tasks.dying, "result kills")
    assert ended(result).result == "never mind"
    assert len(task_queue.run_log.events("start")) == 2


def test_a_copy_within_a_chain_leaves_the_chain_whole(blocked):
    task = tasks.late
    steps = [task.si(blocked.name), tasks.plain.si(blocked.name)]
    result = chain(*(step.set(queue=blocked.queue) for step in steps)).apply_async()
    blocked.run_log.wait_for("start")
    deliver_again(blocked)
    wait_until(lambda: f"[{result.parent.id}] is running, or its worker has died" in blocked.log)
    blocked.run_log.let_bodies_end()
    assert ended(result).result == "plain"
    wait_until(lambda: f"[{result.parent.id}] was processed before" in blocked.log)
    assert len(blocked.run_log.events("plain")) == 1


def test_the_same_id_published_anew_is_no_copy(task_queue):
    first = task_queue.publish(tasks.late, task_id=f"mine-{task_queue.name}")
    assert ended(first).state == "SUCCESS"
    task_queue.publish(tasks.late, task_id=first.id)
    task_queue.run_log.wait_for("end", 2)
