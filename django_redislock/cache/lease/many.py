"""Many values: one call of the function computes those that no other caller computes. Without I/O.

It runs the operation of one value, `lookup`, once for each key. The operations of all keys are interleaved, so that
their calls take one round trip and one sleeper waits for all of them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ...core.clock import monotonic
from ...core.driver.effects import Invoke, Operation
from ...core.driver.interleave import interleave
from ...exceptions import LockBackendError
from .obtain import lookup
from .request import MISSING, Answer, Outcome, ValueRequest, Verdict, enclosing_leases
from .single_flight import Caller, Flight, close, failed, for_followers, get_value, own_copy, register
from .store import (
    ABSENT,
    ComputeJob,
    Encoded,
    call_where_default_runs,
    encodes_in_thread,
    finish,
    unawaited,
    under_leases,
)

DefaultForMany = Callable[[list[Any]], Any]
"""Takes keys in the caller's form, and returns a dict of their values."""


def get_values(
    requests: list[ValueRequest], default: DefaultForMany, caller: Caller, wait: float | None, on_timeout: Any
) -> Operation[dict[str, Outcome]]:
    """Return many values by their keys in Redis: each is computed once over all callers.

    The values that no caller computes yet are computed together by one call of `default`. Only then the caller waits
    for the others, so that no two callers wait for each other. The values that are missing when the time is over are
    computed together, too. A key for which `default` returns no value is left out.
    """
    compute = on_timeout in ("compute", "stale")
    until = math.inf if wait is None else monotonic() + wait
    outcomes = yield from _lead_many(requests, default, caller, until)
    errors = [outcome for outcome in outcomes.values() if outcome.error is not None]
    if errors:
        return {requests[0].key: errors[0]}
    for number, request in enumerate(requests):
        if compute and request.key not in outcomes and monotonic() >= until:
            late = [other for other in requests[number:] if other.key not in outcomes]
            outcomes.update((yield from _lead_many(late, default, caller, -math.inf, last=True)))
        outcome = yield from own_copy(outcomes.pop(request.key, Outcome()), request)
        if outcome.value is MISSING and not outcome.absent:
            left = None if until == math.inf else max(0.0, until - monotonic())
            outcome = yield from get_value(request, caller, left, on_timeout, may_be_absent=True)
        if not outcome.absent:
            outcomes[request.key] = outcome
        if outcome.error is not None:
            break
    return outcomes


def _lead_many(
    requests: list[ValueRequest], default: DefaultForMany, caller: Caller, until: float, last: bool = False
) -> Operation[dict[str, Outcome]]:
    """Lead the flights that have no leader in this process; return their outcomes. `last`: does not wait."""
    flights = _Flights(caller, last)
    # A caller that computes another value waits for one value at a time, so that it follows one chain of waits.
    nested = bool(enclosing_leases())
    try:
        led = requests if nested else flights.register(requests)
        if led:
            try:
                yield from _get_or_compute_many(led, default, flights, -math.inf if nested else until)
            except LockBackendError as error:
                for request in led:
                    if request.key not in flights.outcomes:
                        flights.note(request, failed(error))
        return flights.outcomes
    finally:
        flights.close()


class _Flights:
    """The flights that one call for many keys leads, and the outcomes that it has. `last`: it does not wait."""

    def __init__(self, caller: Caller, last: bool) -> None:
        self.caller = caller
        self.last = last
        self.outcomes: dict[str, Outcome] = {}
        self._flights: dict[tuple[Any, ...], Flight] = {}

    def register(self, requests: list[ValueRequest]) -> list[ValueRequest]:
        """Register a flight for each request; return those whose key had none in this process."""
        led = []
        for request in requests:
            key, flight = self._key(request), Flight(self.caller)
            flight.ends_with(self, key)
            self._flights[key] = flight  # before: a time limit in between would leave it registered for ever
            if register(key, flight):
                led.append(request)
            else:
                del self._flights[key]
        return led

    def note(self, request: ValueRequest, outcome: Outcome) -> None:
        """Note an outcome, and give the followers their part of it."""
        self.outcomes[request.key] = outcome
        self._end(self._key(request), for_followers(outcome))

    def leave(self, requests: Iterable[ValueRequest]) -> None:
        """End the flights without an outcome: their followers ask Redis themselves."""
        for request in requests:
            self._end(self._key(request), Outcome())

    def close(self) -> None:
        """End all flights that are left."""
        for key, flight in self._flights.items():
            close(key, flight)

    def _end(self, key: tuple[Any, ...], outcome: Outcome) -> None:
        flight = self._flights.pop(key, None)
        if flight is not None:
            flight.outcome = outcome
            close(key, flight)

    def _key(self, request: ValueRequest) -> tuple[Any, ...]:
        return (request.server, request.key, "alone") if self.last else (request.server, request.key)


def _get_or_compute_many(
    requests: list[ValueRequest], default: DefaultForMany, flights: _Flights, until: float
) -> Operation[None]:
    """Get many values: compute those that no other caller computes, and wait for the others.

    `flights` notes each outcome as soon as there is one: none of a value that another caller still computes at `until`,
    and none of the rest after a failure. While the caller computes some values, it serves no followers of the others.
    A last call computes also what another caller computes. Raises LockBackendError.
    """
    leases = [request.lease(flights.caller.acquirer) for request in requests]
    found: dict[int, Answer] = {}
    answers: list[Answer] = []  # all of them: what one has got is given back, unless it is computed by then

    def process_found() -> Operation[bool]:
        """Compute the values whose leases this caller holds; False after a failure."""
        answers.extend(found.values())
        jobs: list[ComputeJob] = []
        has_failed = False
        for number in sorted(found):
            request, answer = requests[number], found.pop(number)
            if answer.verdict is Verdict.VALUE:
                flights.note(request, Outcome(answer.data, answer.value, shared=True))
            elif answer.verdict is Verdict.FAILED:
                has_failed = True
                flights.note(request, Outcome(error=request.load_failure(request.key, answer.data), shared=True))
            elif answer.verdict is not Verdict.WAIT or flights.last:
                jobs.append(ComputeJob(request, leases[number], answer))
        if jobs:
            computed = {job.request.key for job in jobs}
            flights.leave(request for request in requests if request.key not in computed)
            outcomes = yield from under_leases(jobs, _compute_many(jobs, default))
            for number, job in enumerate(jobs):
                has_failed = has_failed or outcomes[number].error is not None
                flights.note(job.request, outcomes[number])
        return not has_failed

    try:
        lookups = [lookup(request, lease, until, False) for request, lease in zip(requests, leases, strict=True)]
        yield from interleave(lookups, found, process_found)
        yield from process_found()
    except BaseException:
        for answer in (*answers, *found.values()):
            answer.give_up()
        raise


def _compute_many(jobs: list[ComputeJob], default: DefaultForMany) -> Operation[dict[int, Outcome]]:
    """Call the function once for all jobs, and store the values that it returns."""
    keys = [job.request.caller_key for job in jobs]
    result, error = yield Invoke(lambda: default(list(keys)))  # the function may sort its list
    values = [ABSENT] * len(jobs)
    if error is None:
        if inspect.iscoroutine(result):
            error = unawaited(result)
        elif isinstance(result, Mapping):
            values = [result.get(key, ABSENT) for key in keys]
        else:
            error = TypeError(f"the default of many keys must return a dict, not {type(result).__name__}")
    encoded: list[Encoded | Exception | None] = [None] * len(jobs)
    if error is None and encodes_in_thread(jobs[0]):  # all at once
        encoded = yield from call_where_default_runs(partial(_encode_all, jobs, values))
    outcomes: dict[int, Outcome] = {}
    each = zip(jobs, values, encoded, strict=True)
    yield from interleave([finish(job, value, error, made) for job, value, made in each], outcomes)
    return outcomes


def _encode_all(jobs: list[ComputeJob], values: list[Any]) -> list[Encoded | Exception | None]:
    def encode(request: ValueRequest, value: Any) -> Encoded | Exception | None:
        try:
            return None if value is ABSENT else request.encode(value)
        except Exception as error:
            return error

    return [encode(job.request, value) for job, value in zip(jobs, values, strict=True)]
