"""Histories of one semaphore: at most one believer for each slot, and no slot above the caller's limit."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from django_redislock.core import scripts
from django_redislock.core.driver.effects import ScriptCall
from django_redislock.core.driver.wakeups import POLL_INTERVAL
from django_redislock.core.keys import slots_keys
from django_redislock.core.lease import Lease
from django_redislock.core.semaphore import Slots

from .beliefs import Belief
from .driver import Thread
from .lock_rules import NAME, PROMISED, QUIET
from .locks import LockHistory, SimulatedLock
from .world import Plan, Process

LIMITS = [1, 2, 3]
KEYS = slots_keys("redislock", NAME, max(LIMITS))
SLOTS = {number: KEYS.slot(number).lock for number in range(1, max(LIMITS) + 1)}


class SimulatedSemaphore(Slots, SimulatedLock):
    """The shipped semaphore, driven by the world."""


class SemaphoreHistory(LockHistory):
    """Some processes that want the slots of one semaphore, some of them with another limit."""

    kind = "semaphore"
    lock_kind = SimulatedSemaphore
    keys = KEYS
    locks = tuple(SLOTS.values())
    acquires = scripts.ACQUIRE_SLOT

    def __init__(self, plan: Plan) -> None:
        self.grants = self.last_granted = self.granted = 0
        self.taken_at = dict.fromkeys(SLOTS, 0.0)
        """When each slot was last seen held."""
        self.values: dict[int, bytes] = {}
        """The value of each slot after the last call."""
        super().__init__(plan)
        self.held_until = math.inf  # the rule about a lock that is free at a call is about one lock key
        self.limits = {thread: each.options["limit"] for thread, each in zip(self.threads, plan.threads, strict=True)}
        self.limit = max(self.limits.values())

    @classmethod
    def draw(cls, seed: int) -> Plan:
        plan, chance = super().draw(seed), random.Random(-seed - 1)
        limit = chance.choice(LIMITS)
        changes = chance.random() < 0.3
        for thread in plan.threads:
            thread.options["limit"] = chance.choice(LIMITS) if changes else limit
        if limit > 1 and chance.random() < 0.8:  # more threads, or nobody would wait
            more = super().draw(seed + 1_000_003)
            for thread in more.threads:
                thread.options["limit"] = chance.choice(LIMITS) if changes else limit
                plan.threads.append(thread._replace(process=thread.process % plan.processes))
        return plan

    def begins(self, thread: Thread, lease: Lease) -> None:
        # Holders of other slots may hear of later fences first: `executed` sees the order in which they are given.
        self.fence_known = math.inf
        super().begins(thread, lease)

    def _see_overlap(self, thread: Thread, belief: Belief) -> None:
        """See that no slot has two believers, that none is above its holder's limit, and that they are not too many."""
        if not belief.excludes:
            return
        slot = belief.lease.keys.lock
        if belief.lease.keys.others or slot not in list(SLOTS.values())[: self.limits[thread]]:
            self.fail(f"{thread} holds {slot!r}, though its limit is {self.limits[thread]}")
        others = [
            (other, theirs)
            for other, theirs in self.beliefs.items()
            if other is not thread and theirs.epoch == belief.epoch and theirs.excludes
        ]
        for other, theirs in others:
            if theirs.lease.keys.lock == slot:
                self.fail(
                    f"{thread} (fence {belief.lease.fence}) and {other} (fence {theirs.lease.fence}) hold {slot!r} at "
                    "once"
                )
            if theirs.lease.fence == belief.lease.fence:
                self.fail(f"{thread} and {other} have the same fence {belief.lease.fence}")
        if len(others) >= self.limit:
            self.fail(f"{thread} and {[other for other, _ in others]} are more than {self.limit}")

    def executed(self, process: Process, what: Any, before: Any, reply: Any) -> None:
        if not isinstance(what, ScriptCall):
            return
        self._see_recalled()
        former, self.values = self.values, {number: self.server.peek(key) or b"" for number, key in SLOTS.items()}
        self._note_places(*self.values.values())
        if what.script is scripts.ACQUIRE_SLOT and isinstance(reply, bytes) and not reply.startswith(b"-"):
            fence, slot = map(int, reply.split())
            if fence <= self.last_granted:
                self.fail(f"fence {fence} came after {self.last_granted}")
            self.last_granted = fence
            self.grants += 1
            self.taken_at[slot] = self.world.time
            self.granted = slot
            if what.args[4] + b"\n" + what.args[0] in (self.server.data.get(KEYS.queue) or ()):
                self.fail(f"{what.args[0]!r} got slot {slot} and still waits")
            self._see_turn(what, former.get(slot), f"slot {slot}")
            if sum(value.startswith(what.args[0] + b"\n") for value in self.values.values()) > 1:
                self.fail(f"{what.args[0]!r} has two slots: {self.values}")
        elif reply == 1 and before is not None:
            knows_its_slot = what.script is scripts.RELEASE and len(what.keys) <= 4  # who does not has no belief
            if what.script is scripts.RESET or knows_its_slot:
                self._see_release(process, what, before)

    def _rivals(self, call: ScriptCall, queue: dict[bytes, float]) -> Iterable[tuple[bytes, float]]:
        for entry, score in queue.items():
            if int(entry.rpartition(b"/")[2]) >= self.granted:
                yield entry, min(score, self.first[entry.partition(b"\n")[2]])

    def _is_free(self, fence: int) -> None:
        """See that somebody who waits for a slot gets it; its number is that of the slot that was released."""
        world = self.world
        slot = next((number for number, value in self.values.items() if not _is_held(value)), None)
        waiting = [
            thread
            for thread in self.threads
            if self.waiting.get(thread, (0.0, 0.0))[0] is None and slot is not None and slot <= self.limits[thread]
        ]
        if not self.plan.calm or not waiting:
            return
        grants = self.grants
        # A slot that expired before its release wakes nobody but the waiter that polls for its process. If that one has
        # got another slot just before, the next one polls half a second later (seed 42195496).
        quiet = QUIET if fence in self.released else POLL_INTERVAL + QUIET

        def look() -> None:
            if self.grants == grants and all(thread in self.waiting for thread in waiting):
                self.fail(f"{waiting} waited for a slot that was free for {quiet} s")

        world.at(world.time + quiet, look)

    def _look_at_waiters(self) -> None:
        world = self.world
        for number, key in SLOTS.items():
            if _is_held(self.server.peek(key) or b""):
                self.taken_at[number] = world.time
        for thread, (_, since) in self.waiting.items():
            process = thread.process
            if not process.alive or process.frozen:
                continue
            for number in range(1, self.limits[thread] + 1):
                free = world.time - max(self.taken_at[number], since, process.troubled, world.troubled)
                if free > PROMISED:
                    self.fail(f"{thread} waits, and slot {number} is free for {free:.3f} s")


def _is_held(value: bytes) -> bool:
    return value.split(b"\n", 2)[1:2] not in ([], [b"0"])
