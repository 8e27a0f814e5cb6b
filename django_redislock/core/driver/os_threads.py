"""A slot in place of a lock, and real threads: no signal handler, destructor or greenlet can block them.

A signal handler or a destructor may run at any point of any function, in the thread that it interrupts, which
continues only when the handler has returned. A lock that this thread holds would never be released; a handler that
waits for another thread may even block that thread. The operations of a slot are single operations of a dict instead,
atomic with and without the GIL.

Where gevent or eventlet makes greenlets of Python's threads, a greenlet starves behind another one that computes. So
the watchdog must be a real thread, woken by a real lock.

A program may have them patch sockets and leave threads as they are (``patch_all(thread=False)``, ``patch_socket()``).
For Python all greenlets of a thread are one thread then: six of six requests were inside a re-entrant lock. So who runs
(`greenlet`, `ident`, `event`) and which sockets are used (`green_sockets`) are two questions.
"""

from __future__ import annotations

import _thread
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from ..clock import monotonic

T = TypeVar("T")

_running: dict[object, tuple[int, str]] = {}
"""The process and the name of each thread: a forked child has none of its parent's threads."""


def _original(name: str) -> Any:
    """Return the function of `_thread` as it was before it was patched, or None when it was not."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("_thread"):
        return gevent.get_original("_thread", name)
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return getattr(eventlet.original("_thread"), name)
    return None


def green_sockets() -> bool:
    """Whether gevent or eventlet has patched sockets: only the thread of the system that made one can use it then."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    return bool(
        (gevent is not None and gevent.is_module_patched("socket"))
        or (eventlet is not None and eventlet.is_monkey_patched("socket"))
    )


def hub() -> Any:
    """Return gevent or eventlet if it runs greenlets in this thread that Python does not take for threads, else None.

    Greenlets without a hub, as those of SQLAlchemy, are parts of their thread.
    """
    if "greenlet" not in sys.modules or greenlets():
        return None
    find = getattr(sys.modules.get("gevent._hub_local"), "get_hub_if_exists", None)
    if find is not None and find() is not None:
        return importlib.import_module("gevent")
    if hasattr(getattr(sys.modules.get("eventlet.hubs"), "_threadlocal", None), "hub"):
        return importlib.import_module("eventlet")
    return None


def greenlet() -> Any:
    """Return the greenlet that runs, if Python does not take it for a thread; None outside of one.

    Raises RuntimeError where its sockets are not patched: while it waited, no other one would run, and not the holder.
    """
    modules = sys.modules
    if "gevent._hub_local" not in modules and "eventlet.hubs" not in modules:  # Celery imports `greenlet` in any case
        return None
    current = modules["greenlet"].getcurrent()
    library = None if current.parent is None else hub()
    if library is None:
        return None
    if not green_sockets():
        patch = "gevent.monkey.patch_all()" if library.__name__ == "gevent" else "eventlet.monkey_patch()"
        raise RuntimeError(
            f"a greenlet of {library.__name__} uses a lock, and its sockets are not patched: while it waits for Redis "
            f"or for the lock, no other greenlet runs, not even the holder. Call {patch} when the program starts."
        )
    return current


def ident() -> int:
    """Return a number for the thread that runs, or for the greenlet."""
    current = greenlet()
    return threading.get_ident() if current is None else id(current)


def system_ident() -> int:
    """Return the number of the thread of the operating system."""
    return int((_original("get_ident") or _thread.get_ident)())


def event() -> OsEvent:
    """Return an event for which the calling thread may wait, or greenlet: then others run meanwhile."""
    library = hub()
    if library is None:
        return OsEvent(threading.Lock())
    if library.__name__ == "eventlet":
        return OsEvent(_EventletLock())
    return OsEvent(importlib.import_module("gevent.thread").allocate_lock())


def sleep(seconds: float) -> None:
    """Sleep, and let the other greenlets of the thread run."""
    (hub() or time).sleep(seconds)


def start(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread of the operating system."""
    token = object()
    try:
        _running[token] = os.getpid(), name
        start_new_thread = _original("start_new_thread")
        if start_new_thread is None:
            _start_thread(partial(_run, run, token), name, daemon=True)
        else:
            start_new_thread(_run, (run, token))
    except BaseException:
        _running.pop(token, None)
        raise


def start_raw(run: Callable[[], None], name: str) -> None:
    """Start a thread of the operating system that `threading` does not know.

    A signal handler or a destructor may call this: `threading` takes locks that its own thread may hold.
    """
    token = object()
    try:
        _running[token] = os.getpid(), name
        (_original("start_new_thread") or _thread.start_new_thread)(_run, (run, token))
    except BaseException:
        _running.pop(token, None)
        raise


def running(name: str) -> int:
    """Return how many threads with this name `start` has started in this process that have not ended."""
    return list(_running.values()).count((os.getpid(), name))


def start_here(run: Callable[[], None], name: str, daemon: bool = True) -> None:
    """Start a thread of Python that works with connections: a greenlet where gevent or eventlet patches sockets."""
    library = hub() if green_sockets() else None
    if library is None:
        _start_thread(run, name, daemon)
    else:
        library.spawn(run)


def _start_thread(run: Callable[[], None], name: str, daemon: bool) -> None:
    try:
        threading.Thread(target=run, name=name, daemon=daemon).start()
    except KeyError as error:
        # A signal handler raised while the thread started, and `threading` failed to clean up. The first error counts.
        raise error.__context__ or error from None


def _run(run: Callable[[], None], token: object) -> None:
    try:
        run()
    finally:
        try:
            _end_hub()
        finally:
            _running.pop(token, None)


def _end_hub() -> None:
    """End gevent's loop in this thread, if there is one: otherwise the loop's files and threads remain."""
    find = getattr(sys.modules.get("gevent._hub_local"), "get_hub_if_exists", None)
    hub = find() if find is not None else None
    if hub is not None:
        hub.destroy(destroy_loop=True)


def greenlets() -> bool:
    """Whether Python's threads are greenlets."""
    return _original("start_new_thread") is not None


LOOK = 0.05
"""Seconds between two looks of a greenlet of eventlet for what another thread of the system has to tell it."""


class _EventletLock:
    """A lock for greenlets of eventlet that another thread of the system may release, too.

    Released by that thread, eventlet's own lock switches to a greenlet of this one there, which fails.
    """

    __slots__ = ("_by_others", "_green", "_thread")

    def __init__(self) -> None:
        self._thread = system_ident()
        self._green = importlib.import_module("eventlet.green.thread").allocate_lock()
        self._by_others = (_original("allocate_lock") or _thread.allocate_lock)()
        """Released by other threads; looked at each `LOOK` seconds."""
        self._by_others.acquire()

    def acquire(self, blocking: bool = True, seconds: float = 0.0) -> bool:
        until = monotonic() + seconds
        while not self._by_others.acquire(False):
            left = until - monotonic() if blocking else 0.0
            if self._green.acquire(True, min(LOOK, left)) if left > 0 else self._green.acquire(False):
                return True
            if left <= 0:
                return False
        return True

    def release(self) -> None:
        (self._green if system_ident() == self._thread else self._by_others).release()


class OsEvent:
    """An event for one waiting thread of the operating system; with a lock of `event`'s, for one greenlet.

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


class Slot(Generic[T]):
    """Holds no value, or one: the first that is put there."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[None, T] = {}

    def put_if_empty(self, value: T) -> T:
        """Put the value into the slot if it is empty, and return the value that is there then."""
        return self._values.setdefault(None, value)

    @property
    def value(self) -> T | None:
        """The value in the slot, None when it is empty."""
        return self._values.get(None)

    def remove(self, value: T) -> None:
        """Empty the slot if it holds this value. No value replaces another one, so no other value is removed."""
        if self._values.get(None) is value:
            self._values.pop(None, None)
