"""Histories of computed values: one caller computes, the others wait, and nothing stale is stored over a change."""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

from django_redislock.cache.lease.many import get_values
from django_redislock.cache.lease.request import MISSING, Caller, ValueLease, ValueRequest, computing, read_value
from django_redislock.cache.lease.single_flight import get_value, refresh_or_stale
from django_redislock.cache.lease.store import INVALIDATE, SETTLE, invalidate
from django_redislock.core import clock
from django_redislock.core.driver.effects import Pipeline, ScriptCall, Sleep, with_retries
from django_redislock.core.options import Renewal
from django_redislock.exceptions import LockError

from .driver import Thread
from .history import History, draw_faults
from .versions import Versions
from .world import SOCKET_TIMEOUT, Plan, Process, ThreadPlan

KEYS = ("a", "b", "c")
QUIET = 0.3
"""Seconds within which those who wait for a value have it, when nothing goes wrong."""
RESERVED = 0.5
"""Seconds for which a lease is kept for the waiter whose turn it is, as core/lua/lib.lua says."""
LIFE = 60_000
"""Milliseconds, unless values become stale."""
STALE = 2_000
"""Milliseconds that a value stays after it is due, where values become stale."""
LARGE = b"x" * 40_000
WAIT = 4.0
"""Seconds for which a computation waits for another one: so long two take that need each other."""


class Get(NamedTuple):
    """One call for a value: how long its computation takes, whether it fails, and which other value it needs."""

    keys: tuple[str, ...]
    wait: float | None
    computes: float
    fails: bool
    needs: str
    stale: bool
    pause: float


class Change(NamedTuple):
    """One change in the origin, and what the caller does then."""

    key: str
    how: str
    pause: float


class OriginError(Exception):
    """What a computation raises."""


class Computation:
    """One call of the function that makes a value."""

    def __init__(self, thread: Thread, key: str, lease: ValueLease | None, epoch: float) -> None:
        self.thread = thread
        self.key = key
        self.lease = lease
        self.epoch = epoch
        self.superseded = False
        """Whether a change, or the value of another caller, ended its lease."""

    @property
    def stands(self) -> bool:
        """Whether it computes for all callers, as far as its process knows."""
        lease, process = self.lease, self.thread.process
        return (
            lease is not None and process.alive and not lease._losses and process.clock() < lease.deadline
        ) and not self.superseded

    @property
    def lasts(self) -> bool:
        """Whether its lease does not end while its value is on the way to the server, because `max_hold` is over."""
        lease = self.lease
        return lease is not None and (lease.renewing or lease.deadline > self.thread.process.clock() + QUIET)


class CacheHistory(History):
    """Some processes that want some values, and change them."""

    kind = "cache"

    def __init__(self, plan: Plan) -> None:
        self.stale = plan.options["stale"]
        self.steps = [step for each in plan.threads for step in each.steps]
        self.origin = dict.fromkeys(KEYS, 1)
        self.versions = {key: Versions() for key in KEYS}
        self.invalid = dict.fromkeys(KEYS, 0)
        """The fence up to which leases are ended by an invalidation."""
        self.settled: set[tuple[str, bytes]] = set()
        self.running: list[Computation] = []
        self.computed = dict.fromkeys(KEYS, 0)
        self.last_end = dict.fromkeys(KEYS, 0.0)
        """When a computation ended last."""
        self.waiting: dict[Thread, tuple[Get, float]] = {}
        """What each thread waits for, and since when."""
        self.served: dict[tuple[Thread, float], float] = {}
        """Calls for which another caller has computed, and the time from which on they have the value or its error. An
        error is not stored: whoever asks again while it is on its way tries anew."""
        super().__init__(plan)

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        plan = Plan(seed, chance.randint(2, 3), [])
        stale = chance.random() < 0.25
        plan.options = {"stale": stale, "large": chance.random() < 0.05, "unkept": chance.random() < 0.1}
        changes = chance.random() < 0.5
        waits = [None] if chance.random() < 0.5 else [None, 0.2, 1.0]
        many = not stale and chance.random() < 0.3
        needs, fails = chance.random() < 0.2, chance.random() < 0.3
        keys = KEYS if many or needs else KEYS[:1]
        for process in range(plan.processes):
            for _ in range(chance.choice([1, 1, 2])):
                options = {"expire": chance.choice([0.6, 1.0, 3.0]), "max_hold": chance.choice([None, None, None, 2.0])}
                steps: list[Any] = []
                for _ in range(chance.randint(1, 4)):
                    pause = chance.choice([0.0, 0.01, 0.3])
                    if changes and chance.random() < 0.4:
                        steps.append(
                            Change(chance.choice(keys), chance.choice(["delete", "delete", "set", "brief"]), pause)
                        )
                        continue
                    wanted = (chance.choice(keys),)
                    if many and chance.random() < 0.7:
                        wanted = tuple(chance.sample(keys, chance.randint(2, 3)))
                    steps.append(
                        Get(
                            wanted,
                            chance.choice(waits),
                            chance.choice([0.0, 0.01, 0.2, 1.0, 3.0]) * chance.uniform(0.5, 1.0),
                            fails and chance.random() < 0.3,
                            chance.choice(keys) if needs and chance.random() < 0.5 else "",
                            stale,
                            pause,
                        )
                    )
                plan.threads.append(ThreadPlan(process, chance.choice([0.0, 0.3]) * chance.random(), options, steps))
        draw_faults(chance, plan)
        return plan

    def program(self, thread: Thread, plan: ThreadPlan) -> Generator[Any, Any, Any]:
        """Get values and change them."""
        for step in plan.steps:
            if isinstance(step, Change):
                yield from self._change(thread, step)
            else:
                yield from self._get(thread, plan, step)
            if step.pause:
                yield Sleep(step.pause)

    # Values

    def _request(self, thread: Thread, plan: ThreadPlan, step: Get, key: str) -> ValueRequest:
        life = 500 + STALE if self.stale else LIFE
        return ValueRequest(
            server=thread.process,
            prefix="redislock",
            key=key,
            default=partial(self._compute, thread, plan, step, key),
            dumps=lambda key, value: (b"%d" % value + (b":" + LARGE if self.plan.options["large"] else b""), life),
            loads=lambda key, data: int(data.partition(b":")[0]),
            renewal=Renewal(plan.options["expire"], max_hold=plan.options["max_hold"]),
            ignore_errors=False,
            should_cache=(lambda value: False) if self.plan.options["unkept"] else None,
            caller_key=key,
        )

    def _compute(self, thread: Thread, plan: ThreadPlan, step: Get, key: str) -> Generator[Any, Any, int]:
        """Read the origin, and take some time."""
        computation = self._begins(thread, key)
        version = self.origin[key]
        yield Sleep(step.computes)
        if step.needs and step.needs != key:
            other = self._request(thread, plan, step._replace(needs="", fails=False), step.needs)
            outcome = yield from get_value(other, self._caller(thread), WAIT, "compute")
            self.world.tell(thread, f"got {step.needs} for {key}: {outcome.value}")
        self._ends(computation)
        if step.fails:
            raise OriginError(key)
        return version

    def _compute_many(self, thread: Thread, step: Get, keys: list[str]) -> Generator[Any, Any, dict[str, int]]:
        computations = [self._begins(thread, key) for key in keys]
        versions = {key: self.origin[key] for key in keys}
        yield Sleep(step.computes)
        for computation in computations:
            self._ends(computation)
        if step.fails:
            raise OriginError(*keys)
        return versions

    def _begins(self, thread: Thread, key: str) -> Computation:
        """Note that a computation begins, and look whether another caller computes for all."""
        own = (each for each in computing.get() if each.name == f"cache:{key}" and each.fence and not each.ended)
        lease = next(own, None)
        computation = Computation(thread, key, lease, self.world.epoch_now())
        if lease and ((key, b"%d" % lease.fence) in self.settled or lease.fence <= self.invalid[key]):
            computation.superseded = True
        self.world.tell(thread, f"computes {key}" + (f", fence {lease.fence}" if lease else " for itself"))
        for other in self.running:
            same = other.key == key and other.epoch == computation.epoch and other.lease is not lease
            if same and other.stands and computation.stands:
                self.fail(f"{thread} and {other.thread} compute {key} at once, each for all callers")
        if self.served.get((thread, self.waiting[thread][1]), math.inf) <= self.world.time:
            self.fail(f"{thread} computes {key}, though another caller has computed it meanwhile")
        self.running.append(computation)
        self.computed[key] += 1
        return computation

    def _ends(self, computation: Computation) -> None:
        """Note that a computation ends: who waits for the value has it soon, if nothing goes wrong."""
        world, key = self.world, computation.key
        world.tell(computation.thread, f"has computed {key}")
        self.running.remove(computation)
        ended = self.last_end[key] = world.time
        if not self.plan.calm:
            return
        waiting = [each for each in self.waiting.items() if each[1][0].keys == (key,) and each[1][0].wait is None]
        alone = not self.plan.options["unkept"] and not any(other.key == key for other in self.running)
        stands = computation.stands and computation.lasts
        if alone and stands and not any(isinstance(step, Change) or step.needs for step in self.steps):
            # Whoever has waited for a moment has joined those who are sent the value.
            joined = [(thread, since) for thread, (_, since) in waiting if since < world.time - QUIET]
            known = world.time + (QUIET if self.waiting[computation.thread][0].fails else 0.0)
            self.served.update((call, known) for call in joined if call[0] is not computation.thread)

        busy = [computation.thread, *(other.thread for other in self.running)]
        waiting = [(thread, call) for thread, call in waiting if thread not in busy]

        def look(again: bool = True) -> None:
            if self.last_end[key] > ended or any(other.key == key for other in self.running):
                return
            late = [thread for thread, call in waiting if self.waiting.get(thread) is call and not call[0].needs]
            if late and again and any(key in self.waiting[other.thread][0].keys for other in self.running):
                # A caller of many keys computes another one. The lease of this key may be reserved for it meanwhile.
                world.at(world.time + RESERVED, partial(look, again=False))
            elif late:
                self.fail(f"{late} wait for {key}, which nobody computes")

        world.at(world.time + QUIET, look)

    def _caller(self, thread: Thread) -> Caller:
        return Caller(thread, thread.process.room)  # type: ignore[arg-type]

    def _get(self, thread: Thread, plan: ThreadPlan, step: Get) -> Generator[Any, Any, None]:
        world, freezes = self.world, thread.process.freezes
        asked = world.time
        requests = [self._request(thread, plan, step, key) for key in step.keys]
        self.waiting[thread] = step, asked
        outcomes = {}
        try:
            if len(requests) > 1:
                default: Any = partial(self._compute_many, thread, step)
                outcomes = yield from get_values(requests, default, self._caller(thread), step.wait, "compute")
            else:
                outcomes[step.keys[0]] = yield from self._get_one(thread, requests[0], step)
        except LockError as error:
            world.tell(thread, f"get raised {error}")
        finally:
            del self.waiting[thread]
        for key, outcome in outcomes.items():
            what = f"got {key}: " + (f"{outcome.value}" if outcome.error is None else f"{outcome.error!r}")
            world.tell(thread, what)
            if outcome.error is None:
                self._see_value(thread, step, key, outcome.value, asked)
        failed = any(outcome.error is not None for outcome in outcomes.values())
        if outcomes and not failed and outcomes.keys() != set(step.keys):
            self.fail(f"{thread} got {outcomes.keys()} instead of {step.keys}")
        took, most = world.time - asked, 3.0 * (3 + 2 * bool(step.needs)) * len(step.keys)
        if not self.plan.calm:
            most += 4 * SOCKET_TIMEOUT
        if step.wait is not None and freezes == thread.process.freezes and took > step.wait * 1.1 + most:
            self.fail(f"{thread} came back after {took:.3f} s, though it waits for {step.wait} s")

    def _get_one(self, thread: Thread, request: ValueRequest, step: Get) -> Generator[Any, Any, Any]:
        if not step.stale:
            return (yield from get_value(request, self._caller(thread), step.wait, "compute"))
        data, left = yield from read_value(request.key, True)
        if data is None:
            return (yield from get_value(request, self._caller(thread), step.wait, "compute"))
        asked, computed = self.world.time, self.computed[request.key]
        value = request.loads(request.key, data)
        if left >= STALE:
            return (yield from get_value(request, self._caller(thread), step.wait, "compute"))
        outcome = yield from refresh_or_stale(request, self._caller(thread), data, value, 0.0)
        if self.plan.calm and self.computed[request.key] == computed and self.world.time > asked + QUIET:
            self.fail(f"{thread} waited {self.world.time - asked:.3f} s for a value whose stale one was there")
        return outcome

    # Changes

    def _change(self, thread: Thread, step: Change) -> Generator[Any, Any, None]:
        """Change the origin, and then the cache, as `cache.delete()` and `cache.set()` do."""
        key, world, epoch = step.key, self.world, self.world.epoch
        self.origin[key] += 1
        version = self.origin[key]
        world.tell(thread, f"changes {key} to {version}: {step.how}")
        server: Any = thread.process
        versions = self.versions[key]
        versions.begin()
        began = clock.monotonic()
        try:
            if step.how == "delete":
                command: tuple[bytes, ...] = (b"DEL", key.encode())
            else:
                command = (b"SET", key.encode(), b"%d" % version, b"PX", b"%d" % (LIFE if step.how == "set" else 500))
            yield from with_retries(key, Pipeline((command,)), clock.monotonic())
            if step.how != "set":
                yield from invalidate(server, "redislock", [key], delete=step.how == "delete")
            if step.how == "brief" and clock.monotonic() >= began + 0.5:
                yield from invalidate(server, "redislock", [key], delete=True)
            if epoch == world.epoch and versions.tell(step.how, world.time, version, epoch):
                stored = self.server.peek(key.encode())
                if stored is not None:
                    self._see_stored(key, stored)
            world.tell(thread, f"has changed {key} to {version}")
        except LockError as error:
            world.tell(thread, f"the change raised {error}")
        finally:
            versions.end()

    def _see_stored(self, key: str, data: bytes) -> None:
        version, versions = int(data.partition(b":")[0]), self.versions[key]
        floor = versions.newest(self.world.time, self.world.epoch)
        if version < floor and version not in versions.given:
            self.fail(f"version {version} of {key} is stored, though {floor} is in force")

    def _see_value(self, thread: Thread, step: Get, key: str, value: Any, asked: float) -> None:
        if value is MISSING:
            self.fail(f"{thread} got nothing for {key}")
        versions = self.versions[key]
        floor = versions.newest(asked - QUIET, self.world.epoch)
        if self.plan.calm and not step.stale and step.wait is None and value < floor and value not in versions.given:
            self.fail(f"{thread} got version {value} of {key}, though {floor} was in force before it asked")

    def executed(self, process: Process, what: Any, before: Any, reply: Any) -> None:
        """See what is stored, and whose leases end."""
        if not isinstance(what, ScriptCall):
            key = what[1].decode()
            if what[0] == b"SET" and key in self.versions:  # else it is the note of an attempt
                self.versions[key].set(int(what[2]), brief=int(what[4]) < LIFE)
            elif what[0] == b"DEL":
                self.versions[key].delete()
        elif what.script is SETTLE:
            key = what.keys[3].decode()
            if reply in (1, 2) and what.args[2] not in (b"0", b"!"):
                self.world.tell(process, f"stores {what.args[5][:8]!r} for {key}")
                self._see_stored(key, what.args[5])
            if reply >= 0:
                self._supersede(key, b"" if reply == 2 else what.args[0])  # 2: it also ends another caller's lease
        elif what.script is INVALIDATE:
            for name in what.args[1:]:
                key = name.decode().removeprefix("cache:")
                self.versions[key].invalidated(what.args[0] == b"1")
                counter = self.server.data.get(what.keys[1].removesuffix(b"held") + b"fence", b"0")
                self.invalid[key] = max(self.invalid[key], int(counter))
                self._supersede(key, b"")

    def _supersede(self, key: str, fence: bytes) -> None:
        """Note that the lease of this fence has ended; b"": each lease that there is."""
        self.settled.add((key, fence))
        for computation in self.running:
            lease = computation.lease
            if computation.key == key and lease is not None and fence in (b"", b"%d" % lease.fence):
                computation.superseded = True

    def look_at_the_end(self) -> None:
        plan = self.plan
        if not plan.calm:
            return
        gets = [step for step in self.steps if isinstance(step, Get)]
        kept = not (self.stale or plan.options["unkept"])
        if len(gets) == len(self.steps) and kept and not any(step.fails or step.wait is not None for step in gets):
            often = {key: number for key, number in self.computed.items() if number > 1}
            if (
                often
                and not any(step.needs for step in gets)
                and not any(each.options["max_hold"] for each in plan.threads)
            ):
                self.fail(f"computed more than once: {often}")
        self.see_nothing_left(self.server)
