"""What remains of a message that is refused, or published again: seen by its next delivery, and by others."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.exceptions import Reject

from django_redislock.core import Lock
from tests.celery.test_replace import QUEUE, deliver, take
from tests.support import name_of, wait_until


@pytest.fixture(scope="module")
def app():
    with Celery("refused", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = QUEUE
        yield app


def reject(task, error):
    raise Reject(error, requeue=False)


def test_a_message_that_a_policy_rejects_runs_when_the_queue_of_dead_letters_brings_it_back(client, app, make):
    """A queue for dead letters with a time to live is how RabbitMQ delays a message; it was dropped as processed."""
    task = make(lambda self: "ran", key=[], on_conflict=reject, expire=1, task_options={"acks_late": True})
    task.delay()
    (message,) = take(app)
    with Lock(client, name_of(task), label="a long run"):
        deliver(app, message)
    wait_until(lambda: not list(client.scan_iter("*:done:*")))
    assert deliver(app, message) == "ran"


def test_a_message_that_is_published_again_holds_its_place_no_longer_than_until_it_expires(client, app, make):
    task = make(lambda self: "ran", key=[], scope="queued+run", on_conflict="reschedule")
    first = task.apply_async(expires=60)
    (message,) = take(app)
    with Lock(client, name_of(task), label="a long run"):
        deliver(app, message)
    place = task.lock_info()
    assert place.label == f"{task.name}[{first.id}]"
    assert place.ttl <= 60
