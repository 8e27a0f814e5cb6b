"""Gives connections back that nobody has used for a minute.

A thread does it that is there only while there is something to close: not the watchdog's, because that is a thread of the
operating system also where gevent's sockets belong to the greenlets of another one.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Protocol
from weakref import ref

from .. import events
from ..clock import monotonic
from . import os_threads
from .fork import after_in_child

IDLE = 60.0
"""Seconds after which an unused connection is closed."""
SOONEST = 0.05
"""Seconds between two looks at least."""


class Idling(Protocol):
    """What may have unused connections."""

    watched: bool
    """Whether the housekeeper will look at it."""

    def close_idle(self, before: float) -> float:
        """Close what nobody has used since then; return since when nobody has used the next to be closed, or inf."""
        raise NotImplementedError


class Housekeeper:
    """Closes unused connections, in a thread that ends when all that is left may stay."""

    def __init__(self) -> None:
        self._watched: set[ref[Idling]] = set()
        self._running: object = None
        """What the running thread knows itself by."""

    def watch(self, server: Idling) -> None:
        """Close the connections of the server in time, from now until it is at rest."""
        try:
            server.watched = True  # first: once it is in the set, the thread decides
            self._watched.add(ref(server))
            if self._running is None:
                self._start()
        except BaseException as error:
            server.watched = False
            if not isinstance(error, RuntimeError):  # no further thread is to be had: the next use tries again
                raise

    def _start(self) -> None:
        mine = object()
        try:
            self._running = mine
            os_threads.start_here(partial(self._run, mine), "redislock-idle")
        except BaseException:  # a signal, perhaps after the thread started: then it ends at once
            self._running = None
            raise

    def _run(self, mine: object) -> None:
        pause = IDLE
        while self._running is mine:
            time.sleep(pause)
            pause = self._close()
            if pause == math.inf:
                self._running = None
                if not self._watched:
                    return
                self._running, pause = mine, SOONEST  # one came meanwhile, and its thread, if it started one, ends

    def _close(self) -> float:
        """Close what is idle, and return how long to sleep then."""
        now, oldest = monotonic(), math.inf
        for found in list(self._watched):
            self._watched.discard(found)
            server = found()
            if server is None:
                continue
            server.watched = False  # first: what is used from now on is to be looked at again
            try:
                since = server.close_idle(now - IDLE)
            except Exception:  # the others are to be closed all the same
                events.log.exception("Unused connections could not be closed; they are tried again when they are used.")
                continue
            if since < math.inf:
                self._watched.add(found)
                server.watched = True
                oldest = min(oldest, since)
        return max(SOONEST, oldest + IDLE - now)


housekeeper = Housekeeper()


def _after_fork() -> None:
    housekeeper.__init__()  # type: ignore[misc]  # its thread stayed with the parent


after_in_child(_after_fork)
