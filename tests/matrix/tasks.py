"""How tasks hold: their bodies in place of what the functions of a site do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from celery import Celery

from django_redislock.celery import DuplicateResult, single_instance
from django_redislock.exceptions import LockBackendError
from tests.celery.deliveries import take, traced

from .cell import Place
from .rounds import Round

_bodies: dict[str, Any] = {}
"""What each thread's task does, because a task's arguments are data."""


def task(at: Place, **options: Any) -> Callable[[Any], Any]:
    @single_instance(key="{name}", expire=at.expire, on_conflict="wait", wait=at.timeout, **options)
    def work(self: Any, name: str, number: int) -> None:
        _bodies[f"{name} {number}"](self.single_instance)

    _, made = _app(at, work)

    def run(body: Any) -> None:
        _bodies[f"{at.name} {at.number}"] = body
        made.apply((at.name, at.number), throw=True).get()

    return run


def message(at: Place, acks_late: bool = False, retries: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Publish the task, and do what a worker does with its messages, until its body has run. What is not published, as
    a duplicate, is published again after a pause."""
    options = {"on_conflict": "wait", "wait": at.timeout, "expire": at.expire, "queue_life": at.expire, **options}

    @single_instance(key="{name}", **options)
    def work(self: Any, name: str, number: int) -> None:
        if retries and not self.request.retries:
            raise self.retry(countdown=0)
        _bodies[f"{name} {number}"](self.single_instance)

    app, made = _app(at, work, acks_late=acks_late)

    def run(body: Any) -> None:
        mine = Round(at.timeout, body)
        _bodies[f"{at.name} {at.number}"] = mine.body
        while not mine.has_run:
            mine.is_over()
            messages = take(app)
            for each in messages:
                _work(app, each)
            if not messages and not _is_published(mine, made, at):
                time.sleep(mine.pause)
        # A message may have been published while that of another one ran the body. It is run, too, because it may have
        # the arguments of a duplicate, which waits for that.
        for each in take(app):
            _work(app, each)

    return run


def queued(at: Place) -> Callable[[Any], Any]:
    """Publish the task, and hold with its message, for a given time, until a worker begins with it. A duplicate is
    published again after a pause."""

    @single_instance(
        key="{name}", scope="queued", queue_life=at.expire + 1, on_backend_error="reschedule", reschedule_delay=0.05
    )
    def work(self: Any, name: str, number: int) -> None:
        began.append(number)

    app, made = _app(at, work)
    began: list[int] = []

    def run(body: Any) -> None:
        mine = Round(at.timeout, body)
        began.clear()
        while not _is_published(mine, made, at):
            mine.is_over()
            time.sleep(mine.pause)
        mine.body()
        while not began:
            for each in take(app):
                _work(app, each)

    return run


def _is_published(mine: Round, made: Any, at: Place) -> bool:
    """Publish the message, unless another one's has its arguments now, and runs; return whether there is one."""
    if mine.begun:
        return False
    with suppress(LockBackendError):  # while Redis cannot answer, that is what publishing raises
        return not isinstance(made.apply_async((at.name, at.number)), DuplicateResult)
    return False


def _app(at: Place, function: Any, **options: Any) -> tuple[Celery, Any]:
    """Return an app with a queue of its own, and its task."""
    app = Celery("matrix", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.close()  # it works on, but is none of the process: `redislock release --task` looks through all of those
    app.conf.task_default_queue = f"{at.name}-{at.number}"
    return app, app.task(name="matrix", bind=True, shared=False, lazy=False, **options)(function)


def _work(app: Celery, message: Any) -> None:
    """Do as a worker that gets the message, and raise what its run raised."""
    if message.headers["eta"]:
        start = datetime.fromisoformat(message.headers["eta"]).timestamp()
        time.sleep(max(0.0, start - time.time()))
    info = traced(app, message).info
    if info is not None and info.state == "FAILURE":
        raise info.retval
