"""Threads of the operating system, also where gevent or eventlet made greenlets of Python's threads.

A greenlet starves behind one that computes, so the watchdog must be a real thread, and must be woken through a real lock.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
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
    """Start a daemon thread of the operating system."""
    original = _original()
    if original is None:
        start_here(run, name)
    else:
        original["start_new_thread"](_run, (run,))


def start_here(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread of Python; where gevent or eventlet patches threads, it is a greenlet."""
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except (
        KeyError
    ) as error:  # `threading` fails so when a signal handler raises at the thread's start; that error counts
        raise error.__context__ or error from None


def _run(run: Callable[[], None]) -> None:
    try:
        run()
    finally:
        _end_hub()


def _end_hub() -> None:
    """Have gevent end its loop in this thread, if it has one: else the loop's files and threads stay behind."""
    find = getattr(sys.modules.get("gevent._hub_local"), "get_hub_if_exists", None)
    hub = find() if find is not None else None
    if hub is not None:
        hub.destroy(destroy_loop=True)


def greenlets() -> bool:
    """Tell whether Python's threads are greenlets: their sockets are of use in the thread that made them only."""
    return _original() is not None


class OsEvent:
    """Lets one thread sleep until a time, or until another thread rings; with a lock of `threading`'s, one greenlet."""

    __slots__ = ("_lock",)

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or (_original() or vars(_thread))["allocate_lock"]()
        self._lock.acquire()

    def ring(self) -> None:
        """End the sleep, or the next one if nobody sleeps now."""
        try:  # noqa: SIM105 (a context manager takes longer, and everybody who is woken pays for it)
            self._lock.release()
        except RuntimeError:  # it has been rung already
            pass

    def sleep(self, seconds: float) -> bool:
        """Sleep for so long, or until it rings, and tell whether it rang."""
        return bool(self._lock.acquire(True, min(seconds, threading.TIMEOUT_MAX)))

    def silence(self) -> bool:
        """Forget that it was rung, and tell whether it was."""
        return bool(self._lock.acquire(False))
