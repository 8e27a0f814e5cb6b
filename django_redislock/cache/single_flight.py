"""Threads and tasks of one process that want the same value share one flight to it: one goes, the others wait for it here.

Written once, as the protocol is: without I/O, for the drivers of threads and of asyncio.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple

from asgiref.sync import SyncToAsync

from ..core.clock import monotonic
from ..core.driver.effects import Operation, WaitForFuture
from ..core.driver.fork import after_in_child
from ..core.events import log
from ..exceptions import AcquireTimeout, LockBackendError
from .lease.obtain import fly, fly_together
from .lease.request import MISSING, Outcome, Owner, ValueRequest, is_below, is_interruption, outer

SPREAD = 0.1
"""Those who are to compute when their wait is over wait longer by up to this share, so that not all do so at once."""


class Caller(NamedTuple):
    """Who wants a value: a thread or a task, and where it hears of wake-ups."""

    owner: Owner
    room: Any

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of a task."""
        return self.owner.get_loop() if isinstance(self.owner, asyncio.Task) else None


class Flight:
    """One flight, and where those who wait for it learn how it ended."""

    def __init__(self, caller: Caller | None = None) -> None:
        self.pid = os.getpid()
        self.loop = None if caller is None else caller.loop
        self.thread = threading.get_ident()
        self.waiting: list[None] = []
        self.outcome = Outcome()
        self.landed: Future[Outcome] = Future()

    @property
    def followers(self) -> int:
        """How many have come to wait for it."""
        return len(self.waiting)

    def blocked_by(self, caller: Caller) -> bool:
        """Whether the caller keeps the flight from going on: a thread that runs its event loop, or the loop's `sync_to_async`, or a
        signal handler or a destructor that interrupted its thread."""
        if caller.loop is not None:
            return False
        if self.loop is None:
            return self.thread == threading.get_ident()
        return self.loop in (_running_loop(), getattr(SyncToAsync.threadlocal, "main_event_loop", None))


MOMENT = 1.0
"""Seconds for which a process that knows of a refresh elsewhere does not ask again."""
MANY = 1000
"""Old values that are left alone, from which on those are forgotten that need not be any more."""

# Each change is a single operation of a dict, so there is no lock that a signal handler could find taken by its own thread.
_flights: dict[Hashable, Flight] = {}
_quiet: dict[Hashable, float] = {}
"""Until when."""


def value_of(want: ValueRequest, caller: Caller, wait: float | None, on_timeout: Any) -> Operation[Outcome]:
    """Return the value, or what `want.default` raised: by one of all the threads, tasks and processes that want it now.

    Waits for another one's for `wait` seconds. Then `on_timeout` decides: "compute" it here, once for all of this process
    whose time is over; "raise" AcquireTimeout; another value is returned, or what it returns when called.
    """
    place = (want.server, want.key)
    compute = on_timeout in ("compute", "stale")  # "stale": with an old value one does not come here
    if wait is not None and compute:
        wait *= random.uniform(1, 1 + SPREAD)  # noqa: S311
    until = math.inf if wait is None else monotonic() + wait
    while True:
        landing = yield from _share(place, until, want, caller)
        if landing.empty:
            if on_timeout == "raise":
                raise AcquireTimeout(want.name, wait)
            if not compute:
                return Outcome(value=on_timeout() if callable(on_timeout) else on_timeout)
            # Who leads this one does not wait any more; those who follow would compute all at once.
            ends = math.inf if want.max_hold is None else monotonic() + want.max_hold
            landing = yield from _share((*place, "alone"), ends, want, caller, last=True)
            if landing.empty:
                landing = yield from _lead(want, caller, until, last=True)
        landing = _own_copy(landing, want)
        if landing.error is not None or landing.value is not MISSING or landing.absent:
            return landing


def renewed(
    want: ValueRequest, caller: Caller, old: bytes, value: Any, wait: float, on_error: str
) -> Operation[Outcome]:
    """Return a new value in place of an old one, or the old one where somebody else makes a new one.

    Waits `wait` seconds for that; 0: not at all. With `on_error` "stale" the old one is also returned in place of an error.
    """
    landing = Outcome()
    if wait or not is_quiet(want):
        landing = yield from refresh(want, caller, old, monotonic() + wait if wait else -math.inf)
        landing = _own_copy(landing, want)
    if landing.error is None and landing.value is not MISSING:
        return landing
    if landing.error is not None:
        if on_error != "stale" or is_interruption(landing.error):
            return landing
        log.error(
            "The value of %r could not be computed anew; the old one is returned.", want.key, exc_info=landing.error
        )
    want.tally.count("stale_served")
    return Outcome(value=value)


def refresh(want: ValueRequest, caller: Caller, old: bytes, until: float) -> Operation[Outcome]:
    """Replace an old value, or wait for who does."""
    landing = yield from _share((want.server, want.key), until, want, caller, old=old)
    if landing.empty or landing.error is not None:
        hush(want)
    return landing


def hush(want: ValueRequest) -> None:
    """Note that somebody replaces the old value, or failed to: this process leaves it alone for a moment."""
    now = monotonic()
    if len(_quiet) >= MANY:
        for place, until in list(_quiet.items()):
            if until <= now:
                _quiet.pop(place, None)
    _quiet[(want.server.place, want.key)] = now + MOMENT


def is_quiet(want: ValueRequest) -> bool:
    """Whether the old value is to be left alone now."""
    return monotonic() < _quiet.get((want.server.place, want.key), -math.inf)


def values_of(
    wants: list[ValueRequest], default: Callable[[list[Any]], Any], caller: Caller, wait: float | None, on_timeout: Any
) -> Operation[dict[str, Outcome]]:
    """Return many values, by their keys in Redis: each computed once over all who want it now.

    The values that nobody computes yet are computed together by one call of `default`. Only then the caller waits for
    the others, so that no caller waits while another one waits for it. The values that are missing when the time is
    over are computed together, too. A key without a value from `default` is left out.
    """
    compute = on_timeout in ("compute", "stale")
    until = math.inf if wait is None else monotonic() + wait
    landings = yield from _share_many(wants, default, caller, until)
    failed = [landing for landing in landings.values() if landing.error is not None]
    if failed:
        return {wants[0].key: failed[0]}
    for number, want in enumerate(wants):
        if compute and want.key not in landings and monotonic() >= until:
            late = [other for other in wants[number:] if other.key not in landings]
            landings.update((yield from _share_many(late, default, caller, -math.inf, last=True)))
        landing = _own_copy(landings.pop(want.key, Outcome()), want)
        if landing.value is MISSING and not landing.absent:
            left = None if until == math.inf else max(0.0, until - monotonic())
            landing = yield from value_of(want, caller, left, on_timeout)
        if not landing.absent:
            landings[want.key] = landing
        if landing.error is not None:
            break
    return landings


def _share_many(
    wants: list[ValueRequest], default: Callable[[list[Any]], Any], caller: Caller, until: float, last: bool = False
) -> Operation[dict[str, Outcome]]:
    """Lead the flights that nobody leads; return the landings in time. `last`: the caller does not wait any more."""
    alone = ("alone",) if last else ()
    flights: dict[str, Flight] = {}
    ended: dict[str, Outcome] = {}
    nested = bool(outer(wants[0].server))

    def land(want: ValueRequest, landing: Outcome) -> None:
        ended[want.key] = landing
        flight = flights.pop(want.key, None)
        if flight is not None:
            if _shareable(landing):
                flight.outcome = landing._replace(value=MISSING)
            _close((want.server, want.key, *alone), flight)

    try:
        if not nested:
            for want in wants:
                flight = Flight(caller)
                if _flights.setdefault((want.server, want.key, *alone), flight) is flight:
                    flights[want.key] = flight
        mine = [want for want in wants if nested or want.key in flights]
        # A caller that computes another value meanwhile waits for one value after another, because Redis sees only such
        # circles.
        try:
            if mine:
                yield from fly_together(mine, caller.owner, default, -math.inf if nested else until, land, last)
        except LockBackendError as error:
            cause = error.__cause__ or error
            for want in mine:
                if want.key not in ended:
                    land(want, Outcome(error=cause, trace=cause.__traceback__, shared=True))
        return ended
    finally:
        for want in wants:
            if want.key in flights:
                _close((want.server, want.key, *alone), flights[want.key])


def is_flying(want: ValueRequest) -> bool:
    """Whether somebody in this process is after the value now."""
    return (want.server, want.key) in _flights


def brought(landing: Outcome) -> Any:
    """Return the value, or raise the error: not in the generators, which no StopIteration gets out of."""
    if landing.error is None:
        return landing.value
    try:
        raise landing.error.with_traceback(landing.trace)
    finally:
        del landing  # or the error's traceback would hold the error


def _own_copy(landing: Outcome, want: ValueRequest) -> Outcome:
    if landing.value is MISSING and landing.data is not None:
        return landing._replace(value=want.unpack(landing.data))
    return landing


def _share(
    place: Hashable, until: float, want: ValueRequest, caller: Caller, last: bool = False, old: bytes | None = None
) -> Operation[Outcome]:
    """Lead the flight to this place or wait for who does; an empty landing when the time is over."""
    if is_below(want.server, want.name):
        return (yield from _lead(want, caller, until, last=True, old=old))
    if outer(want.server):
        # Who computes another value meanwhile goes by itself, so that Redis sees who waits for whom, and no circle of them.
        return (yield from _lead(want, caller, until, last, old))
    waited = False
    while True:
        flight = Flight(caller)
        try:
            found = _flights.setdefault(place, flight)
            if found is flight:
                landing = yield from _lead(want, caller, until, last, old)
                if _shareable(landing):
                    flight.outcome = landing._replace(value=MISSING)  # each makes its own copy
                return landing
        finally:
            _close(place, flight)
        if until == -math.inf:
            return Outcome()
        if found.blocked_by(caller):
            return (yield from _lead(want, caller, until, last=True, old=old))
        if not waited:
            want.tally.count("waited")
        waited, began = True, monotonic()
        found.waiting.append(None)
        followed = yield WaitForFuture(found.landed, until)
        want.tally.count("seconds_waited", monotonic() - began)
        if followed is None:
            _close(place, found, wake=False)  # should its leader never come back, it is not waited for again
            return Outcome()
        if followed.shared:
            return followed  # type: ignore[no-any-return]


def _close(place: Hashable, flight: Flight, wake: bool = True) -> None:
    if _flights.get(place) is flight:  # a follower that gives up may come in between: then two fly, and Redis decides
        _flights.pop(place, None)
    if wake and flight.pid == os.getpid():
        flight.landed.set_result(flight.outcome)


def _lead(want: ValueRequest, caller: Caller, until: float, last: bool, old: bytes | None = None) -> Operation[Outcome]:
    try:
        return (yield from fly(want, caller.owner, until, caller.room.open, last, old))
    except LockBackendError as error:
        cause = error.__cause__ or error  # as the backend without locks would raise it
        return Outcome(error=cause, trace=cause.__traceback__, shared=True)


def _shareable(landing: Outcome) -> bool:
    """Whether the landing concerns all: not if its leader alone was interrupted."""
    return landing.shared and (landing.error is None or not is_interruption(landing.error))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _after_fork() -> None:
    _flights.clear()  # led by threads of the parent


after_in_child("flights", _after_fork)
