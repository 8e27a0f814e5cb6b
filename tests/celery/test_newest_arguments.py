"""The newest arguments of a message that does not run at once: it waits in its worker, or is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery

from django_redislock.core import Lock, held_locks
from tests.celery.test_replace import QUEUE, deliver, take
from tests.support import wait_until


@pytest.fixture(scope="module")
def app():
    with Celery("newest", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = QUEUE
        yield app


@pytest.fixture
def ran():
    return []


@pytest.fixture
def replacing(make, ran):
    """Make a task that notes its arguments; its duplicates replace `rows`."""

    def replacing(**options):
        def body(self, customer, rows=0):
            ran.append((customer, rows))
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
