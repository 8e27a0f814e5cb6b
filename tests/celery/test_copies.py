"""The copies of a message come in any order, to several workers: one of them runs, and the others leave no trace.

With real workers. A broker that waits no longer than two seconds for an acknowledgement gives out many copies of a
message with a countdown; what a busy worker has in its memory is given to another one by the transport's own function.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer

from django_redislock.celery import single_instance
from tests.celery.test_redelivery import as_unacked, copies, deliver_again, put_in_queue
from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import TRANSPORT, app
from tests.support.celery_site.harness import Stage, ended

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]

IMPATIENT = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}


@contextmanager
def impatient(crew: Any, name: str, count: int = 2) -> Iterator[Stage]:
    """Give workers of a broker that waits for two seconds."""
    env = {TRANSPORT: json.dumps(IMPATIENT)}
    options = ("--prefetch-multiplier=4",)
    workers = [crew.start("prefork", n, *options, name=name, concurrency=2, env=env) for n in range(count)]
    yield Stage([worker.wait_ready() for worker in workers])
    for worker in workers:
        worker.kill()


def nothing_is_left(stages: list[Stage]) -> None:
    """Wait until no worker and no queue has a message of these stages."""
    inspect = app.control.inspect([worker.hostname for worker in stages[0].workers], timeout=2)

    def left() -> list[object]:
        with app.connection_for_write() as connection:
            client = connection.default_channel.client
            raw = client.lrange(stages[0].queue, 0, -1)
            found: list[object] = [name for stage in stages for name in copies(stage)]
        for what in (inspect.scheduled, inspect.reserved, inspect.active):
            answer = what() or {}
            found += [None] * (len(stages[0].workers) - len(answer)) + [one for each in answer.values() for one in each]
        return [*raw, *found]

    wait_until(lambda: not left(), 90, lambda: f"all copies come to their end; there are {left()}")


def test_a_countdown_longer_than_the_broker_waits_is_one_run(crew):
    """Two workers have several copies of each message, which start at the same moment."""
    with impatient(crew, "impatient") as first:
        stages = [Stage(first.workers) for _ in tasks.COPIED]
        results = [stage.publish(task, countdown=4) for stage, task in zip(stages, tasks.COPIED, strict=True)]
        assert len({result.id for result in results}) == len(results)
        for result in results:
            ended(result)
        nothing_is_left(stages)
        runs = {task.name: len(stage.diary.events("start")) for stage, task in zip(stages, tasks.COPIED, strict=True)}
        assert runs == dict.fromkeys(runs, 1)
        assert [result.result for result in results] == [f"ran {result.id}" for result in results]
        assert " was processed before; this copy of its message is dropped" in first.log, "there were copies"


def test_one_copy_asks_again_while_a_run_lasts_longer_than_the_broker_waits(crew):
    """So does its lock: a copy that was delayed for that time was delivered twice itself, and both asked on."""
    with impatient(crew, "asking") as first:
        stage = Stage(first.workers, gated=True)
        result = stage.publish(tasks.late)
        wait_until(lambda: stage.log.count("this copy of its message starts again") >= 8, 60)
        assert stage.log.count("was processed before; this copy of its message is dropped") <= 2
        stage.diary.open_gate()
        assert ended(result).result == f"ran {result.id}"
        nothing_is_left([stage])
        assert len(stage.diary.events("start")) == 1


def test_a_copy_of_an_early_acknowledged_run_waits_until_the_lock_would_expire_and_runs_if_the_worker_has_died(crew):
    """An earlier look would find the dead run's lock, and drop the only copy that is left."""
    with impatient(crew, "died", 1) as dying, impatient(crew, "heir", 1) as heir:
        stage = Stage(dying.workers).with_queue_of_its_own()
        first = stage.publish(tasks.mortal, "once killed")
        raw = raw_message(stage)
        stage.consume()
        stage.diary.wait_for("start")
        (worker,) = stage.workers
        app.control.cancel_consumer(stage.queue, destination=[worker.hostname], reply=True, timeout=10)
        app.control.add_consumer(stage.queue, destination=[heir.workers[0].hostname])
        put_in_queue(stage, as_unacked(stage, raw))
        wait_until(lambda: "this copy of its message starts again" in heir.log)
        worker.kill()
        wait_until(lambda: app.AsyncResult(first.id).result == f"ran {first.id}")
        assert len(stage.diary.events("start")) == 2


@pytest.fixture
def busy(crew, request) -> Iterator[tuple[Stage, Stage]]:
    """Two workers on one queue: the first runs something else until its gate opens, and has more messages in memory."""
    name = f"busy-{abs(hash(request.node.name))}"
    first, second = (
        crew.start("prefork", number, "--prefetch-multiplier=20", name=name, concurrency=1).wait_ready()
        for number in range(2)
    )
    app.control.cancel_consumer(first.queue, destination=[second.hostname], reply=True, timeout=10)
    blocker = Stage([first], gated=True)
    blocker.publish(tasks.refuse)
    blocker.diary.wait_for("start")
    yield blocker, Stage([second])
    blocker.diary.open_gate()
    first.kill()
    second.kill()


def test_what_a_busy_worker_has_in_its_memory_does_not_run_again_after_it_ran_elsewhere(busy):
    blocker, second = busy
    stages = [Stage(second.workers) for _ in tasks.COPIED]
    results = [stage.publish(task) for stage, task in zip(stages, tasks.COPIED, strict=True)]
    for stage in stages:
        wait_until(lambda stage=stage: copies(stage))
    (worker,) = blocker.workers
    app.control.cancel_consumer(second.queue, destination=[worker.hostname], reply=True, timeout=10)
    for stage in stages:
        deliver_again(stage)
    second.consume()
    for result in results:
        assert ended(result).result == f"ran {result.id}"
    blocker.diary.open_gate()
    wait_until(lambda: blocker.log.count("was processed before; this copy") == len(stages))
    assert [len(stage.diary.events("start")) for stage in stages] == [1] * len(stages)
    assert [result.result for result in results] == [f"ran {result.id}" for result in results]


def raw_message(stage: Stage) -> bytes:
    with app.connection_for_write() as connection:
        (raw,) = connection.default_channel.client.lrange(stage.queue, 0, -1)
    return raw


@pytest.mark.parametrize("task", tasks.COPIED[:2], ids=["early", "late"])
def test_copies_of_a_refused_message_do_not_run_when_the_lock_is_free(crew, task):
    stage = Stage(crew.of("prefork"), gated=True)
    holder = stage.publish(task)
    stage.diary.wait_for("start")
    stage.with_queue_of_its_own()
    refused = stage.publish(task)
    raw = raw_message(stage)
    stage.consume()
    assert ended(refused).state == "FAILURE"
    stage.diary.open_gate()
    assert ended(holder).state == "SUCCESS"
    put_in_queue(stage, as_unacked(stage, raw))
    wait_until(lambda: f"[{refused.id}] was processed before" in stage.log)
    assert len(stage.diary.events("start")) == 1
    assert refused.state == "FAILURE"


@pytest.mark.parametrize(
    "task", [tasks.COPIED[0], *tasks.COPIED[2:4], tasks.COPIED[10]], ids=lambda task: task.__name__
)
def test_a_copy_that_meets_a_living_run_ends_without_a_trace(crew, task):
    """When that is acknowledged early, before the run ends; else, as it may be the only one left, when the run ends."""
    stage = Stage(crew.of("prefork"), gated=True).with_queue_of_its_own()
    result = stage.publish(task)
    raw = raw_message(stage)
    stage.consume()
    stage.diary.wait_for("start")
    for _ in range(3):
        put_in_queue(stage, as_unacked(stage, raw))
    looks = f"[{result.id}] is running, or its worker has died; this copy of its message starts again"
    wait_until(lambda: looks in stage.log)
    if not task.acks_late:
        wait_until(lambda: f"[{result.id}] is running; this copy of its message is dropped" in stage.log)
        looked = stage.log.count(looks)
        nothing_waits(stage)
        assert stage.log.count(looks) == looked <= 3
    assert result.state == "PENDING"
    stage.diary.open_gate()
    assert ended(result).result == f"ran {result.id}"
    nothing_waits(stage)
    assert len(stage.diary.events("start")) == 1
    assert result.result == f"ran {result.id}"
    assert f"[{result.id}] is published again" not in stage.log


def nothing_waits(stage: Stage) -> None:
    """Wait until no worker has a message of the stage that has not started."""
    inspect = app.control.inspect([worker.hostname for worker in stage.workers])

    def waiting() -> list[object]:
        found = [*(inspect.scheduled() or {None: [None]}).values(), *(inspect.reserved() or {None: [None]}).values()]
        return [one for each in found for one in each if stage.name in str(one)]

    wait_until(lambda: not waiting(), 30)


def test_the_only_copies_run_when_the_locks_of_the_dead_runs_have_ended(crew):
    """And not after ``reschedule_delay``, which is a minute here."""
    late = tasks.COPIED[1::2]
    doomed = crew.start("prefork", name="doomed", concurrency=len(late)).wait_ready()
    stages = [Stage([doomed]) for _ in late]
    results = [stage.publish(task, "once killed") for stage, task in zip(stages, late, strict=True)]
    for stage in stages:
        stage.kill_child(stage.diary.wait_for("start"))
    for stage, result in zip(stages, results, strict=True):
        stage.diary.wait_for("start", 2, timeout=30)
        assert ended(result).result == f"ran {result.id}"
        assert stage.diary.events("overlap") == []


def test_a_copy_of_what_a_dead_child_ran_runs_also_when_it_was_acknowledged_early(crew):
    """Somebody else had the copy in his memory."""
    task = tasks.COPIED[0]
    stage = Stage(crew.of("prefork")).with_queue_of_its_own()
    result = stage.publish(task, "once killed")
    raw = raw_message(stage)
    stage.consume()
    stage.kill_child(stage.diary.wait_for("start"))
    put_in_queue(stage, as_unacked(stage, raw))
    stage.diary.wait_for("end", timeout=30)
    wait_until(
        lambda: app.AsyncResult(result.id).state == "SUCCESS"
    )  # a result keeps the FAILURE that it has once seen


def test_a_message_without_our_headers_is_known_by_what_the_broker_gives_it(crew):
    stage = Stage(crew.of("prefork")).with_queue_of_its_own()
    result = app.send_task(tasks.COPIED[0].name, (stage.name,), queue=stage.queue)
    raw = raw_message(stage)
    stage.consume()
    assert ended(result).state == "SUCCESS"
    put_in_queue(stage, as_unacked(stage, raw))
    wait_until(lambda: f"[{result.id}] was processed before" in stage.log)
    app.send_task(tasks.COPIED[0].name, (stage.name,), queue=stage.queue, task_id=result.id)
    stage.diary.wait_for("end", 2)


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
            headers = {"id": "an-id", "root_id": "an-id", "retries": 0, "single_instance_message": "one"}
            tracer = build_tracer(task.name, task, app=app)

            def come():
                return tracer("an-id", (), {}, {**headers, "delivery_info": {}, "called_directly": False})

            return stored, come

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
