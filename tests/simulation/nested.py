"""Histories of values on several servers that need each other: in a chain, or in a circle of two or three, which ends
with the time for which its callers wait."""

from __future__ import annotations

import random
from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

from django_redislock.cache.lease.request import Caller, ValueRequest
from django_redislock.cache.lease.single_flight import SPREAD, get_value
from django_redislock.core.driver.effects import Sleep
from django_redislock.core.options import Renewal
from django_redislock.exceptions import LockError

from .driver import RunAt, Thread
from .history import History, draw_faults
from .hosts import Link, WideWorld
from .world import Plan, ThreadPlan

KEYS = ("a", "b", "c")
NEEDS: dict[str, dict[str, str]] = {
    "chain": {"a": "b", "b": "c"},
    "one that two need": {"a": "c", "b": "c"},
    "circle of two": {"a": "b", "b": "a", "c": "a"},
    "circle of three": {"a": "b", "b": "c", "c": "a"},
}
"""Which other value the computation of each value needs."""
WITHOUT_CIRCLE = ("chain", "one that two need")
LIFE = 60_000
QUIET = 0.25
"""Seconds within which somebody computes or gets a value when nothing goes wrong, beside what packets take."""
WAIT = 2.0
"""Seconds for which those wait whose values need each other in a circle; the others wait for ever."""
DEPTH = 4
"""The number of values of which each needs the next at most: in a circle a caller comes back to its own."""


class GetNested(NamedTuple):
    """One call for a value, and how long each computation takes."""

    key: str
    computes: float
    pause: float


class NestedHistory(History):
    """Some processes that want values of up to three servers."""

    kind = "nested"
    world_kind = WideWorld
    world: WideWorld

    def __init__(self, plan: Plan) -> None:
        self.needs = NEEDS[plan.options["needs"]]
        self.wait = None if plan.options["needs"] in WITHOUT_CIRCLE else WAIT
        self.computed = dict.fromkeys(KEYS, 0)
        self.busy = len(plan.threads)
        """How many threads do something else than wait for a value, or have not started yet."""
        self.began = 0
        """How often somebody began to do something."""
        super().__init__(plan)

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        plan = Plan(seed, chance.randint(2, 3), [])
        homes = chance.choice([[0, 1, 0], [1, 0, 0], [0, 1, 1], [0, 1, 2], [0, 0, 0]])
        plan.options = {"rates": [1.0] * 3, "needs": chance.choice(list(NEEDS)), "homes": homes}
        times = [0.0, 0.01, 0.2, 1.0]
        if chance.random() < 0.5:  # so that all come to their waits at about the same time
            times = [chance.choice(times)]
        for process in range(plan.processes):
            for _ in range(chance.choice([1, 1, 2])):
                steps = [
                    GetNested(chance.choice(KEYS), chance.choice(times), chance.choice([0.0, 0.01, 0.3]))
                    for _ in range(chance.randint(1, 3))
                ]
                starts = chance.choice([0.0, 0.0, 0.3]) * chance.random()
                plan.threads.append(ThreadPlan(process, starts, {"expire": chance.choice([0.6, 1.0, 3.0])}, steps))
        draw_faults(chance, plan, ["freeze", "cut", "silence", "kill"], ())
        return plan

    def program(self, thread: Thread, plan: ThreadPlan) -> Generator[Any, Any, Any]:
        """Get values, one after another."""
        self._wait_from_now_on()
        for step in plan.steps:
            try:
                yield self._get(thread, plan, step, (step.key,))
            except LockError as error:
                self.world.tell(thread, f"get raised {error}")
            yield from self._do_something(step.pause)

    def _get(self, thread: Thread, plan: ThreadPlan, step: GetNested, path: tuple[str, ...]) -> RunAt:
        """Return the call for the last key of the path; the others are computed now, because each needs the next."""
        link = self._link(thread, path[-1])
        request = ValueRequest(
            server=link,
            prefix="redislock",
            key=path[-1],
            default=partial(self._compute, thread, plan, step, path),
            dumps=lambda key, value: (value.encode(), LIFE),
            loads=lambda key, data: data.decode(),
            renewal=Renewal(plan.options["expire"]),
            ignore_errors=False,
        )
        return RunAt(link, get_value(request, Caller(thread, link.room), self.wait, "compute"))  # type: ignore[arg-type]

    def _compute(
        self, thread: Thread, plan: ThreadPlan, step: GetNested, path: tuple[str, ...]
    ) -> Generator[Any, Any, str]:
        key, inner = path[-1], self.needs.get(path[-1])
        self.computed[key] += 1
        self.world.tell(thread, f"computes {key}")
        yield from self._do_something(step.computes)
        if inner is not None and len(path) < DEPTH:
            outcome = yield self._get(thread, plan, step, (*path, inner))
            if outcome.error is not None:
                raise outcome.error
            self.world.tell(thread, f"got {inner} for {key}")
        self.world.tell(thread, f"has computed {key}")
        return key

    def _do_something(self, seconds: float) -> Generator[Any, Any, None]:
        self.busy += 1
        self.began += 1
        yield Sleep(seconds)
        self._wait_from_now_on()

    def _wait_from_now_on(self) -> None:
        """Note that a thread only waits now. When all do, somebody has what it waits for soon, or ends its wait."""
        self.busy -= 1
        # Who finds a stored value tells nothing, but goes on with something.
        happened, began = len(self.world.story), self.began
        longest = QUIET if self.wait is None else QUIET + self.wait * (1 + SPREAD)
        # What is on its way now is among the packets already (seed 42007167: one of 0.15 s).
        world, until = self.world, max(self.world.time, self.world.on_their_way) + longest - self.world.packets

        def look() -> None:
            if world.time < until + world.packets:
                world.at(until + world.packets, look)
            elif not self.busy and (len(world.story), self.began) == (happened, began) and not self._over():
                self.fail("all wait")

        if self.plan.calm and not self.busy:
            world.at(world.time + longest, look)

    def _link(self, thread: Thread, key: str) -> Link:
        machine: Any = thread.process
        return machine.links[self.plan.options["homes"][KEYS.index(key)]]  # type: ignore[no-any-return]

    def look_at_the_end(self) -> None:
        if not self.plan.calm:
            return
        often = {key: number for key, number in self.computed.items() if number > 1}
        if often and self.plan.options["needs"] in WITHOUT_CIRCLE:
            self.fail(f"computed more than once, though there is no circle: {often}")
        for server in self.world.servers:
            self.see_nothing_left(server)
