"""Messages that a worker discards before there is a request: they leave no lock. With real workers."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any

import pytest
from celery import Celery
from kombu.serialization import codec, registry

from django_redislock.celery import DuplicateResult, single_instance
from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app
from tests.support.celery_site.harness import POOLS, TaskQueue

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]

TORN = "torn JSON"
"""A serializer whose messages cannot be decoded; those of pickle are not accepted."""
DISCARDED = re.compile("Can't decode message body|Received invalid task message|Received unregistered task of type")
"""What Celery logs of such a message."""


@pytest.fixture(autouse=True)
def torn(monkeypatch):
    # Not by register() and unregister(), which takes JSON's own decoder away.
    monkeypatch.setitem(registry._encoders, TORN, codec("application/json", "utf-8", lambda body: '{"torn'))


@pytest.fixture(params=POOLS)
def task_queue(worker_pools, request) -> TaskQueue:
    return TaskQueue(worker_pools.of(request.param))


def _discards(task_queue: TaskQueue, number: int) -> bool:
    return len(DISCARDED.findall(task_queue.log)) == number


def leaves_no_lock(task_queue: TaskQueue, task: Any, **options: Any) -> None:
    """Publish the task twice: its worker discards the first message, and the second is no duplicate of it."""
    for _ in range(2):
        known = len(DISCARDED.findall(task_queue.log))
        assert not isinstance(task_queue.publish(task, **options), DuplicateResult)
        wait_until(partial(_discards, task_queue, known + 1), message="the message is discarded")
        wait_until(lambda: task.lock_info(task_queue.name) is None, message="the lock of the message is released")
    assert task_queue.run_log.events("start") == []


@pytest.mark.parametrize("serializer", [TORN, "pickle"])
@pytest.mark.parametrize("task", [tasks.queued, tasks.queued_and_run, tasks.job], ids=lambda task: task.name)
def test_a_message_that_its_worker_cannot_decode_leaves_no_lock(client, task_queue, task, serializer):
    """It kept the lock for an hour, and everything published meanwhile was a duplicate of a message that was gone."""
    leaves_no_lock(task_queue, task, serializer=serializer)


def test_a_message_that_its_worker_cannot_decode_leaves_no_lock_without_results(client, task_queue):
    leaves_no_lock(task_queue, tasks.job, serializer=TORN, ignore_result=True)


NUMBERS = itertools.count()


@pytest.fixture(params=["queued", "queued+run", "job"])
def unknown(request) -> Any:
    """A task that no worker has, as in a deploy that updates the producers first."""
    publishers = Celery("publishers", set_as_current=False)
    publishers.conf.update(broker_url=app.conf.broker_url, result_backend=None)
    name = f"discarded.unknown_{next(NUMBERS)}"

    @single_instance(key="{name}", scope=request.param)
    def body(name):
        pass

    yield publishers.task(name=name, shared=False, lazy=False)(body)
    publishers.close()


def test_a_message_whose_worker_does_not_have_the_task_leaves_no_lock(client, task_queue, unknown):
    leaves_no_lock(task_queue, unknown)
