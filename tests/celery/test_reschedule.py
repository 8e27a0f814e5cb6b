"""How often, how long and under what headers a refused message is published again; the test takes the worker's part."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import time_machine
from kombu import serialization

from django_redislock import LockBackendError, TaskAlreadyRunning
from django_redislock.core import Lock
from django_redislock.signals import task_rescheduled
from tests.celery.deliveries import take, trace
from tests.support import faketime_library, name_of, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.harness import TaskQueue


@pytest.fixture
def make(make):
    return partial(make, on_conflict="reschedule")


class Message:
    """The message of a task, each time that it is published, as a worker gets it."""

    def __init__(self, task, **options):
        self.task = task
        take(task.app)
        self.result = task.apply_async(**options)

    def run(self, waited=0.0):
        """Run it as if its first conflict was so many seconds ago; return the delay of the next, if it comes again."""
        delays = []
        (message,) = take(self.task.app)
        self.headers, self.content_type = dict(message.headers), message.content_type
        for headers in (self.headers, self.headers.get("headers") or {}):
            if waited and "single_instance_since" in headers:
                headers["single_instance_since"] -= waited
        task_rescheduled.connect(receiver := lambda **data: delays.append(data["delay"]))
        try:
            received = self.task.Request(message, app=self.task.app, task=self.task, headers=self.headers)
            trace(self.task, {**received.request_dict, "delivery_info": {}})
        finally:
            task_rescheduled.disconnect(receiver)
        return delays[0] if delays else None


@pytest.fixture
def held(client):
    """Hold the lock of a task for the rest of the test."""
    return lambda task: Lock(client, name_of(task), label="a long run").acquire()


@pytest.mark.slow
def test_a_task_behind_a_long_run_is_rescheduled_as_long_as_its_message_may_live(client, make, held):
    """Not 100 times in 17 minutes, after which it failed."""
    task = make()
    held(task)
    message = Message(task)
    delays = [message.run()]
    for _ in range(150):
        delays.append(message.run(waited=delays[-1]))
    assert None not in delays
    assert message.result.state == "RETRY"
    assert message.headers["single_instance_rescheduled"] == 150
    task.unlock()
    message.run()
    assert (message.result.state, message.result.result) == ("SUCCESS", "ran")


def test_a_message_keeps_its_serializer(client, make, held, request):
    """Pickled arguments went into JSON: Celery could not publish them, so the broker brought the message 276 times."""
    serialization.register("like json", json.dumps, json.loads, "application/x-like-json", "utf-8")
    request.addfinalizer(partial(serialization.unregister, "like json"))
    task = make()
    held(task)
    message = Message(task, serializer="like json")
    for _ in range(3):
        message.run()
        assert message.content_type == "application/x-like-json"


def test_the_delay_grows_with_the_time_waited_so_far(client, make, held):
    task = make(reschedule_delay=4)
    held(task)
    message = Message(task)
    assert 2 <= message.run() <= 6
    assert 2 <= message.run(waited=30) <= 6
    assert 14.5 <= message.run(waited=270) <= 46, "a tenth of 300 s, on average"
    assert 150 <= message.run(waited=86400) <= 450, "a broker would take a longer delay for a worker's death"


def test_a_delay_that_is_long_anyway_stays(client, make, held):
    task = make(reschedule_delay=1000)
    held(task)
    message = Message(task)
    message.run()
    assert 500 <= message.run(waited=10**6) <= 1500


@pytest.mark.parametrize("limit", [60, 60.0, timedelta(minutes=1)])
def test_the_limit_is_a_time_at_whose_end_the_lock_is_looked_for_once_more(client, make, held, limit):
    task = make(reschedule_limit=limit, reschedule_delay=1000)
    held(task)
    message = Message(task)
    assert message.run() == 60, "not longer than the limit"
    assert message.run(waited=50) == pytest.approx(10, abs=5)
    assert message.run(waited=20) is None
    assert type(message.result.result) is TaskAlreadyRunning


def test_no_time_at_all_is_no_second_try(client, make, held):
    task = make(reschedule_limit=0)
    held(task)
    message = Message(task)
    assert message.run() is None
    assert type(message.result.result) is TaskAlreadyRunning


def test_the_limit_counts_by_the_clock_of_the_server(client, make, held):
    """A worker whose clock was ten minutes ahead failed half of the messages within seconds."""
    task = make(reschedule_limit=60, reschedule_delay=4)
    held(task)
    message = Message(task)
    for minutes in (0, 10, -10, 10):
        with time_machine.travel(datetime.now(UTC) + timedelta(minutes=minutes)):
            assert message.run() is not None
    assert message.run(waited=60) is None


def test_the_delays_count_while_redis_does_not_answer(make, settings):
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1", "RETRY_FOR": 0}
    task = make(reschedule_limit=10, reschedule_delay=4, on_backend_error="reschedule")
    message = Message(task)
    delays = []
    while (delay := message.run()) is not None:
        delays.append(delay)
    assert sum(delays) == pytest.approx(10, abs=1)
    assert type(message.result.result) is LockBackendError


@pytest.mark.processes
@pytest.mark.usefixtures("no_lock_is_left")
def test_no_message_fails_early_in_a_worker_whose_clock_is_ahead(worker_pools):
    ahead = {"LD_PRELOAD": faketime_library(), "FAKETIME": "+600s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    # Only a worker with gevent is a new process, which loads the library.
    one, other = (
        worker_pools.start("gevent", number, name="clocks", env=env) for number, env in enumerate([{}, ahead])
    )
    task_queue = TaskQueue([one.wait_ready(), other.wait_ready()], blocked=True)
    task_queue.publish(tasks.limited)
    task_queue.run_log.wait_for("start")
    for _ in range(10):
        task_queue.publish(tasks.limited)
    wait_until(lambda: other.log.count("is published again") >= 10, message="the worker ahead has put off ten messages")
    assert one.log.count("is published again") > 0
    assert "raised expected" not in task_queue.log
    task_queue.run_log.let_bodies_end()


@pytest.mark.parametrize("headers", [{}, {"headers": {"trace": "1"}}])
def test_a_retry_has_the_whole_time_again(client, make, headers):
    """Its former run, which may have taken hours, is no conflict; also where a tracer puts headers in the headers."""

    def body(self):
        if not self.request.retries:
            self.retry(countdown=0)
        return "ran"

    task = make(body, reschedule_limit=60)
    lock = Lock(client, name_of(task))
    lock.acquire()
    message = Message(task, headers=headers)
    message.run()
    lock.release()
    message.run(waited=30)  # retries
    lock.acquire()
    assert message.run() > 0
    assert message.run(waited=50) > 0
    assert message.run(waited=20) is None


def test_a_message_that_is_put_off_holds_its_place_until_then(client, make):
    """Its life is that of a message with a countdown."""
    task = make(scope="queued+run", queue_life=30, reschedule_delay=1000)
    with Lock(client, name_of(task), label="a long run"):
        message = Message(task)
        delay = message.run()
    place = task.lock_info()
    assert place.label == f"{task.name}[{message.result.id}]"
    assert delay + 20 < place.ttl <= delay + 30
