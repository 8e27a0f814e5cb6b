"""How tasks hold: their bodies in place of what the functions of a site do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from django_redislock.celery import single_instance

from .cell import Place

_bodies: dict[str, Any] = {}
"""What each thread's task does, because a task's arguments are data."""


def task(at: Place, **options: Any) -> Callable[[Any], Any]:
    @single_instance(key="{name}", expire=at.expire, on_conflict="wait", wait=at.timeout, **options)
    def work(self: Any, name: str, number: int) -> None:
        _bodies[f"{name} {number}"](self.single_instance)

    app = Celery("matrix", set_as_current=False, broker="memory://", backend="cache+memory://")
    made = app.task(name="matrix", bind=True, shared=False, lazy=False)(work)

    def run(body: Any) -> None:
        _bodies[f"{at.name} {at.number}"] = body
        made.apply((at.name, at.number), throw=True).get()

    return run
