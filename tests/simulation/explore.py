"""The search for histories that go wrong, and how a found one is made small.

The search is at random, by seeds, or exhaustive in a small world.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from .aio import AsyncHistory
from .cache import CacheHistory, Change, Get
from .cluster import ClusterHistory
from .driver import Violation
from .history import FAULTS_UNTIL, History, simulated
from .limits import LimitHistory
from .locks import LockHistory, Round
from .nested import GetNested, NestedHistory
from .quorum import QuorumHistory, Round as QuorumRound
from .replicas import ReplicatedHistory
from .rlocks import RLockHistory
from .semaphores import SemaphoreHistory
from .tasks import CeleryHistory
from .worker import Publish
from .world import FATES, Plan, ThreadPlan

KINDS: dict[str, type[History]] = {
    each.kind: each
    for each in (
        LockHistory,
        RLockHistory,
        SemaphoreHistory,
        CacheHistory,
        NestedHistory,
        CeleryHistory,
        QuorumHistory,
        ReplicatedHistory,
        ClusterHistory,
        AsyncHistory,
        LimitHistory,
    )
}


class Found(AssertionError):
    """A history that went wrong, with what repeats it."""

    def __init__(self, kind: str, plan: Plan, violation: Violation) -> None:
        self.kind = kind
        self.plan = plan
        self.violation = violation
        super().__init__(kind, plan, violation)

    def __str__(self) -> str:
        kind, plan, violation = self.args
        return f"{violation}\nRepeat it: python -m tests.simulation --only {kind} --seed {plan.seed} --story"


def history_of(seed: int, only: str | None = None) -> History:
    """Return the history of a seed: without `only`, the kinds take turns."""
    kind = list(KINDS.values())[seed % len(KINDS)] if only is None else KINDS[only]
    return kind(kind.draw(seed))


def explore(seeds: Iterable[int], only: str | None = None, until: float = float("inf")) -> int:
    """Run a history for each seed, until a time on the real clock; return how many. Raises Found."""
    number = 0
    with simulated():
        for seed in seeds:
            history = history_of(seed, only)
            try:
                history.run()
            except Violation as violation:
                raise Found(history.kind, history.plan, violation) from None
            number += 1
            if time.perf_counter() > until:
                break
    return number


# Small worlds

ROUND = Round(None, 0.1, None, False, 1, 0.0)
QUORUM_ROUND = QuorumRound(None, 0.1, None, 0.0)
GET = Get(("a",), None, 0.1, False, "", False, 0.0)
TWICE_AND_ONCE: list[list[Any]] = [[ROUND] * 2, [ROUND]]
SMALL: dict[str, list[list[Any]]] = {
    "lock": TWICE_AND_ONCE,
    "rlock": [[ROUND._replace(depth=2)]] * 2,
    "cache": [[GET, Change("a", "delete", 0.0)], [GET] * 2],
    "nested": [[GetNested("a", 0.1, 0.0)], [GetNested("b", 0.1, 0.0)]],
    "quorum": [[QUORUM_ROUND] * 2, [QUORUM_ROUND]],
    "replicas": TWICE_AND_ONCE,
    "asyncio": TWICE_AND_ONCE,
    "cluster": TWICE_AND_ONCE,
    "limits": [[Publish("k", ((0.0, 0), (0.1, 1)), 0.3, 0, None, False, 0.0)] * 3, []],
    "semaphore": [[ROUND] * 2, [ROUND], [ROUND]],
    "celery": [[Publish("k", ((0.0, 0), (0.1, 1)), 0.1, 0, None, False, 0.0)], []],
}
"""What each thread does, of two processes in turn."""
OF_THREADS: dict[str, dict[str, Any]] = {
    **{kind: {"auto_renewal": False} for kind in ("lock", "quorum", "replicas", "cluster", "asyncio")},
    "rlock": {"auto_renewal": False, "reentrant": True},
    "semaphore": {"auto_renewal": False, "limit": 2},  # one of three waits
    "cache": {"max_hold": None},
}
OF_PLANS: dict[str, dict[str, Any]] = {
    "cache": {"stale": False, "large": False, "unkept": False},
    "nested": {"rates": [1.0] * 3, "needs": "circle of two", "homes": [0, 1, 0]},
    "quorum": {"rates": [1.0] * 3},
    "replicas": {"min_to_write": True},
}
SCOPES = {"celery": ("run", "queued", "queued+run", "job"), "limits": ("run", "queued+run")}
PAUSES = (0.15, 0.9)
"""Seconds: a pause within the expiry, and one beyond it."""
EXPIRE = 0.4


def small_plans(kind: str) -> list[Plan]:
    """Return the plans of the smallest worlds in which something can go wrong."""
    options = {"expire": EXPIRE} | OF_THREADS.get(kind, {})
    threads = [ThreadPlan(number % 2, 0.0, options, steps) for number, steps in enumerate(SMALL[kind])]
    plan = Plan(0, 2, threads, faulty_until=FAULTS_UNTIL, fates={}, options=OF_PLANS.get(kind, {}))
    if kind not in SCOPES:
        return [plan]
    of_task: dict[str, Any] = {"policy": "reschedule", "expire": EXPIRE, "limits": [2]}
    return [
        replace(plan, options={"scope": scope, "late": late, **of_task})
        for scope in SCOPES[kind]
        for late in (False, True)
    ]


def bounded(kind: str, disturbances: int) -> Iterator[Plan]:
    """Return every history of the small worlds with so many disturbances: requests that meet a fault, and pauses."""
    for plan in small_plans(kind):
        with simulated():
            calm = KINDS[kind](plan)
            calm.run()
        choices: list[tuple[tuple[int, int], Any]] = [
            ((process.number, request), what)
            for process in calm.world.senders
            for request in range(1, process.requests + 2)
            for what in (*FATES, *PAUSES)
        ]
        for chosen in itertools.combinations(choices, disturbances):
            yield replace(
                plan,
                fates={which: what for which, what in chosen if isinstance(what, str)},
                pauses={which: what for which, what in chosen if not isinstance(what, str)},
            )


def explore_bounded(kind: str, disturbances: int, share: int = 0, shares: int = 1) -> int:
    """Run them all, or every so-manieth of them; return how many. Raises Found."""
    number = 0
    for plan in itertools.islice(bounded(kind, disturbances), share, None, shares):
        violation = failure_of(kind, plan)
        if violation is not None:
            raise Found(kind, plan, violation)
        number += 1
    return number


# Shrinking


def run_plan(kind: str, plan: Plan) -> tuple[History, Violation | None]:
    """Run the plan, and return its history, and what went wrong."""
    history = KINDS[kind](plan)
    with simulated():
        try:
            history.run()
        except Violation as violation:
            return history, violation
    return history, None


def failure_of(kind: str, plan: Plan) -> Violation | None:
    """Run the plan, and return what went wrong."""
    return run_plan(kind, plan)[1]


def shrink(kind: str, plan: Plan, tries: int = 3000) -> tuple[Plan, Violation]:
    """Leave out all that the failure does not need: threads, steps, faults, the fates of requests."""
    history, violation = run_plan(kind, plan)
    assert violation is not None, "the plan does not fail"
    found = violation
    explicit = replace(plan, fates=dict(history.world.met), rate=0.0) if plan.fates is None else plan
    again = failure_of(kind, explicit)
    if again is not None:  # else something beside the fates of the requests has changed
        plan, found = explicit, again
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in _smaller(plan):
            tries -= 1
            violation = failure_of(kind, candidate)
            if violation is not None:
                plan, found, smaller = candidate, violation, True
                break
            if tries <= 0:
                break
    return plan, found


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Return the plans with one thing less, the largest things first."""
    for number in range(len(plan.threads)):
        yield replace(plan, threads=plan.threads[:number] + plan.threads[number + 1 :])
    for number, thread in enumerate(plan.threads):
        for step in range(len(thread.steps)):
            steps = thread.steps[:step] + thread.steps[step + 1 :]
            yield replace(
                plan, threads=[*plan.threads[:number], thread._replace(steps=steps), *plan.threads[number + 1 :]]
            )
    for number in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
    for which in plan.fates or {}:
        yield replace(plan, fates={other: fate for other, fate in (plan.fates or {}).items() if other != which})
    for which in plan.pauses:
        yield replace(plan, pauses={other: pause for other, pause in plan.pauses.items() if other != which})
