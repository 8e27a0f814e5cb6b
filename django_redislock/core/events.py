"""Events of locks: each is logged once, and passed to listeners (Django's signals are one). Steps, which take time, are
surrounded by those who observe them (tracing is one)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

log = logging.getLogger("django_redislock")

Listener = Callable[[str, dict[str, Any]], None]
listeners: list[Listener] = []

LEVELS = {
    "acquired": logging.DEBUG,
    "waited": logging.DEBUG,
    "released": logging.DEBUG,
    "conflict": logging.INFO,
    "skipped": logging.INFO,
    "rescheduled": logging.INFO,
    "not_renewed": logging.WARNING,
    "recalled": logging.WARNING,
    "force_released": logging.WARNING,
    "backend_error": logging.WARNING,
    "lost": logging.ERROR,
}


def emit(event: str, message: str, *args: object, level: int | None = None, **data: Any) -> None:
    """Log one event of a lock and call the listeners, which must not raise; `data` contains the lock's `name`."""
    level = LEVELS[event] if level is None else level
    if log.isEnabledFor(level):
        log.log(level, message, *args)
    for listener in listeners:
        listener(event, data)


Observer = Callable[[str, Any], AbstractContextManager[object]]
observers: list[Observer] = []
"""Each returns what a step happens in, such as a span. The steps, and what they are about: a "command" of a driver (the
place of its server, and the call), a method of the cache or a "refresh" by Celery (the key or keys), and "compute"."""


def step(name: str, about: object = None) -> AbstractContextManager[object]:
    """Return what the observers put around a step."""
    stack = ExitStack()
    for observer in observers:
        stack.enter_context(observer(name, about))
    return stack
