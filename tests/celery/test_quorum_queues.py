"""A message that is published again into a quorum queue of RabbitMQ, where Celery delays messages by exchanges."""

from __future__ import annotations

import itertools

import pytest
from celery import Celery
from kombu import Exchange, Queue

from django_redislock.celery import single_instance
from django_redislock.core import Lock
from tests.celery.deliveries import deliver
from tests.support import name_of

pytestmark = pytest.mark.processes
NUMBERS = itertools.count()
delayed = pytest.importorskip("kombu.transport.native_delayed_delivery", reason="Celery 5.5 is the first that has it")


@pytest.fixture
def app(rabbitmq):
    with Celery("quorum", set_as_current=False, broker=rabbitmq.url, backend="cache+memory://") as app:
        topic = Exchange("quorum", type="topic")
        queue = Queue("quorum", topic, routing_key="quorum", queue_arguments={"x-queue-type": "quorum"})
        app.conf.update(task_queues=[queue], task_default_queue="quorum", task_default_routing_key="quorum")
        with app.connection_for_write() as connection:
            delayed.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
            queue.bind(connection.default_channel).declare()
            delayed.bind_queue_to_native_delayed_delivery_exchange(connection, queue)
        yield app


@pytest.mark.parametrize("delay", [0.3, 2])
def test_a_refused_message_comes_again(client, app, delay):
    def body():
        return "ran"

    mark = single_instance(on_conflict="reschedule", reschedule_delay=delay)
    task = app.task(name=f"delayed.{next(NUMBERS)}", shared=False, lazy=False)(mark(body))
    lock = Lock(client, name_of(task), label="a long run")
    lock.acquire()
    result = task.delay()
    with app.connection_for_read() as connection, connection.SimpleQueue(app.amqp.queues["quorum"]) as queue:
        for _ in range(2):
            message = queue.get(timeout=30)
            message.ack()
            deliver(app, message)
            if lock.locked():
                assert result.state == "RETRY"
                lock.release()
    assert result.get(timeout=10) == "ran"
