"""Threads of one process that want the same value share one flight to it: one goes, the others wait for it here."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any

from ..core.flight import fly
from ..core.wanted import MISSING, Landing, Wanted, outer
from ..exceptions import AcquireTimeout, LockBackendError


class Flight:
    """One flight, and where those who wait for it learn how it ended."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.followers = 0
        self.outcome = Landing()
        self.landed: Future[Landing] = Future()


_flights: dict[Hashable, Flight] = {}
_mutex = threading.Lock()


def value_of(want: Wanted, wait: float | None, compute_after_wait: bool) -> Any:
    """Return the value: computed by one of all the threads and processes that want it now.

    Waits for another one's for `wait` seconds; then computes it here, once for all threads of this process whose time is
    over, or raises AcquireTimeout. Raises what `want.default` raises, and redis-py's errors.
    """
    place = (want.server, want.key)
    until = math.inf if wait is None else time.monotonic() + wait
    while True:
        landing = _share(place, until, want)
        if landing.empty:
            if not compute_after_wait:
                raise AcquireTimeout(want.name, wait)
            landing = _share((*place, "alone"), until + (wait or 0), want, last=True)
            if landing.empty:
                landing = _lead(want, until, last=True)
        if landing.error is not None:
            try:
                raise landing.error.with_traceback(landing.trace)
            finally:
                del landing  # or the error's traceback would hold the error
        value = landing.value
        if value is MISSING and landing.data is not None:
            value = want.unpack(landing.data)
        if value is not MISSING:
            return value


def _share(place: Hashable, until: float, want: Wanted, last: bool = False) -> Landing:
    """Lead the flight to this place or wait for who does; an empty landing when the time is over."""
    if outer(want.server):
        # Who computes another value meanwhile goes by itself, so that Redis sees who waits for whom, and no circle of them.
        return _lead(want, until, last)
    while True:
        flight = Flight()
        try:
            with _mutex:
                found = _flights.setdefault(place, flight)
                found.followers += found is not flight
            if found is flight:
                landing = _lead(want, until, last)
                if _shareable(landing):
                    flight.outcome = landing._replace(value=MISSING)  # each makes its own copy
                return landing
        finally:
            _close(place, flight)
        try:
            landing = found.landed.result(None if until == math.inf else max(0.0, until - time.monotonic()))
        except TimeoutError:
            _close(place, found, wake=False)  # should its leader never come back, it is not waited for again
            return Landing()
        if landing.shared:
            return landing


def _close(place: Hashable, flight: Flight, wake: bool = True) -> None:
    with _mutex:
        if _flights.get(place) is flight:
            del _flights[place]
    if wake and flight.pid == os.getpid():
        flight.landed.set_result(flight.outcome)


def _lead(want: Wanted, until: float, last: bool) -> Landing:
    server = want.server
    try:
        return server.run(fly(want, threading.current_thread(), until, server.room.open, last))
    except LockBackendError as error:
        cause = error.__cause__ or error  # as the backend without locks would raise it
        return Landing(error=cause, trace=cause.__traceback__, shared=True)


def _shareable(landing: Landing) -> bool:
    """Whether the landing concerns all: not if its leader alone was interrupted (Celery's soft time limit is an Exception)."""
    error = landing.error
    return landing.shared and (
        error is None
        or (
            isinstance(error, Exception)
            and all(kind.__name__ != "SoftTimeLimitExceeded" for kind in type(error).__mro__)
        )
    )


def _after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()
    _flights.clear()  # led by threads of the parent


os.register_at_fork(after_in_child=_after_fork)
