"""What kills a task: limits, revokes, signals, dead children and hosts, a server that goes away. With real workers."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from celery import VERSION

from django_redislock import LockBackendError
from django_redislock.core import held_locks
from tests.support import BUSY, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import SOFT_SHUTDOWN, app
from tests.support.celery_site.harness import (
    KINDS,
    POOLS,
    TaskQueue,
    checked_queue,
    ended,
    ended_with_its_canvas,
    member,
    published,
)
from tests.support.worker import Worker

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]

LIFE = 2
"""Seconds that a lock of the mortal tasks lives without its holder."""


@pytest.fixture
def task_queue(worker_pools) -> Iterator[TaskQueue]:
    yield from checked_queue(TaskQueue(worker_pools.of("prefork")))


def runs(task_queue: TaskQueue, task) -> dict:
    """Publish a task that lasts until a signal comes, and wait until it runs."""
    result = task_queue.publish(task, "sleep")
    return {"result": result, **task_queue.run_log.wait_for("start")}


def run_in_all(
    worker: Worker, task, how: str = "sleep", kinds: Sequence[str] = KINDS, blocked: bool = False
) -> dict[str, tuple[TaskQueue, Any]]:
    """Have the worker run the task alone and in every canvas; return the queues and results when all have started."""
    queues = {kind: TaskQueue([worker], blocked) for kind in kinds}
    running = {kind: (task_queue, published(kind, task_queue, task, how)) for kind, task_queue in queues.items()}
    for task_queue in queues.values():
        task_queue.run_log.wait_for("start")
    return running


def free_within(task, task_queue: TaskQueue, seconds: float) -> None:
    wait_until(lambda: task.lock_info(task_queue.name) is None, seconds + BUSY, "the lock is free")


def wait_for_renewal(held) -> None:
    """Wait until the lock that the function returns has a longer life than a moment before."""
    seen = [held().ttl]

    def renewed() -> bool:
        seen.append(held().ttl)
        return seen[-1] > seen[-2]

    wait_until(renewed)


# Ends that the child notices: the lock is free at once, though its life is ten minutes


def test_soft_time_limit_while_waiting_for_the_lock(task_queue, client):
    """The waiter leaves the queue, so that the next one is served."""
    holder = runs(task_queue, tasks.wait)
    waiter = task_queue.publish(tasks.wait, soft_time_limit=2)
    wait_until(lambda: tasks.wait.lock_info(task_queue.name).waiting == 1)
    assert type(ended(waiter).result).__name__ == "SoftTimeLimitExceeded"
    wait_until(lambda: tasks.wait.lock_info(task_queue.name).waiting == 0)
    app.control.revoke(holder["result"].id, terminate=True)
    assert ended(task_queue.publish(tasks.wait)).state == "SUCCESS"


# Ends that nobody can answer to: the lock ends by its life


@pytest.fixture
def place(worker_pools, client):
    """Have a message wait in its body's start for one that runs; return the queue and how to see its place."""
    task_queue = TaskQueue(worker_pools.of("prefork"), blocked=True)
    task = tasks.mortal_waiting
    task_queue.publish(task)
    task_queue.run_log.wait_for("start")

    def place():
        return next((lock for lock in held_locks(client) if lock.name.startswith(f"celery-queue:{task.name}:")), None)

    yield task_queue, task, place
    task_queue.run_log.let_bodies_end()
    assert task_queue.run_log.events("overlap") == []


def test_the_place_of_a_message_that_waits_in_its_start_is_renewed(place):
    task_queue, task, held = place
    second = task_queue.publish(task)
    wait_until(lambda: held().ttl <= 4)
    wait_for_renewal(held)
    assert task_queue.publish(task).id == second.id, "it is still the one that waits"
    task_queue.run_log.let_bodies_end()
    assert ended(second).state == "SUCCESS"


def test_hard_time_limit_while_waiting_for_the_lock(place):
    """Celery sends SIGTERM first, after which a child has a tenth of a second, unless it is deaf."""
    task_queue, task, held = place
    killed = task_queue.publish(task, "deaf before the start", time_limit=1)
    assert type(ended(killed).result).__name__ == "TimeLimitExceeded"
    wait_until(lambda: held() is None, 4 + 1 + BUSY, "the place is free")
    task_queue.run_log.let_bodies_end()
    assert ended(task_queue.publish(task)).state == "SUCCESS"


def test_child_killed_and_its_message_delivered_again(task_queue):
    """The only copy of the message meets the lock of its own dead run; it is neither dropped nor refused."""
    result = task_queue.publish(tasks.mortal_late, "sleep")
    first = task_queue.run_log.wait_for("start")
    task_queue.kill_child(first)
    second = task_queue.run_log.wait_for("start", 2, timeout=LIFE + 10)
    assert second["id"] == first["id"]
    app.control.revoke(result.id, terminate=True)
    free_within(tasks.mortal_late, task_queue, 10)


def test_main_process_and_children_killed(worker_pools):
    worker = worker_pools.start("prefork", name="doomed", concurrency=4).wait_ready()
    running = run_in_all(worker, tasks.mortal)
    worker.kill()
    for task_queue, _ in running.values():
        free_within(tasks.mortal, task_queue, LIFE + 1)


@pytest.mark.parametrize("pool", POOLS)
def test_warm_shutdown_lets_the_task_finish(worker_pools, pool):
    """And another worker does what is left of its canvas."""
    kinds = KINDS if pool != "solo" else ["chain"]  # it does one thing at a time
    worker = worker_pools.start(pool, name=f"warm-{pool}", concurrency=len(kinds)).wait_ready()
    running = run_in_all(worker, tasks.refuse, "return", kinds, blocked=True)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in worker.log)
    for task_queue, _ in running.values():
        assert tasks.refuse.lock_info(task_queue.name) is not None
        task_queue.run_log.let_bodies_end()
    assert worker.wait() == 0
    for kind, (task_queue, result) in running.items():
        assert member(kind, result).state == "SUCCESS"
        assert tasks.refuse.lock_info(task_queue.name) is None
        task_queue.workers = worker_pools.of("prefork")
        task_queue.consume()
        assert ended_with_its_canvas(kind, result).startswith("ran ")
        assert ended(task_queue.publish(tasks.refuse)).state == "SUCCESS"


@pytest.mark.parametrize("task", [tasks.late_job, tasks.job, tasks.refuse], ids=lambda task: task.__name__)
def test_a_cold_shutdown_leaves_a_lock_only_to_a_job_that_comes_again(worker_pools, task):
    """Else somebody could publish a second one, and the first would be refused when it comes."""
    cold = worker_pools.start("prefork", name=f"cold-{task.__name__}", concurrency=1).wait_ready()
    task_queue = TaskQueue([cold], blocked=True)
    first = task_queue.publish(task)
    task_queue.run_log.wait_for("start")
    cold.signal(signal.SIGQUIT)
    cold.wait()
    if not task.acks_late:
        free_within(task, task_queue, 5)
        return
    assert task.lock_info(task_queue.name).label == f"{task.name}[{first.id}]"
    assert task_queue.publish(task).id == first.id
    task_queue.run_log.let_bodies_end()
    task_queue.workers = worker_pools.of("prefork")
    task_queue.consume()
    assert ended(first).result == f"ran {first.id}"


@pytest.mark.skipif(VERSION < (5, 5), reason="the setting is new in Celery 5.5")
def test_soft_shutdown_ends_a_job_only_if_it_ends_in_time(worker_pools):
    """Celery gives what runs some seconds, and its broker what does not end in them."""
    task = tasks.late_job
    soft = worker_pools.start("prefork", name="soft", concurrency=2, env={SOFT_SHUTDOWN: "2"}).wait_ready()
    quick, slow = queues = [TaskQueue([soft], blocked=True) for _ in range(2)]
    results = [task_queue.publish(task) for task_queue in queues]
    for task_queue in queues:
        task_queue.run_log.wait_for("start")
    soft.signal(signal.SIGQUIT)
    wait_until(lambda: "Initiating Soft Shutdown" in soft.log)
    quick.run_log.let_bodies_end()
    quick.run_log.wait_for("end")
    free_within(task, quick, 5)
    assert task.lock_info(slow.name).id != results[1].id, "it still runs"
    soft.wait()
    assert task.lock_info(slow.name).id == results[1].id, "its message has the lock"
    assert slow.publish(task).id == results[1].id
    slow.run_log.let_bodies_end()
    for task_queue in queues:
        task_queue.workers = worker_pools.of("prefork")
    slow.consume()
    for task_queue, result, runs in zip(queues, results, (1, 2), strict=True):
        assert ended(result).result == f"ran {result.id}"
        assert len(task_queue.run_log.events("start")) == runs


@pytest.mark.parametrize(("how", "options"), [("sleep", {}), ("sleep", {"time_limit": 1}), ("deaf", {"time_limit": 1})])
def test_a_job_that_is_terminated_has_ended_though_it_is_acknowledged_late(task_queue, how, options):
    """The child that ends by SystemExit left the lock to its message, which was acknowledged, for an hour."""
    first = task_queue.publish(tasks.late_job, how, **options)
    task_queue.run_log.wait_for("start")
    if not options:
        app.control.revoke(first.id, terminate=True)
    assert ended(first).state == ("FAILURE" if options else "REVOKED")
    free_within(tasks.late_job, task_queue, 10)
    assert ended(task_queue.publish(tasks.late_job)).state == "SUCCESS"


BEFORE_5_7 = not hasattr(app.Task, "retry_on_worker_lost")


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param(
            False,
            id="result stored",
            marks=pytest.mark.skipif(BEFORE_5_7, reason="Celery 5.6 cannot store a CancelledError, and tells nobody"),
        ),
        pytest.param(
            True,
            id="result ignored",
            marks=pytest.mark.skipif(VERSION < (5, 6), reason="Celery 5.5 asks only the task whether to store it"),
        ),
    ],
)
def test_a_job_that_ends_by_a_cancellation_has_ended_because_a_child_acknowledges_its_message(task_queue, ignored):
    """It is no Exception, so the lock was left to the message. In other pools that is right: it is not acknowledged."""
    task_queue.publish(tasks.once_job, "cancelled", ignore_result=ignored)
    task_queue.run_log.wait_for("start")
    free_within(tasks.once_job, task_queue, 10)
    assert ended(task_queue.publish(tasks.once_job)).state == "SUCCESS"


@pytest.mark.skipif(BEFORE_5_7, reason="the setting is new in Celery 5.7")
def test_a_job_that_celery_retries_because_its_child_was_killed_keeps_its_lock(task_queue):
    """The lock of the child ended after its expiry, and a duplicate was published and ran before the retry."""
    first = task_queue.publish(tasks.retried_job, "once killed")
    task_queue.kill_child(task_queue.run_log.wait_for("start"))
    wait_until(
        lambda: tasks.retried_job.lock_info(task_queue.name).ttl > 60, message="the message of the retry has the lock"
    )
    assert task_queue.publish(tasks.retried_job).id == first.id
    assert ended(first).result == f"ran {first.id}"
    assert [run["id"] for run in task_queue.run_log.events("start")] == [first.id] * 2
    free_within(tasks.retried_job, task_queue, 10)


@pytest.mark.skipif(BEFORE_5_7, reason="the option is new in Celery 5.7")
def test_children_that_were_spawned_renew_their_locks_and_leave_none_when_they_are_killed(worker_pools):
    # One at a time: three children that import everything at once took more than a minute on a busy machine.
    worker = worker_pools.start("prefork", 0, "--pool-start-method=spawn", name="spawn", concurrency=1).wait_ready()
    for task in tasks.spawned:
        task_queue = TaskQueue([worker])
        body = runs(task_queue, task)
        wait_for_renewal(partial(task.lock_info, task_queue.name))
        task_queue.kill_child(body)
        free_within(task, task_queue, 4 + 1)
        assert ended(task_queue.publish(task), 120).state == "SUCCESS"
        assert task_queue.run_log.events("overlap") == []


# The lock's own faults


@pytest.fixture(params=POOLS)
def pool(request) -> str:
    return request.param


def test_a_lost_lock_is_told_to_the_body_and_its_result_stands(worker_pools, pool):
    task_queue = TaskQueue(worker_pools.of(pool))
    result = task_queue.publish(tasks.losing, "until lost")
    task_queue.run_log.wait_for("held")
    assert tasks.losing.unlock(task_queue.name)
    assert task_queue.run_log.wait_for("told")["error"] == "LockLost"
    assert ended(result).result == "finished all the same"
    told = rf"Lock 'celery:{tasks.losing.name}:{task_queue.name}' \(fence \d+\) was lost: "
    wait_until(lambda: re.search(told, task_queue.log))  # a thread of its own tells


@pytest.fixture
def apart(worker_pools, own_server, settings) -> Iterator[Worker]:
    """A worker whose locks live on a server of their own, which the test may kill."""
    settings.DJANGO_REDISLOCK = {"URL": own_server.url}
    name = f"apart-{own_server.port}"
    worker = worker_pools.start(
        "prefork", name=name, concurrency=len(KINDS), env={"REDISLOCK_TEST_LOCKS": own_server.url}
    )
    yield worker.wait_ready()
    worker.close()


def test_redis_down_at_the_start(apart, own_server):
    task_queue = TaskQueue([apart])
    own_server.stop()
    for kind in KINDS:
        assert type(ended_with_its_canvas(kind, published(kind, task_queue, tasks.refuse))) is LockBackendError
    assert ended(task_queue.publish(tasks.run_without)).state == "SUCCESS"
    assert "runs without its lock, because Redis does not answer" in apart.log
    later = task_queue.publish(tasks.try_later)
    wait_until(lambda: later.state == "RETRY")
    own_server.start()
    assert ended(later).result == f"ran {later.id}"
    assert len(task_queue.run_log.events("start")) == 2


@pytest.mark.parametrize(
    ("task", "how", "outcome", "told"),
    [
        (tasks.refuse, "return", "ran ", "could not release its lock, which is released when Redis answers"),
        (tasks.mortal, "until lost", "finished", " was lost: "),
    ],
    ids=["release", "renewal"],
)
def test_redis_down_at_the_release_or_the_renewal(apart, own_server, task, how, outcome, told):
    running = run_in_all(apart, task, how, blocked=True)
    own_server.stop()
    for task_queue, _ in running.values():
        task_queue.run_log.let_bodies_end()
    for kind, (_, result) in running.items():
        assert ended_with_its_canvas(kind, result).startswith(outcome)
    wait_until(lambda: apart.log.count(told) == len(running))
    own_server.start()
    for task_queue, _ in running.values():
        assert ended(task_queue.publish(task)).state == "SUCCESS"
