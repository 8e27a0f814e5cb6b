"""Threads of the operating system, also where gevent or eventlet makes greenlets of Python's threads.

A greenlet starves behind another one that computes. So the watchdog must be a real thread, woken by a real lock.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from typing import Any


def _original(name: str) -> Any:
    """Return the function of `_thread` as it was before it was patched, or None when it was not."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("_thread"):
        return gevent.get_original("_thread", name)
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return getattr(eventlet.original("_thread"), name)
    return None


def start(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread of the operating system."""
    start_new_thread = _original("start_new_thread")
    if start_new_thread is None:
        start_here(run, name)
    else:
        start_new_thread(_run, (run,))


def start_here(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread of Python; where gevent or eventlet patches threads, it is a greenlet."""
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except KeyError as error:
        # A signal handler raised while the thread started, and `threading` failed to clean up. The first error counts.
        raise error.__context__ or error from None


def _run(run: Callable[[], None]) -> None:
    try:
        run()
    finally:
        _end_hub()


def _end_hub() -> None:
    """End gevent's loop in this thread, if there is one: otherwise the loop's files and threads remain."""
    find = getattr(sys.modules.get("gevent._hub_local"), "get_hub_if_exists", None)
    hub = find() if find is not None else None
    if hub is not None:
        hub.destroy(destroy_loop=True)


def greenlets() -> bool:
    """Whether Python's threads are greenlets: only the thread that made a socket can use it then."""
    return _original("start_new_thread") is not None


class OsEvent:
    """An event for one waiting thread; with a lock of `threading`'s, for one greenlet.

    Unlike `threading.Event`, a successful `wait` also clears it.
    """

    __slots__ = ("_lock",)

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or (_original("allocate_lock") or _thread.allocate_lock)()
        self._lock.acquire()

    def set(self) -> None:
        """End the wait, or the next one if no thread waits now."""
        try:  # noqa: SIM105 (a context manager takes longer, and every wake-up pays for it)
            self._lock.release()
        except RuntimeError:  # it is set already
            pass

    def wait(self, seconds: float) -> bool:
        """Wait until the event is set, for so many seconds at most, and clear it; return whether it was set."""
        return bool(self._lock.acquire(True, min(seconds, threading.TIMEOUT_MAX)))

    def clear(self) -> bool:
        """Clear the event, and return whether it was set."""
        return bool(self._lock.acquire(False))
