"""Closes connections that were not used for a minute.

A thread of its own does it, which exists only while there is something to close. It is not the watchdog's, because
that one is a thread of the operating system also under gevent, where sockets belong to the greenlets of another
thread.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from weakref import ref

from .. import events
from ..clock import monotonic
from . import os_threads
from .process import after_in_child

IDLE = 60.0
"""Seconds after which an unused connection is closed."""
SOONEST = 0.05
"""The shortest time between two rounds, in seconds."""


class Housekeeper:
    """Closes idle connections, in a thread that ends when all remaining connections may stay open."""

    def __init__(self) -> None:
        self._watched: set[ref[Any]] = set()
        self._running: object = None
        """Token of the running thread; a thread that holds another token ends."""

    def watch(self, server: Any) -> None:
        """Close the server's connections in time, until all remaining ones may stay open."""
        try:
            server.watched = True  # first: once it is in the set, the thread decides
            self._watched.add(ref(server))
            if self._running is None:
                self._start()
        except BaseException as error:
            server.watched = False
            if not isinstance(error, RuntimeError):  # no further thread can start: the next use tries again
                raise

    def _start(self) -> None:
        token = object()
        try:
            self._running = token
            os_threads.start_here(partial(self._run, token), "redislock-idle")
        except BaseException:  # a signal, perhaps after the thread started: then it ends at once
            self._running = None
            raise

    def _run(self, token: object) -> None:
        pause = IDLE
        while self._running is token:
            os_threads.sleep(pause)
            pause = self._close()
            if pause == math.inf:
                self._running = None
                if not self._watched:
                    return
                self._running, pause = token, SOONEST  # a server came meanwhile; a thread that it started ends

    def _close(self) -> float:
        """Close idle connections, and return how long to sleep then."""
        now, oldest = monotonic(), math.inf
        for found in list(self._watched):
            self._watched.discard(found)
            server = found()
            if server is None:
                continue
            server.watched = False  # first, so that connections used from now on are watched again
            try:
                since = server.close_idle(now - IDLE)
            except Exception:  # the connections of the other servers must still be closed
                events.log.exception("Idle connections could not be closed. It is tried again after their next use.")
                continue
            if since < math.inf:
                self._watched.add(found)
                server.watched = True
                oldest = min(oldest, since)
        return max(SOONEST, oldest + IDLE - now)


housekeeper = Housekeeper()


def _after_fork() -> None:
    housekeeper.__init__()  # type: ignore[misc]  # its thread stayed with the parent


after_in_child("housekeeper", _after_fork)
