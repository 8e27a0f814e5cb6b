"""What a worker does with messages, without a worker: they are taken out of the queue, and run in this process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery.app.trace import build_tracer


def take(app, queue=None):
    """Take the messages out of the queue, by default of that of the app."""
    found, name = [], queue or app.conf.task_default_queue
    with app.connection_for_read() as connection, connection.SimpleQueue(name) as messages, suppress(messages.Empty):
        while True:
            found.append(messages.get_nowait())
            found[-1].ack()
    return found


def trace(task, request, args=(), kwargs=None) -> Any:
    """Run a task with this request by Celery's tracer, and return what became of it."""
    request = {"root_id": request["id"], "delivery_info": {}, **request, "called_directly": False}
    return build_tracer(task.name, task, app=task.app)(request["id"], args, kwargs or {}, request).info


def deliver(app, message, **delivery_info):
    """Run a message as a worker does; return what its body returned or raised."""
    return traced(app, message, **delivery_info).retval


def traced(app, message, **delivery_info) -> Any:
    """Run a message as a worker does, and return what Celery's tracer does."""
    (args, kwargs, embed), task, id = message.payload, app.tasks[message.headers["task"]], message.headers["id"]
    args, kwargs = type(args)(args), {**kwargs}  # its copies have their own, which a run does not change
    request = {**message.headers, **embed, "properties": message.properties, "delivery_info": delivery_info}
    return build_tracer(task.name, task, app=app)(id, args, kwargs, {**request, "called_directly": False})


def work(app):
    """Run all that is in the queue, and what that publishes; return the headers of the messages."""
    found = []
    while messages := take(app):
        for message in messages:
            deliver(app, message)
            found.append(message.headers)
    return found
