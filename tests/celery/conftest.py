from __future__ import annotations

import itertools

import pytest
from celery import Celery

from django_redislock.celery import single_instance


@pytest.fixture(scope="module")
def app():
    with Celery("in-process", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        yield app


@pytest.fixture
def make(app, request):
    """Make a task from a function, with options of ``@single_instance``."""
    numbers = itertools.count()

    def make(function, *, task_options=None, **options):
        function.__name__ = "body"  # Celery makes code of it, which "<lambda>" is not
        name = f"{request.node.name}.{next(numbers)}"
        marked = single_instance(**options)(function)
        return app.task(name=name, bind=True, shared=False, lazy=False, **task_options or {})(marked)

    return make
