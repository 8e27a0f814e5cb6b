"""The copies of a message come in any order, to several workers: one of them runs, and the others leave no trace.

With real workers. A broker that waits no longer than a second for an acknowledgement gives out many copies of a
message with a countdown; what a busy worker has in its memory is given to another one by the transport's own function.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kombu
import pytest
from celery import Celery, Task

from django_redislock.celery import single_instance
from tests.celery.deliveries import trace
from tests.celery.test_redelivery import as_unacked, copies, deliver_again, put_in_queue, raw_message
from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import TRANSPORT, app
from tests.support.celery_site.harness import TaskQueue, ended

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]

REDELIVERS_SOON = {"visibility_timeout": 1, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}


@contextmanager
def redelivering(worker_pools: Any, name: str, count: int = 2) -> Iterator[TaskQueue]:
    """Give workers of a broker that waits for a second."""
    if kombu.VERSION < (5, 7):
        pytest.skip("before kombu 5.7 the broker waits for minutes")
    env = {TRANSPORT: json.dumps(REDELIVERS_SOON)}
    options = ("--prefetch-multiplier=4",)
    workers = [worker_pools.start("prefork", n, *options, name=name, concurrency=2, env=env) for n in range(count)]
    yield TaskQueue([worker.wait_ready() for worker in workers])
    for worker in workers:
        worker.kill()


def nothing_is_left(queues: list[TaskQueue]) -> None:
    """Wait until no worker and no queue has a message of these queues."""
    inspect = app.control.inspect([worker.hostname for worker in queues[0].workers], timeout=2)

    def left() -> list[object]:
        with app.connection_for_write() as connection:
            client = connection.default_channel.client
            raw = client.lrange(queues[0].queue, 0, -1)
            found: list[object] = [name for task_queue in queues for name in copies(task_queue)]
        for what in (inspect.scheduled, inspect.reserved, inspect.active):
            answer = what() or {}
            found += [None] * (len(queues[0].workers) - len(answer)) + [one for each in answer.values() for one in each]
        return [*raw, *found]

    wait_until(lambda: not left(), 90, lambda: f"all copies come to their end; there are {left()}")


def test_a_countdown_longer_than_the_broker_waits_is_one_run(worker_pools):
    """Two workers have several copies of each message, which start at the same moment."""
    with redelivering(worker_pools, "redelivering") as first:
        queues = [TaskQueue(first.workers) for _ in tasks.COPIED]
        results = [task_queue.publish(task, countdown=3) for task_queue, task in zip(queues, tasks.COPIED, strict=True)]
        assert len({result.id for result in results}) == len(results)
        for result in results:
            ended(result)
        nothing_is_left(queues)
        runs = {
            task.name: len(task_queue.run_log.events("start"))
            for task_queue, task in zip(queues, tasks.COPIED, strict=True)
        }
        assert runs == dict.fromkeys(runs, 1)
        assert [result.result for result in results] == [f"ran {result.id}" for result in results]
        assert " was processed before; this copy of its message is dropped" in first.log, "there were copies"


def test_one_copy_asks_again_while_a_run_lasts_longer_than_the_broker_waits(worker_pools):
    """So does its lock: a copy that was delayed for that time was delivered twice itself, and both asked on."""
    with redelivering(worker_pools, "asking") as first:
        task_queue = TaskQueue(first.workers, blocked=True)
        result = task_queue.publish(tasks.late)
        wait_until(lambda: task_queue.log.count("this copy of its message starts again") >= 8, 60)
        assert task_queue.log.count("was processed before; this copy of its message is dropped") <= 2
        task_queue.run_log.let_bodies_end()
        assert ended(result).result == f"ran {result.id}"
        nothing_is_left([task_queue])
        assert len(task_queue.run_log.events("start")) == 1


def test_a_copy_of_an_early_acknowledged_run_waits_until_the_lock_would_expire_and_runs_if_the_worker_has_died(
    worker_pools,
):
    """An earlier look would find the dead run's lock, and drop the only copy that is left.

    The worker dies before the copy looks. A copy that looked before would rightly be dropped if the worker had renewed
    the lock between that look and its death.
    """
    with redelivering(worker_pools, "died", 1) as dying, redelivering(worker_pools, "heir", 1) as heir:
        task_queue = TaskQueue(dying.workers).with_queue_of_its_own()
        first = task_queue.publish(tasks.mortal, "once killed")
        raw = raw_message(task_queue)
        task_queue.consume()
        task_queue.run_log.wait_for("start")
        (worker,) = task_queue.workers
        app.control.cancel_consumer(task_queue.queue, destination=[worker.hostname], reply=True, timeout=10)
        app.control.add_consumer(task_queue.queue, destination=[heir.workers[0].hostname])
        worker.kill()
        put_in_queue(task_queue, as_unacked(task_queue, raw))
        wait_until(lambda: app.AsyncResult(first.id).result == f"ran {first.id}", message=lambda: heir.log)
        assert len(task_queue.run_log.events("start")) == 2


@pytest.fixture
def busy(worker_pools, request) -> Iterator[tuple[TaskQueue, TaskQueue]]:
    """Two workers of one queue: the first runs a task until the test lets it end, and has more messages in memory."""
    name = f"busy-{abs(hash(request.node.name))}"
    first, second = (
        worker_pools.start("prefork", number, "--prefetch-multiplier=20", name=name, concurrency=1).wait_ready()
        for number in range(2)
    )
    app.control.cancel_consumer(first.queue, destination=[second.hostname], reply=True, timeout=10)
    blocker = TaskQueue([first], blocked=True)
    blocker.publish(tasks.refuse)
    blocker.run_log.wait_for("start")
    yield blocker, TaskQueue([second])
    blocker.run_log.let_bodies_end()
    first.kill()
    second.kill()


def test_what_a_busy_worker_has_in_its_memory_does_not_run_again_after_it_ran_elsewhere(busy):
    blocker, second = busy
    queues = [TaskQueue(second.workers) for _ in tasks.COPIED]
    results = [task_queue.publish(task) for task_queue, task in zip(queues, tasks.COPIED, strict=True)]
    for task_queue in queues:
        wait_until(lambda task_queue=task_queue: copies(task_queue))
    (worker,) = blocker.workers
    app.control.cancel_consumer(second.queue, destination=[worker.hostname], reply=True, timeout=10)
    for task_queue in queues:
        deliver_again(task_queue)
    second.consume()
    for result in results:
        assert ended(result).result == f"ran {result.id}"
    blocker.run_log.let_bodies_end()
    wait_until(lambda: blocker.log.count("was processed before; this copy") == len(queues))
    assert [len(task_queue.run_log.events("start")) for task_queue in queues] == [1] * len(queues)
    assert [result.result for result in results] == [f"ran {result.id}" for result in results]


@pytest.mark.parametrize("task", tasks.COPIED[:2], ids=["early", "late"])
def test_copies_of_a_refused_message_do_not_run_when_the_lock_is_free(worker_pools, task):
    task_queue = TaskQueue(worker_pools.of("prefork"), blocked=True)
    holder = task_queue.publish(task)
    task_queue.run_log.wait_for("start")
    task_queue.with_queue_of_its_own()
    refused = task_queue.publish(task)
    raw = raw_message(task_queue)
    task_queue.consume()
    assert ended(refused).state == "FAILURE"
    task_queue.run_log.let_bodies_end()
    assert ended(holder).state == "SUCCESS"
    put_in_queue(task_queue, as_unacked(task_queue, raw))
    wait_until(lambda: f"[{refused.id}] was processed before" in task_queue.log)
    assert len(task_queue.run_log.events("start")) == 1
    assert refused.state == "FAILURE"


@pytest.mark.parametrize(
    "task", [tasks.COPIED[0], *tasks.COPIED[2:4], tasks.COPIED[10]], ids=lambda task: task.__name__
)
def test_a_copy_that_meets_a_living_run_ends_without_a_trace(worker_pools, task):
    """When that is acknowledged early, before the run ends; else, as it may be the only one left, when the run ends."""
    task_queue = TaskQueue(worker_pools.of("prefork"), blocked=True).with_queue_of_its_own()
    result = task_queue.publish(task)
    raw = raw_message(task_queue)
    task_queue.consume()
    task_queue.run_log.wait_for("start")
    for _ in range(3):
        put_in_queue(task_queue, as_unacked(task_queue, raw))
    looks = f"[{result.id}] is running, or its worker has died; this copy of its message starts again"
    wait_until(lambda: looks in task_queue.log)
    if not task.acks_late:
        wait_until(lambda: f"[{result.id}] is running; this copy of its message is dropped" in task_queue.log)
        looked = task_queue.log.count(looks)
        nothing_waits(task_queue)
        assert task_queue.log.count(looks) == looked <= 3
    assert result.state == "PENDING"
    task_queue.run_log.let_bodies_end()
    assert ended(result).result == f"ran {result.id}"
    nothing_waits(task_queue)
    assert len(task_queue.run_log.events("start")) == 1
    assert result.result == f"ran {result.id}"
    assert f"[{result.id}] is published again" not in task_queue.log


def nothing_waits(task_queue: TaskQueue) -> None:
    """Wait until no worker has a message of the queue that has not started."""
    inspect = app.control.inspect([worker.hostname for worker in task_queue.workers])

    def waiting() -> list[object]:
        found = [*(inspect.scheduled() or {None: [None]}).values(), *(inspect.reserved() or {None: [None]}).values()]
        return [one for each in found for one in each if task_queue.name in str(one)]

    wait_until(lambda: not waiting(), 30)


def test_the_only_copies_run_when_the_locks_of_the_dead_runs_have_ended(worker_pools):
    """And not after ``reschedule_delay``, which is a minute here."""
    late = tasks.COPIED[1::2]
    doomed = worker_pools.start("prefork", name="doomed", concurrency=len(late)).wait_ready()
    queues = [TaskQueue([doomed]) for _ in late]
    results = [task_queue.publish(task, "once killed") for task_queue, task in zip(queues, late, strict=True)]
    for task_queue in queues:
        task_queue.kill_child(task_queue.run_log.wait_for("start"))
    for task_queue, result in zip(queues, results, strict=True):
        task_queue.run_log.wait_for("start", 2, timeout=30)
        assert ended(result).result == f"ran {result.id}"
        assert task_queue.run_log.events("overlap") == []


def test_a_copy_of_what_a_dead_child_ran_runs_also_when_it_was_acknowledged_early(worker_pools):
    """Somebody else had the copy in his memory."""
    task = tasks.COPIED[0]
    task_queue = TaskQueue(worker_pools.of("prefork")).with_queue_of_its_own()
    result = task_queue.publish(task, "once killed")
    raw = raw_message(task_queue)
    task_queue.consume()
    task_queue.kill_child(task_queue.run_log.wait_for("start"))
    put_in_queue(task_queue, as_unacked(task_queue, raw))
    task_queue.run_log.wait_for("end", timeout=30)
    wait_until(
        lambda: app.AsyncResult(result.id).state == "SUCCESS"
    )  # a result keeps the FAILURE that it has once seen


def test_a_message_without_our_headers_is_known_by_what_the_broker_gives_it(worker_pools):
    task_queue = TaskQueue(worker_pools.of("prefork")).with_queue_of_its_own()
    result = app.send_task(tasks.COPIED[0].name, (task_queue.name,), queue=task_queue.queue)
    raw = raw_message(task_queue)
    task_queue.consume()
    assert ended(result).state == "SUCCESS"
    put_in_queue(task_queue, as_unacked(task_queue, raw))
    wait_until(lambda: f"[{result.id}] was processed before" in task_queue.log)
    app.send_task(tasks.COPIED[0].name, (task_queue.name,), queue=task_queue.queue, task_id=result.id)
    task_queue.run_log.wait_for("end", 2)


# What a copy stores: seen through Celery's own tracer, in this process


@pytest.fixture
def traced(request, monkeypatch):
    """Have a task's message come again and again; give the states that were stored, and what brings the message."""
    with Celery("copies", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = "copies"

        def traced(function, **task_options):
            function.__name__ = "body"
            task = app.task(bind=True, name=request.node.name, shared=False, lazy=False, **task_options)(
                single_instance(key=[], expire=2, reschedule_delay=60)(function)
            )
            stored: list[str] = []
            backend = type(task.backend)
            store = backend._store_result

            def note(self, id, result, state, *args, **more):
                stored.append(state)
                return store(self, id, result, state, *args, **more)

            monkeypatch.setattr(backend, "_store_result", note)
            return stored, lambda: trace(task, {"id": "an-id", "retries": 0, "single_instance_message": "one"})

        yield traced


@pytest.mark.parametrize("acks_late", [False, True])
@pytest.mark.parametrize("outcome", ["SUCCESS", "FAILURE"])
def test_a_copy_stores_no_state_whether_it_comes_during_the_run_or_after_it(client, traced, acks_late, outcome):
    def body(self):
        come_elsewhere()
        if outcome == "FAILURE":
            raise ZeroDivisionError

    def after_storing(*args):
        come_elsewhere()

    def come_elsewhere():
        thread = threading.Thread(target=come)
        thread.start()
        thread.join(60)

    hooks = {"on_success": after_storing, "on_failure": after_storing}
    base = type("Base", (Task,), {name: staticmethod(hook) for name, hook in hooks.items()})
    stored, come = traced(body, acks_late=acks_late, track_started=True, base=base)
    come()
    come()
    assert stored == ["STARTED", outcome]
