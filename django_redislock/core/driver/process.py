"""This process: its id and its host, and the resets in a forked child, in one list, because their order matters."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack

ORDER = (
    "process id",  # the names of new channels and records contain it
    "housekeeper",  # before the connections: a connection that is used from then on is watched again
    "quorum loop",
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
    """Call the function in every forked child, at the place of `name` in `ORDER`.

    Does nothing where there is no fork, as on Windows.
    """
    if name not in ORDER:
        raise ValueError(f"{name!r} is not in the order of the resets")
    _resets[name] = reset


def _reset_all() -> None:
    with ExitStack() as stack:  # it calls the last one first, and goes on after an error
        for name in reversed(ORDER):
            if name in _resets:
                stack.callback(_resets[name])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)


HOST = socket.gethostname()
pid = os.getpid()
"""Both are kept, because system calls are slow beside a lock's work."""


def _after_fork() -> None:
    global pid
    pid = os.getpid()


after_in_child("process id", _after_fork)
