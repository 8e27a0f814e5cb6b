"""Events of locks: each is logged once, and passed to listeners (Django's signals are one)."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
