"""The id of this process. It is kept, because asking the system for it is slow compared with a lock's other work."""

from __future__ import annotations

import os

from .fork import after_in_child

pid = os.getpid()


def _after_fork() -> None:
    global pid
    pid = os.getpid()


after_in_child(_after_fork)
