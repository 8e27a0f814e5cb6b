"""This process: its id and its host, and the resets in a forked child, in one list, because their order matters.

Python calls a hook in the child of its own forks only. uWSGI forks in C: its workers took each other's replies from the
one socket that they had inherited. So each entry into the package also asks for the process id, as redis-py's pool does
at each use.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

ORDER = (
    "process id",  # the names of new channels and records contain it
    "random numbers",
    "housekeeper",  # before the connections: a connection that is used from then on is watched again
    "connections",  # before the resets below, which must not use a connection of the parent
    "acquirers",
    "watchdogs",
    "cluster clients",
    "flights",
    "refreshes",
    "local server",
    "statistics",
)
"""The names of all resets, from the first to the last. Modules that were not imported have none."""

_resets: dict[str, Callable[[], object]] = {}


def after_in_child(name: str, reset: Callable[[], object]) -> None:
    """Call the function in every forked child, at the place of `name` in `ORDER`, before the child uses the package.

    Does nothing where there is no fork, as on Windows.
    """
    if name not in ORDER:
        raise ValueError(f"{name!r} is not in the order of the resets")
    _resets[name] = reset


_reset_in = os.getpid()
"""The process in which all resets have ended, or which needed none."""
_resetting: dict[int, int] = {}
"""The thread that runs the resets, by process."""


def notice_fork() -> None:
    """Run the resets if this process is the child of a fork, of any kind, in which they have not run yet.

    Each entry into the package calls it before it looks at anything that the process shares. It takes less than a
    microsecond.
    """
    if os.getpid() != _reset_in:
        _reset_once()


def _reset_once() -> None:
    """Run the resets, unless they have run in this process; another thread that runs them is waited for."""
    global _reset_in
    child, thread = os.getpid(), threading.get_ident()
    while _reset_in != child:
        # A handler of a signal that interrupts the resets runs them, too: it must not wait for its own thread.
        if _resetting.setdefault(child, thread) != thread:
            time.sleep(0.001)
            continue
        try:
            _reset_all()
            _reset_in = child
        finally:  # interrupted, the next entry runs them again
            _resetting.pop(child, None)


def _reset_all() -> None:
    with ExitStack() as stack:  # it calls the last one first, and goes on after an error
        for name in reversed(ORDER):
            if name in _resets:
                stack.callback(_resets[name])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=notice_fork)  # at once, so that a child that never asks holds nothing either


HOST = socket.gethostname()
pid = os.getpid()
"""Both are kept, because system calls are slow beside a lock's work. After `notice_fork` it is this process's."""


def _after_fork() -> None:
    global pid
    pid = os.getpid()


after_in_child("process id", _after_fork)
