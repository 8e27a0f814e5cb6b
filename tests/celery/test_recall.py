"""A run that is asked for its lock gives it back when it ends; the lock of a message that waits is freed."""

from __future__ import annotations

import pytest

from django_redislock.core.listing import held_locks
from django_redislock.exceptions import LockLost, TaskAlreadyRunning
from tests.celery.deliveries import deliver, take
from tests.support import begin, in_thread


@pytest.fixture
def asked(make):
    """Make a task whose first run is asked for its lock; `asked.seen` has the retries of its runs."""
    seen = []

    def made(does=lambda self: None, **options):
        def body(self):
            seen.append(self.request.retries)
            if len(seen) > 1:
                return "ran"
            assert task.recall()
            does(self)
            return "was asked"

        task = make(body, **options)
        return task

    made.seen = seen
    return made


def test_the_body_is_told_and_nobody_runs_beside_it(client, asked):
    def look(self):
        with pytest.raises(LockLost, match="asked for it back"):
            self.single_instance.lock.extend()
        assert self.single_instance.lost.code == "recalled"
        with pytest.raises(TaskAlreadyRunning):
            begin(lambda: self.apply(throw=True)).result(20)

    task = asked(look)
    assert task.apply(throw=True).get() == "was asked"
    assert list(held_locks(client)) == []
    assert task.apply(throw=True).get() == "ran"


def test_a_recalled_run_keeps_no_lock_after_its_end(client, asked):
    assert asked(keep_for=60).apply(throw=True).get() == "was asked"
    assert list(held_locks(client)) == []


def test_the_retry_of_a_recalled_job_runs(app, client, asked):
    def again(self):
        raise self.retry(countdown=0)

    task = asked(again, scope="job")
    task.delay()
    for _ in range(2):
        deliver(app, *take(app))
        assert list(held_locks(client)) == []
    assert asked.seen == [0, 1]


@pytest.mark.parametrize("limit", [None, 2])
def test_a_copy_does_not_run_beside_a_run_that_was_recalled(app, client, asked, limit):
    task = asked(lambda self: in_thread(lambda: deliver(app, message)), limit=limit, task_options={"acks_late": True})
    task.delay()
    (message,) = take(app)
    deliver(app, message)
    assert asked.seen == [0]


@pytest.mark.parametrize("scope", ["queued", "queued+run", "job"])
@pytest.mark.parametrize("task_id", [None, "any id of a task"])
def test_the_lock_of_a_message_that_waits_is_freed_and_the_message_runs(app, client, make, scope, task_id):
    runs = []
    task = make(lambda self: runs.append(1), scope=scope)
    task.apply_async(task_id=task_id)
    assert task.recall()
    assert list(held_locks(client)) == []
    deliver(app, *take(app))
    assert runs == [1]
    assert list(held_locks(client)) == []
