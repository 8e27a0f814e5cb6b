"""One value within a process: its callers share one flight. The leader obtains the value, the followers wait.

The algorithm does no I/O, so the drivers of threads and of asyncio share it.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Hashable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from asgiref.sync import SyncToAsync

from ...core import chance, events
from ...core.clock import monotonic
from ...core.driver import os_threads, process
from ...core.driver.effects import Operation, WaitForFuture
from ...core.driver.process import after_in_child
from ...core.driver.server import Server
from ...exceptions import AcquireTimeout, LockBackendError, is_interruption
from .obtain import obtain
from .request import MISSING, Caller, Mode, Outcome, ValueRequest, enclosing_leases, redis_error

SPREAD = 0.1
"""The share by which the wait of a computing caller is lengthened at random, so that not all compute at once."""


class Flight:
    """The calls of this process for one value: its leader, and the future of its outcome for the followers."""

    def __init__(self, caller: Caller | None = None) -> None:
        self.pid = process.pid
        self.began = monotonic()
        self.loop = None if caller is None else caller.loop
        self.thread = os_threads.ident()
        self.serves = _served_loop()
        """The loop that waits for this thread of its `sync_to_async`; `async_to_sync` needs it here."""
        self.followers: list[None] = []
        """One entry for each caller that has begun to wait for it."""
        self.outcome = Outcome()
        self.leaders_end: weakref.ref[Any] | None = None
        self._ended = False

    def ends_with(self, call: object, key: tuple[Any, ...]) -> None:
        """Close the flight when its leader's call is gone: a signal handler may interrupt the leader in its `close`,
        and then the followers would wait for ever."""
        self.leaders_end = weakref.ref(call, lambda _: close(key, self))

    @property
    def done(self) -> Future[Outcome]:
        """The future of its outcome; made for the first follower, because most flights have none."""
        # Without a lock, see below: the leader ends the flight and then looks for a future, a follower does the
        # opposite, so one of them sees the other.
        future: Future[Outcome] = vars(self).setdefault("made", Future())
        if self._ended:
            self._give_outcome(future)
        return future

    def end(self) -> None:
        """Give its outcome to the followers."""
        self._ended = True
        future = vars(self).get("made")
        if future is not None:
            self._give_outcome(future)

    def _give_outcome(self, future: Future[Outcome]) -> None:
        with suppress(InvalidStateError):  # the other one was faster
            future.set_result(self.outcome)

    def blocked_by(self, caller: Caller) -> bool:
        """Whether the flight cannot go on while the caller waits.

        The caller may be the thread of the leader's event loop, the thread of that loop's `sync_to_async`, the thread
        of the loop whose `sync_to_async` the leader serves, or a signal handler or a destructor in the leader's thread.
        """
        if caller.loop is not None:
            return False
        running = _running_loop()
        if self.loop is None:
            return self.thread == os_threads.ident() or (running is not None and running is self.serves)
        return self.loop in (running, _served_loop())


def _served_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop whose `sync_to_async` this thread serves. The names are private: another asgiref may have none,
    and then a wait of the thread for its own loop is not seen."""
    return getattr(getattr(SyncToAsync, "threadlocal", None), "main_event_loop", None)


REFRESH_PAUSE = 1.0
"""Seconds for which this process does not refresh a stale value that another process refreshes."""
MAX_PAUSED = 1000
"""Number of pauses at which the ended ones are deleted."""

# Each change is one operation of a dict, without a lock that a signal handler could find taken by its own thread.
_flights: dict[tuple[Any, ...], Flight] = {}
_paused: dict[Hashable, float] = {}
"""The end of each pause, on the monotonic clock."""


def get_value(
    request: ValueRequest, caller: Caller, wait: float | None, on_timeout: Any, *, may_be_absent: bool = False
) -> Operation[Outcome]:
    """Return the value, or the error of its computation: one of all callers in all processes computes it.

    Waits `wait` seconds for another caller's value. Then `on_timeout` decides: "compute" it here, once for all callers
    of this process whose wait is over; "raise" AcquireTimeout; any other value is returned, a function is called and
    its value returned. `may_be_absent`: that a function for many keys has no value for this one is an answer.
    """
    key = (request.server, request.key)
    compute = on_timeout in ("compute", "stale")  # "stale": there is no stale value here
    if wait is not None and compute:
        wait *= chance.uniform(1, 1 + SPREAD)
    until = math.inf if wait is None else monotonic() + wait
    while True:
        outcome = yield from _lead_or_follow(key, request, caller, Mode(until))
        if outcome.empty:
            if on_timeout == "raise":
                raise AcquireTimeout(request.name, wait)
            if not compute:
                return Outcome(value=on_timeout() if callable(on_timeout) else on_timeout)
            if not enclosing_leases():  # else it computes, and a leader that it follows may wait for that value
                # The leader of this second flight does not wait for other processes.
                ends = math.inf if request.renewal.max_hold is None else monotonic() + request.renewal.max_hold
                outcome = yield from _lead_or_follow((*key, "alone"), request, caller, Mode(ends, alone=True))
            if outcome.empty:
                outcome = yield from _lead(request, caller, Mode(until, alone=True))
        outcome = yield from own_copy(outcome, request)
        if outcome.error is not None or outcome.value is not MISSING or (outcome.absent and may_be_absent):
            return outcome


def refresh_or_stale(request: ValueRequest, caller: Caller, old: bytes, value: Any, wait: float) -> Operation[Outcome]:
    """Return a new value in place of a stale one, the error of its computation, or the stale one if another caller
    refreshes it.

    Waits `wait` seconds for the other caller; 0: not at all.
    """
    outcome = Outcome()
    if wait or not is_refresh_paused(request):
        outcome = yield from refresh(request, caller, old, monotonic() + wait if wait else -math.inf)
        outcome = yield from own_copy(outcome, request)
    if outcome.error is not None or outcome.value is not MISSING:
        return outcome
    request.counters.count("stale_served")
    return Outcome(value=value)


def stale_instead(request: ValueRequest, error: BaseException, value: Any) -> Outcome:
    """Log the error of a refresh, and return the outcome with the stale value in its place."""
    events.log.error("The refresh of the value of %r failed; the stale value is returned.", request.key, exc_info=error)
    request.counters.count("stale_served")
    return Outcome(value=value)


def refresh(request: ValueRequest, caller: Caller, old: bytes, until: float) -> Operation[Outcome]:
    """Replace a stale value, or wait for the caller that does."""
    outcome = yield from _lead_or_follow((request.server, request.key), request, caller, Mode(until, old=old))
    if outcome.empty or outcome.error is not None:
        pause_refresh(request)
    return outcome


def pause_refresh(request: ValueRequest) -> None:
    """Do not refresh the stale value for a moment, because another process does, or because a refresh failed."""
    now = monotonic()
    if len(_paused) >= MAX_PAUSED:
        for key, until in _paused.copy().items():
            if until <= now:
                _paused.pop(key, None)
    _paused[(request.server.place, request.key)] = now + REFRESH_PAUSE


def is_refresh_paused(request: ValueRequest) -> bool:
    """Whether this process does not refresh the stale value now."""
    return monotonic() < _paused.get((request.server.place, request.key), -math.inf)


def is_in_flight(request: ValueRequest) -> bool:
    """Whether a caller of this process obtains the value now."""
    return (request.server, request.key) in _flights


def result_of(outcome: Outcome) -> Any:
    """Return the value or raise the error.

    It is called outside the generators, because a StopIteration inside one becomes a RuntimeError (PEP 479).
    """
    if outcome.error is None:
        return outcome.value
    try:
        raise outcome.error.with_traceback(outcome.trace)
    finally:
        del outcome  # otherwise the error's traceback would refer to the error


def own_copy(outcome: Outcome, request: ValueRequest) -> Operation[Outcome]:
    """Return the outcome with a value that this caller shares with no other caller."""
    if outcome.value is MISSING and outcome.data is not None:
        return outcome._replace(value=(yield from request.decode(outcome.data)))
    return outcome


def register(key: tuple[Any, ...], flight: Flight) -> bool:
    """Register the flight, and return True; False if another one has the key."""
    return _flights.setdefault(key, flight) is flight


def close(key: tuple[Any, ...], flight: Flight, wake: bool = True) -> None:
    """Remove the flight, and wake its followers."""
    # A follower may remove it in between: then there are two leaders, and Redis decides.
    if _flights.get(key) is flight:
        _flights.pop(key, None)
    if wake:
        if flight.pid == process.pid:
            flight.end()
        flight.leaders_end = None


def end_flights(server: Server, keys: Iterable[str] | None = None) -> None:
    """Let nobody follow the flights of these values, or of all, any more: their outcome may be decided already.

    Whoever follows one of them already gets its outcome.
    """
    if keys is None:
        ended = [key for key in list(_flights) if key[0] is server]
    else:
        ended = [key for each in keys for key in ((server, each), (server, each, "alone"))]
    for key in ended:
        _flights.pop(key, None)


def for_followers(outcome: Outcome) -> Outcome:
    """Return the followers' part of a leader's outcome: nothing if the leader alone was interrupted."""
    if outcome.shared and (outcome.error is None or not is_interruption(outcome.error)):
        # Each follower makes its own copy of the value.
        return Outcome(outcome.data, MISSING, outcome.error, outcome.trace, True, outcome.absent)
    return Outcome()


def _copy_of(error: BaseException) -> BaseException:
    """Return a copy of the leader's error for one follower.

    Each raise writes its traceback into the error. With one error for all, the report of one visitor's request showed
    the variables of another's.
    """
    kind: Any = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    try:
        # By the built-in class, because the error's own may take other arguments than it keeps, or do more.
        _, args, *state = kind.__reduce__(error)
        twin: BaseException = kind.__new__(type(error), *args)
        kind.__init__(twin, *args)
        for each in filter(None, state):
            BaseException.__setstate__(twin, each)
        for name in ("__cause__", "__context__", "__suppress_context__"):
            setattr(twin, name, getattr(error, name))
        if hasattr(error, "__notes__"):
            twin.__notes__ = list(error.__notes__)
    except Exception:
        return error  # as that of a frozen dataclass
    return twin


def failed(error: LockBackendError) -> Outcome:
    """Return the outcome when the server does not answer: the error that the base class would raise."""
    cause = redis_error(error)
    return Outcome(error=cause, trace=cause.__traceback__, shared=True)


def _lead_or_follow(key: tuple[Any, ...], request: ValueRequest, caller: Caller, mode: Mode) -> Operation[Outcome]:
    """Lead the flight for this key, or wait for its leader; the outcome is empty when the time is over."""
    until = mode.until
    if request.is_own:
        return Outcome() if until == -math.inf else (yield from _lead(request, caller, mode))
    waited = False
    while True:
        flight, call = Flight(caller), set[None]()  # a set can be referred to weakly
        flight.ends_with(call, key)
        try:
            found = _flights.setdefault(key, flight)
            if found is flight:
                outcome = yield from _lead(request, caller, mode)
                flight.outcome = for_followers(outcome)
                return outcome
        finally:
            try:
                close(key, flight)
            except BaseException:  # of a handler; as long as a log kept its traceback, nothing ended the flight
                close(key, flight)
                raise
        if until == -math.inf:  # the caller has the stale value
            return Outcome()
        if found.blocked_by(caller):
            return (yield from _lead(request, caller, mode._replace(alone=True)))
        if not waited:
            request.counters.count("waited")
        waited, began = True, monotonic()
        found.followers.append(None)
        # A computation that hangs keeps the others of its process for as long as those of other processes, no longer.
        life = request.renewal
        lease_ends = found.began + (math.inf if life.max_hold is None else life.max_hold + life.expire)
        followed = yield WaitForFuture(found.done, min(until, lease_ends))
        request.report_wait(began, followed is not None)
        if followed is None:
            close(key, found, wake=False)  # so that no caller waits again for a leader that may never return
            if lease_ends < until:
                continue
            return Outcome()
        if followed.shared:
            error = None if followed.error is None else _copy_of(followed.error)
            return followed._replace(error=error)  # type: ignore[no-any-return]


def _lead(request: ValueRequest, caller: Caller, mode: Mode) -> Operation[Outcome]:
    try:
        return (yield from obtain(request, caller, mode))
    except LockBackendError as error:
        return failed(error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


after_in_child("flights", _flights.clear)  # their leaders are threads of the parent
