"""The number of this process, kept, because asking the system for it takes longer than most of what a lock does here."""

from __future__ import annotations

import os

from .fork import after_in_child

pid = os.getpid()


def _after_fork() -> None:
    global pid
    pid = os.getpid()


after_in_child(_after_fork)
