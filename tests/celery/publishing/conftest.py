"""An app whose messages stay in the memory of the process."""

from __future__ import annotations

import itertools

import pytest
from celery import Celery

from django_redislock.celery import single_instance

from . import QUEUE, SCOPES


@pytest.fixture(scope="module")
def app():
    with Celery("producer", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = QUEUE
        yield app


@pytest.fixture(params=SCOPES)
def scope(request):
    return request.param


numbers = itertools.count()
"""Of all tests, because Celery warns of a name that it knows: each repetition of a test failed."""


@pytest.fixture
def make(app, request):
    def make(function=lambda a=1, password="": None, *, task_options=None, **options):
        function.__name__ = "body"
        name = f"{request.node.name}.{next(numbers)}"
        return app.task(name=name, shared=False, lazy=False, **task_options or {})(single_instance(**options)(function))

    return make
