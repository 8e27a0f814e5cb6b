"""The newest arguments of a message that does not run at once: it waits in its worker, or is refused."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from billiard.einfo import ExceptionInfo
from celery import Task, group
from celery.exceptions import Reject, WorkerLostError

from django_redislock.core import Lock, held_locks
from tests.celery.deliveries import deliver, take
from tests.support import wait_until


@pytest.fixture
def ran():
    return []


@pytest.fixture
def replacing(make, ran):
    """Make a task that notes its arguments; its duplicates replace `rows`."""

    def replacing(*, function=lambda self: None, **options):
        def body(self, customer, rows=0):
            ran.append((customer, rows))
            function(self)
            return "ran"

        return make(body, **{"key": "{customer}", "scope": "queued+run", "on_duplicate": "replace", **options})

    return replacing


def run_lock(client, task):
    """Return the lock under which the task runs, for somebody else."""
    lock, *_ = task._locks(("a",), {})
    return Lock(client, lock.name, label="a long run")


def test_a_message_that_waits_in_its_worker_keeps_the_arguments_of_its_duplicates(client, app, replacing, ran):
    """It takes its lock anew when it begins to wait, and then others replace its arguments as before."""
    for later in ([], [3]):
        task = replacing(on_conflict="wait", wait=60)
        other = run_lock(client, task)
        other.acquire()
        task.delay("a", 1)
        task.delay("a", 2)
        (message,) = take(app)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(deliver, app, message)
            wait_until(lambda other=other: other.owner().waiting == 1)
            for number in later:
                task.delay("a", number)
            other.release()
            assert running.result() == "ran"
    assert ran == [("a", 2), ("a", 3)]
    assert list(held_locks(client)) == []


def lose_place(client, task):
    """Let the lock of the waiting message end: nobody renewed it, or Redis lost it."""
    _, lock = task._locks(("a",), {})
    assert client.delete(lock._keys.lock)


def lost(caplog):
    return [record for record in caplog.records if "held no lock any more" in record.getMessage()]


def test_a_copy_of_a_message_whose_worker_died_while_it_waited_tells_that_arguments_may_be_lost(
    client, app, replacing, ran, caplog
):
    """Its lock ended with the worker that renewed it. That it is a copy is no reason for silence: it began nowhere."""
    task = replacing(on_conflict="wait", task_options={"acks_late": True})
    task.delay("a", 1)
    task.delay("a", 2)
    (message,) = take(app)
    lose_place(client, task)
    deliver(app, message, redelivered=True)
    assert ran == [("a", 1)]
    assert len(lost(caplog)) == 1


def test_a_copy_of_a_message_that_began_with_its_own_arguments_tells_nothing(client, app, replacing, ran, caplog):
    task = replacing(task_options={"acks_late": True})
    task.delay("a", 1)
    (message,) = take(app)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(type(task), "_body", lambda *args: sys.exit())
        deliver(app, message)
    assert deliver(app, message, redelivered=True) == "ran"
    assert ran == [("a", 1)]
    assert lost(caplog) == []


def test_a_message_that_was_published_without_a_lock_has_lost_none(client, app, replacing, ran, caplog):
    """By a program that does not have the task's code, as the warning about it says."""
    task = replacing()
    app.tasks.pop(task.name)
    app.send_task(task.name, ("a", 1))
    app.tasks[task.name] = task
    deliver(app, *take(app))
    assert ran == [("a", 1)]
    assert "was published without its lock" in caplog.text
    assert lost(caplog) == []


@pytest.mark.parametrize("policy", [{"on_conflict": "reschedule"}, {"on_conflict": "wait", "wait": 0.2}], ids=str)
def test_a_message_that_lost_its_place_before_it_takes_it_again_tells_that_arguments_may_be_lost(
    client, app, replacing, ran, caplog, policy
):
    """It waited longer than queue_life, for example. When it began, it held the lock that it had taken again."""
    task = replacing(**policy)
    task.delay("a", 1)
    task.delay("a", 2)
    (message,) = take(app)
    lose_place(client, task)
    with run_lock(client, task):
        deliver(app, message)
    for again in take(app):
        deliver(app, again)
    assert ran == ([("a", 1)] if "reschedule" in policy.values() else [])
    assert len(lost(caplog)) == 1


def test_a_message_that_is_published_again_in_its_place_tells_nothing(client, app, replacing, ran, caplog):
    task = replacing(on_conflict="reschedule")
    task.delay("a", 1)
    task.delay("a", 2)
    with run_lock(client, task):
        deliver(app, *take(app))
        deliver(app, *take(app))
    deliver(app, *take(app))
    assert ran == [("a", 2)]
    assert lost(caplog) == []


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.slow
def test_a_message_that_a_policy_rejects_keeps_its_place_or_tells_that_arguments_may_be_lost(
    client, app, replacing, ran, caplog, requeue
):
    """The broker has it again at once, or a queue for dead letters brings it back some day."""

    def reject(task, error):
        raise Reject(error, requeue=requeue)

    task = replacing(on_conflict=reject, expire=1, task_options={"acks_late": True})
    first = task.delay("a", 1)
    task.delay("a", 2)
    (message,) = take(app)
    with run_lock(client, task):
        deliver(app, message)
    assert (task.lock_info("a") is not None) == requeue
    assert requeue is (task.delay("a", 3).id == first.id)
    wait_until(lambda: not list(client.scan_iter("*:done:*")))
    deliver(app, message)
    assert ran == [("a", 3 if requeue else 1)]
    assert len(lost(caplog)) == (0 if requeue else 1)


@pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="the setting is new in Celery 5.7")
@pytest.mark.parametrize("began", [True, False])
def test_a_retry_of_a_killed_run_by_the_main_process_has_the_arguments_of_that_run(client, app, replacing, ran, began):
    """The main process has the message only, and published its first arguments."""
    task = replacing(task_options={"acks_late": True, "retry_on_worker_lost": True})
    task.delay("a", 1)
    task.delay("a", 2)
    (message,) = take(app)
    if began:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(type(task), "_body", lambda *args: sys.exit())
            deliver(app, message)
    main = task.Request(message, app=app, task=task, headers=message.headers, on_ack=lambda *args: None)
    try:
        raise WorkerLostError
    except WorkerLostError:
        main.on_failure(ExceptionInfo())
    (retry,) = take(app)
    assert retry.headers["retries"] == 1
    deliver(app, retry)
    assert ran == [("a", 2)]
    assert list(held_locks(client)) == []


def test_a_message_that_another_task_published_or_that_is_a_retry_tells_that_arguments_may_be_lost(
    client, app, make, replacing, ran, caplog
):
    """Each message that a task publishes names its parent, as members of canvases do; and it may be published again."""
    task = replacing(on_conflict="reschedule")
    make(lambda self: task.delay("a", 1) and None, key=[]).delay()
    deliver(app, *take(app))
    with run_lock(client, task):
        deliver(app, *take(app))
    retried = replacing(function=lambda self: self.request.retries or self.retry(countdown=0))
    retried.delay("a", 2)
    (published_again, first) = take(app)
    deliver(app, first)
    client.flushall()
    deliver(app, published_again)
    deliver(app, *take(app))
    assert ran == [("a", 2), ("a", 1), ("a", 2)]
    assert len(lost(caplog)) == 2


def test_a_message_that_was_published_though_another_one_waited_has_lost_nothing(client, app, replacing, ran, caplog):
    """A member of a canvas, a message with an id of its own, and a retry."""

    def retry(self):
        if self.request.retries == 0 and self.request.id == "mine":
            task.delay("a", 5)
            raise self.retry(countdown=0)

    task = replacing(function=retry)
    task.delay("a", 1)
    group(task.si("a", 2), task.si("a", 3)).apply_async()
    task.apply_async(("a", 4), task_id="mine")
    while messages := take(app):
        for message in messages:
            deliver(app, message)
    assert ran == [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("a", 5), ("a", 4)]
    assert lost(caplog) == []
