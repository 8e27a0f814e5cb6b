"""Many values in three batches: they are read, their leases are asked for, and what the caller computed is stored.

One call of the function computes the values whose leases the caller got. Only then it waits, for one value after
another, so that no two callers wait for each other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...core import chance
from ...core.clock import monotonic
from ...core.driver.effects import Invoke, Operation, with_retries_each
from ...exceptions import LockBackendError
from .obtain import answer_of, holds_lease, lease_call, moves_keys, verdict_without_lease
from .request import MISSING, Answer, Caller, Outcome, ValueAttempt, ValueRequest, Verdict, is_forbidden, log_level
from .single_flight import SPREAD, Flight, close, failed, for_followers, get_value, register
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

TO_ASK_FOR = (Verdict.VALUE, Verdict.LARGE)
"""The answers without a value that is good: it is asked for alone, because it is large, or too old."""

LATE: Any = object()
"""Stands for a value that was waited for in vain."""


def get_values(
    requests: list[ValueRequest], default: DefaultForMany, caller: Caller, wait: float | None, on_timeout: Any
) -> Operation[dict[str, Outcome]]:
    """Return many values by their keys in Redis: each is computed once over all callers.

    The values that no caller computes yet are computed together by one call of `default`. The values that are missing
    when the time is over are computed together, too. A key for which `default` returns no value is left out.
    """
    compute = on_timeout in ("compute", "stale")
    if wait is not None and compute:
        wait *= chance.uniform(1, 1 + SPREAD)
    until = math.inf if wait is None else monotonic() + wait
    outcomes = yield from _compute_free(requests, default, caller, until)
    errors = [outcome for outcome in outcomes.values() if outcome.error is not None]
    if errors:
        return {requests[0].key: errors[0]}
    for number, request in enumerate(requests):
        if request.key in outcomes:
            continue
        left = None if until == math.inf else max(0.0, until - monotonic())
        outcome = yield from get_value(request, caller, left, LATE if compute else on_timeout, may_be_absent=True)
        if outcome.value is LATE:
            rest = [other for other in requests[number:] if other.key not in outcomes]
            outcomes.update((yield from _compute_free(rest, default, caller, -math.inf, alone=True)))
            outcome = outcomes.get(request.key, Outcome())
            if outcome.empty:  # another caller of this process computes it now
                outcome = yield from get_value(request, caller, 0.0, on_timeout, may_be_absent=True)
        outcomes[request.key] = outcome
        if outcome.error is not None:
            break
    return {key: outcome for key, outcome in outcomes.items() if not outcome.absent}


def _compute_free(
    requests: list[ValueRequest], default: DefaultForMany, caller: Caller, until: float, alone: bool = False
) -> Operation[dict[str, Outcome]]:
    """Compute the values that nobody computes; return their outcomes. `alone`: also what other processes compute."""
    flights = _Flights(caller, alone)
    try:
        led = flights.register(requests)
        if led:
            try:
                yield from _lead(led, default, flights, until)
            except LockBackendError as error:
                for request in led:
                    if request.key not in flights.outcomes:
                        flights.note(request, failed(error))
        return flights.outcomes
    finally:
        try:
            flights.close()
        except BaseException:  # as in single_flight.py
            flights.close()
            raise


class _Flights:
    """The flights that one call for many keys leads, and the outcomes that it has. `alone`: it does not wait."""

    def __init__(self, caller: Caller, alone: bool) -> None:
        self.caller = caller
        self.alone = alone
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

    def leave(self, request: ValueRequest) -> None:
        """End the flight without an outcome: its followers ask Redis themselves."""
        self._end(self._key(request), Outcome())

    def close(self) -> None:
        """End all flights that are left."""
        for key, flight in self._flights.items():
            close(key, flight)

    def _end(self, key: tuple[Any, ...], outcome: Outcome) -> None:
        flight = self._flights.get(key)
        if flight is not None:
            flight.outcome = outcome
            close(key, flight)
            self._flights.pop(key, None)  # not sooner, so that `close` ends it if a handler interrupts this

    def _key(self, request: ValueRequest) -> tuple[Any, ...]:
        return (request.server, request.key, "alone") if self.alone else (request.server, request.key)


def _lead(requests: list[ValueRequest], default: DefaultForMany, flights: _Flights, until: float) -> Operation[None]:
    """Compute the values whose leases the caller gets.

    `flights` notes their outcomes; who follows another one asks Redis itself. Raises LockBackendError.
    """
    attempts = [ValueAttempt(request.lease(flights.caller.acquirer)) for request in requests]
    jobs: list[ComputeJob] = []
    try:
        answers = yield from _ask_for_all(requests, attempts, until)
        for request, attempt, answer in zip(requests, attempts, answers, strict=True):
            if answer.value is not MISSING:
                flights.note(request, Outcome(answer.data, answer.value, shared=True))
            elif answer.verdict in TO_ASK_FOR or (answer.verdict is Verdict.WAIT and not flights.alone):
                flights.leave(request)
            else:
                jobs.append(ComputeJob(request, attempt, answer))
        if jobs:
            outcomes = yield from under_leases(jobs, _compute_many(jobs, default))
            for job, outcome in zip(jobs, outcomes, strict=True):
                flights.note(job.request, outcome)
    except BaseException:
        for attempt in attempts:
            attempt.give_up()
        raise


def _ask_for_all(requests: list[ValueRequest], attempts: list[ValueAttempt], until: float) -> Operation[list[Answer]]:
    """Ask for many values or their leases at once, without waiting for other callers."""
    first = requests[0]
    if is_forbidden(first.server):
        return [Answer(Verdict.FORBIDDEN)] * len(requests)
    level, until = log_level(first.server, first.forgives), monotonic() if first.forgives else until
    for attempt in attempts:
        attempt.pending = True
    for _ in range(2):  # a grant that comes when it is over is asked for once more, as by `with_retries`
        sent = monotonic()
        calls = [lease_call(request, attempt) for request, attempt in zip(requests, attempts, strict=True)]
        replies = yield from with_retries_each(first.name, calls, until, attempts, level, for_value=True)
        if monotonic() < sent + first.renewal.expire:
            break
    each = list(zip(requests, attempts, replies, strict=True))
    moved = [moves_keys(request, attempt.lease, reply) for request, attempt, reply in each]  # each of them moves
    if any(moved):
        return (yield from _ask_for_all(requests, attempts, until))
    answers = []
    for request, attempt, reply in each:
        answers.append((yield from _answer(request, attempt, reply, sent)))
    return answers


def _answer(request: ValueRequest, attempt: ValueAttempt, reply: Any, sent: float) -> Operation[Answer]:
    """Return what the reply of the lease's script means, and give back what is not computed."""
    if isinstance(reply, LockBackendError):
        attempt.give_up()
        return Answer((yield from verdict_without_lease(request, reply)))
    answer = answer_of(reply)
    if answer.verdict is Verdict.COMPUTE:
        attempt.lease.note_acquired(int(answer.fence), sent)
        return answer
    attempt.pending = attempt.repeated or holds_lease(reply)
    attempt.give_up()
    if answer.verdict is Verdict.VALUE:
        return answer._replace(value=(yield from request.decode(answer.data)))
    return answer


def _compute_many(jobs: list[ComputeJob], default: DefaultForMany) -> Operation[list[Outcome]]:
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
    encoded = None
    if error is None and encodes_in_thread(jobs[0]):  # all at once
        encoded = yield from call_where_default_runs(partial(_encode_all, jobs, values))
    return (yield from finish(jobs, values, error, encoded))


def _encode_all(jobs: list[ComputeJob], values: list[Any]) -> list[Encoded | Exception | None]:
    def encode(request: ValueRequest, value: Any) -> Encoded | Exception | None:
        try:
            return None if value is ABSENT else request.encode(value)
        except Exception as error:
            return error

    return [encode(job.request, value) for job, value in zip(jobs, values, strict=True)]
