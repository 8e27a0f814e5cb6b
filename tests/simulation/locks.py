"""Histories of one lock: what processes do with it, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from django_redislock.core.base import BaseLock
from django_redislock.core.driver.effects import Sleep
from django_redislock.core.lease import Lease
from django_redislock.exceptions import LockError, LockLost

from .driver import Thread
from .history import draw_faults
from .lock_rules import NAME, LockRules
from .world import Plan, ThreadPlan, World


class Round(NamedTuple):
    """One acquisition: `extend` is a factor of the expiry. `resets` force-releases it in the middle, `recalls`
    asks for it."""

    timeout: float | None
    held: float
    extend: float | None
    resets: bool
    depth: int
    pause: float
    recalls: bool = False


class SimulatedLock(BaseLock):
    """The shipped lock, driven by the world."""

    world: World

    def _acquirer(self) -> Any:
        return self.world.running

    asked: Lease | None = None
    """The lease of the last call."""

    def _new_lease(self, acquirer: Any, id: str) -> Lease:
        self.asked = super()._new_lease(acquirer, id)
        return self.asked

    @classmethod
    def of(cls, thread: Thread, name: str, **options: Any) -> Any:
        """Return a lock for this thread."""
        lock = cls.__new__(cls)
        lock.world = thread.process.world
        lock.__init__(thread.process, name, **options)  # type: ignore[misc]
        return lock


def repeated(operation: Generator[Any, Any, Any]) -> Generator[Any, Any, None]:
    """Do what the operation does, and its last call once more, as if the answer had been lost."""
    effect = next(operation)
    while True:
        try:
            reply = yield effect
        except RedisError as error:
            proceed = partial(operation.throw, error)
        else:
            proceed = partial(operation.send, reply)
        try:
            effect = proceed()
        except StopIteration:
            break
    yield Sleep(0.1)
    with suppress(RedisError):
        yield effect


class LockHistory(LockRules):
    """Some processes that want one lock."""

    kind = "lock"
    lock_kind: type[SimulatedLock] = SimulatedLock
    may_reset = True

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        plan = Plan(seed, chance.randint(2, 3), [])
        given = chance.random() < 0.15
        resets = chance.random() < 0.2 and cls.may_reset
        for process in range(plan.processes):
            for _ in range(chance.choice([1, 1, 2])):
                options = {"expire": chance.choice([0.3, 1.0, 3.0]), "auto_renewal": chance.random() < 0.8}
                if given and cls.kind == "lock" and chance.random() < 0.7:
                    options["id"] = "given"
                if cls.kind == "rlock":
                    options["reentrant"] = True
                rounds = [cls.draw_round(chance, resets) for _ in range(chance.randint(1, 4))]
                plan.threads.append(ThreadPlan(process, chance.uniform(0, 0.3), options, rounds))
        draw_faults(chance, plan)
        asks = random.Random(f"recalls {seed}")  # of its own, so that each seed still draws the rest as ever
        if cls.may_reset and not resets and asks.random() < 0.3:
            for thread in plan.threads:
                thread.steps[:] = [step._replace(recalls=asks.random() < 0.4) for step in thread.steps]
        return plan

    @classmethod
    def draw_round(cls, chance: random.Random, resets: bool) -> Round:
        return Round(
            chance.choice([None, None, 0.0, 0.4, 2.0]),
            chance.choice([0.0, 0.01, 0.2, 1.0, 4.0]) * chance.uniform(0.5, 1.0),
            chance.choice([1.0, 2.0, 0.5]) if chance.random() < 0.1 else None,
            resets and chance.random() < 0.2,
            1,
            chance.choice([0.0, 0.001, 0.1]) if chance.random() < 0.7 else 0.0,
        )

    def program(self, thread: Thread, plan: ThreadPlan) -> Generator[Any, Any, Any]:
        """Acquire and release, in one of the ways that the package offers."""
        lock = self.lock_kind.of(thread, NAME, **plan.options)
        for step in plan.steps:
            if not (yield from self._acquired(thread, lock, step.timeout)):
                continue
            yield from self._hold(thread, lock, step)
            if step.pause:
                yield Sleep(step.pause)

    def _acquired(self, thread: Thread, lock: Any, timeout: float | None) -> Generator[Any, Any, bool]:
        world, freezes, before = self.world, thread.process.freezes, lock.asked
        asked, outcome, got = world.time, "waits", False
        self.waiting[thread] = timeout, asked
        try:
            got = yield from lock._acquire(thread, timeout)
            outcome = "granted" if got else "empty"
        except LockError as error:
            world.tell(thread, f"acquire raised {error}")
            self.see_error(thread, timeout, error)
            outcome = "raised"
        else:
            if not got:
                world.tell(thread, f"did not get it within {timeout} s")
        finally:
            del self.waiting[thread]
            self._note_call(thread, lock, outcome, timeout, asked)
            if not got and lock.asked is not before:  # else it was refused because an earlier one is not over
                self._look_for_remains(thread, lock.asked)
        self._see_answer(thread, outcome, timeout, asked)
        took = world.time - asked
        if timeout is not None and freezes == thread.process.freezes and took > timeout + self.patience + 0.3:
            self.fail(f"{thread} came back after {took:.3f} s, though its timeout is {timeout} s")
        if got:
            self.begins(thread, lock._leases[thread])
        elif outcome == "raised":
            yield Sleep(0.05)
        return got

    def _hold(self, thread: Thread, lock: Any, step: Round) -> Generator[Any, Any, None]:
        world, belief = self.world, self.beliefs[thread]
        lease = belief.lease
        if step.resets:
            yield Sleep(step.held / 2)
            try:
                if step.pause:
                    yield from lock._reset(lease.fence, "olga", "why")
                else:
                    yield from repeated(lock._reset(None, "olga", "why"))
            except LockError as error:
                world.tell(thread, f"reset raised {error}")
        if step.recalls:
            yield Sleep(step.held / 2)
            try:
                yield from repeated(lock._reset(lease.fence if step.pause else None, "olga", "why", recalls=True))
            except LockError as error:
                world.tell(thread, f"recall raised {error}")
        if step.held:
            yield Sleep(step.held)
        if step.extend is not None:
            belief.shortened = belief.shortened or step.extend < 1
            for other in self.beliefs.values():  # its holder may shorten it for all who use its id
                other.shortened = other.shortened or (step.extend < 1 and other.lease.fence == lease.fence)
            try:
                yield from lock._extend(thread, lease.expire * step.extend)
                world.tell(thread, f"extended by {lease.expire} s")
                promised = thread.process.watchdog.promised
                promised[lease] = max(promised[lease], lease.deadline)
            except LockError as error:
                world.tell(thread, f"extend raised {error}")
        self._see_loss(thread, belief)
        del self.beliefs[thread]
        forced, until, released = belief.forced_at is not None, self._until(belief), False
        began = world.time
        # What a late renewal kept in Redis after the loss is released, too, and the loss is told: rlock, seed 42044234.
        lost_before = bool(lease._losses) or thread.process.clock() >= lease.deadline
        world.tell(thread, "releases")
        try:
            yield from lock._release(lease)
            released = True
            if forced and belief.epoch == world.epoch:  # else a failover gave the lock back to it
                self.fail(f"{thread} was not told that another release ended its acquisition")
        except LockError as error:
            world.tell(thread, f"release raised {error}")
            self.lost = True
            if isinstance(error, LockLost):
                self._see_loss(thread, belief)
            own = lease.fence in self.released - self.reset and not forced and lease.id != "given"
            if own and not lost_before and self._is_quiet(thread.process, began):
                self.fail(f"a release of {thread} raised an error, though it had released")
        finally:
            self._note_belief(thread, belief, until, released)
        if lease.id != "given":
            self._is_free(lease.fence)
