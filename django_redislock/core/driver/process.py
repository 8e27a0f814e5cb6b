"""The id and the host of this process. They are kept, because system calls are slow beside a lock's work."""

from __future__ import annotations

import os
import socket

from .fork import after_in_child

HOST = socket.gethostname()
pid = os.getpid()


def _after_fork() -> None:
    global pid
    pid = os.getpid()


after_in_child("process id", _after_fork)
