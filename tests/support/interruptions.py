"""Signals whose handlers raise, at whatever point."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """As Ctrl+C raises."""


class TimeLimit(Exception):
    """As a soft time limit raises."""


@contextmanager
def interruptions(error: type[BaseException]) -> Iterator[Callable[[float], None]]:
    """Yield what has the main thread interrupted after so many seconds; after 0 it is not.

    What destructors were interrupted in, or left open, is collected before the end: warnings of it belong to this test.
    """

    def interrupt(*args: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.collect()
        _release_handlers()


def _release_handlers() -> None:
    """Release the locks of logging and its handlers that this thread was interrupted with.

    Before Python 3.13, logging acquires them before its `try`. Every other thread that logged hung from then on.
    """
    handlers = filter(None, (reference() for reference in logging._handlerList))
    for lock in filter(None, (logging._lock, *(handler.lock for handler in handlers))):
        while lock._is_owned():
            lock.release()
