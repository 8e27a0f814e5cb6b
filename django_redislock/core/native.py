"""Threads of the operating system, also where gevent or eventlet made greenlets of Python's threads.

A greenlet starves behind one that computes, so the watchdog must be a real thread, and must be woken through a real lock.
"""

from __future__ import annotations

import _thread
import math
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any


def _original() -> Any:
    """Return the `_thread` module as it was before it was patched, or None when it was not."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("_thread"):
        return gevent.saved["_thread"]
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return vars(eventlet.original("_thread"))
    return None


def start(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread."""
    original = _original()
    if original is None:
        threading.Thread(target=run, name=name, daemon=True).start()
    else:
        original["start_new_thread"](run, ())


def together(functions: list[Callable[[], None]]) -> None:
    """Call all the functions at the same time, and return when all have returned."""
    if not functions:
        return

    def call(function: Callable[[], None], returned: Alarm) -> None:
        try:
            function()
        finally:
            returned.ring()

    mine, *others = functions
    running = []
    for other in others:
        returned = Alarm()
        try:
            start(partial(call, other, returned), "redislock-renewal")
        except RuntimeError:  # no further thread is to be had
            other()
        else:
            running.append(returned)
    mine()
    for returned in running:
        returned.sleep(math.inf)


class Alarm:
    """Lets one thread sleep until a time, or until another thread rings."""

    def __init__(self) -> None:
        original = _original() or vars(_thread)
        self._lock = original["allocate_lock"]()
        self._lock.acquire()

    def ring(self) -> None:
        """End the sleep, or the next one if nobody sleeps now."""
        with suppress(RuntimeError):  # it has been rung already
            self._lock.release()

    def sleep(self, seconds: float) -> None:
        """Sleep for so long, or until it rings."""
        self._lock.acquire(True, min(seconds, threading.TIMEOUT_MAX))
