"""The id and the host of this process. They are kept, because asking the system is slow compared with a lock's other work."""

from __future__ import annotations

import os
import socket

from .fork import after_in_child

HOST = socket.gethostname()
pid = os.getpid()


def _after_fork() -> None:
    global pid
    pid = os.getpid()


after_in_child(_after_fork)
