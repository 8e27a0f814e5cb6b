"""Tests that publish; no worker runs."""

from __future__ import annotations

from celery import chain, chord, group

from tests.celery.deliveries import take

QUEUE = "producer"  # that broker is shared by all tests of a process
SCOPES = ["queued", "queued+run", "job"]


CANVASES = {
    "chain": lambda one, other: chain(one, other),
    "group": lambda one, other: group(one, other),
    "chord": lambda one, other: chord([one, other], other),
}


def find_receivers_again(app):
    """Let the app's next message find the receivers of signals anew.

    Celery 5.6 goes on with the list that it found first. It is replaced when a receiver of an earlier test is dead.
    """
    vars(app.amqp).pop("send_task_message", None)


def taken(app, task):
    """Take the messages out of the queue, and return the task's."""
    return [message for message in take(app) if message.headers["task"] == task.name]


def messages(app, task):
    """Take the messages out of the queue, and return the ids of the task's."""
    return [message.headers["id"] for message in taken(app, task)]
