"""Histories of one quorum lock on several servers, each of which fails by itself."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any, NamedTuple

from django_redislock.core import AsyncQuorumLock
from django_redislock.core.keys import lock_keys
from django_redislock.core.quorum import PartLease, QuorumLease
from django_redislock.core.watchdog import SHORTEST_PATIENCE
from django_redislock.exceptions import LockError

from .history import FAULTS_UNTIL, History, draw_faults
from .hosts import Host, Link, Machine, WideWorld
from .lock_rules import LOOK, NAME, QUIET
from .loop import EventLoop, TaskThread, View
from .world import SOCKET_TIMEOUT, Fault, Plan, ThreadPlan

KEYS = lock_keys("redislock", NAME)
PROMISED = 8.0
"""Seconds within which a lock that is free on most servers is held by somebody who is well and waits: a server that was
left out, some pauses, and two polls."""
LATE = 0.4
"""Seconds after its timeout at which a call comes back at the latest, while most servers are well. One misses its short
time (0.05 s), one that was left out is silent (0.25), the first answers when it is asked again, and the others have a
moment more (0.05): seed 2004722."""
GIVEN_BACK = 0.5
"""Seconds after which nothing is left of an acquisition that failed or ended, on servers that are well."""
MOST_EXTENDED = 2.0
DRIFT = 0.009
"""How much faster or slower than a process's clock that of a server runs; a quorum lock allows for 1 %."""
Link.view_kind = View


class Round(NamedTuple):
    """One acquisition: `extend` is a factor of the expiry."""

    timeout: float | None
    held: float
    extend: float | None
    pause: float


class Waiting(NamedTuple):
    """One call of acquire."""

    timeout: float | None
    since: float
    lock: AsyncQuorumLock


class QuorumHistory(History):
    """Some processes that want one quorum lock."""

    kind = "quorum"
    world_kind = WideWorld
    thread_kind = TaskThread
    world: WideWorld

    def __init__(self, plan: Plan) -> None:
        self.beliefs: dict[TaskThread, QuorumLease] = {}
        self.parts: dict[TaskThread, list[PartLease]] = {}
        """What each of them was granted."""
        self.waiting: dict[TaskThread, Waiting] = {}
        self.free_since = 0.0
        self.number = 0
        """How often an acquisition was begun, or ended."""
        self.taken = 0
        """How often the lock was acquired."""
        super().__init__(plan)
        loops = [EventLoop(process) for process in self.world.processes]
        for thread in self.threads:
            thread.loop = loops[thread.process.number]  # type: ignore[attr-defined]
        self.needed = len(self.world.hosts) // 2 + 1
        self.world.at(LOOK, self._look)

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        plan = Plan(seed, chance.randint(2, 3), [])
        servers = chance.choice([3, 3, 3, 3, 4, 5])
        for process in range(plan.processes):
            for _ in range(chance.choice([1, 1, 2])):
                options = {"expire": chance.choice([0.6, 1.0, 3.0]), "auto_renewal": chance.random() < 0.8}
                rounds = [
                    Round(
                        chance.choice([None, None, 0.0, 0.4, 2.0]),
                        chance.choice([0.0, 0.01, 0.2, 1.0, 4.0]) * chance.uniform(0.5, 1.0),
                        chance.choice([1.0, MOST_EXTENDED, 0.5]) if chance.random() < 0.1 else None,
                        chance.choice([0.0, 0.001, 0.1]) if chance.random() < 0.7 else 0.0,
                    )
                    for _ in range(chance.choice([1, 1, 2, 3]))
                ]
                plan.threads.append(ThreadPlan(process, chance.uniform(0, 0.3), options, rounds))
        draw_faults(chance, plan, ["freeze", "cut", "kill"], ())
        if plan.faulty_until:
            cls._draw_faults_of_servers(chance, plan, servers)
        drift = 0.0 if plan.calm else chance.choice([0.0, DRIFT])
        plan.options["rates"] = [1 + drift * chance.choice([-1, 0, 1]) for _ in range(servers)]
        return plan

    @staticmethod
    def _draw_faults_of_servers(chance: random.Random, plan: Plan, servers: int) -> None:
        # The promise: a server that lost its data stays away for one expiry.
        away = 1.02 * MOST_EXTENDED * max(thread.options["expire"] for thread in plan.threads)
        plan.faults[:] = [
            fault._replace(process=chance.randrange(plan.processes * servers)) if fault.what == "cut" else fault
            for fault in plan.faults
        ]
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            what, seconds = chance.choice(
                [
                    ("silence", 0.2),
                    ("silence", 1.0),
                    ("silence", 4.0),
                    ("restart", 0.01),
                    ("restart", 1.0),
                    ("loss", away),
                ]
            )
            plan.faults.append(Fault(chance.uniform(0, FAULTS_UNTIL), what, chance.randrange(servers), seconds))

    async def program(self, thread: TaskThread, plan: ThreadPlan) -> None:  # type: ignore[override]
        """Acquire and release."""
        process: Machine = thread.process  # type: ignore[assignment]
        on_lost = partial(self._told, thread)
        lock = AsyncQuorumLock(process.links, NAME, on_lost=on_lost, **plan.options)  # type: ignore[arg-type]
        for step in plan.steps:
            if not await self._acquired(thread, lock, step.timeout):
                continue
            await self._hold(thread, lock, step)
            if step.pause:
                await asyncio.sleep(step.pause)

    async def _acquired(self, thread: TaskThread, lock: AsyncQuorumLock, timeout: float | None) -> bool:
        world, freezes = self.world, thread.process.freezes
        asked, alone = world.time, not self.waiting and not self.beliefs and self._is_free_everywhere()
        self.number += 1
        number = self.number
        self.waiting[thread] = Waiting(timeout, asked, lock)
        failure = None
        try:
            got = await lock.acquire(timeout=timeout)
        except LockError as error:
            failure, got = error, False
        finally:
            del self.waiting[thread]
        self.number += 1
        took = world.time - asked
        if got:
            self._begins(thread, lock._leases[asyncio.current_task()])
        else:
            world.tell(thread, f"did not get it within {timeout} s" if failure is None else f"acquire raised {failure}")
        if freezes == thread.process.freezes:
            most_well = self._well_since(thread, asked) >= self.needed
            if failure is not None and most_well:
                self.fail(f"{thread} got an error, though most servers were well: {failure}")
            if timeout == 0 and not got and most_well and alone and number + 1 == self.number:
                self.fail(f"{thread} was refused a lock that was free on most servers")
            most = (timeout or 0.0) + (LATE if most_well else 2 * SOCKET_TIMEOUT + QUIET)
            if timeout is not None and took > most:
                self.fail(f"{thread} came back after {took:.3f} s, though its timeout is {timeout} s")
        if not got:
            self._is_given_back(thread, asked)
            await asyncio.sleep(0.05)
        return got

    async def _hold(self, thread: TaskThread, lock: AsyncQuorumLock, step: Round) -> None:
        world, lease = self.world, self.beliefs[thread]
        if step.held:
            await asyncio.sleep(step.held)
        if step.extend is not None:
            try:
                await lock.extend(lease.expire * step.extend)
                world.tell(thread, f"extended by {lease.expire} s")
            except LockError as error:
                world.tell(thread, f"extend raised {error}")
                self._see_failure(thread, lock, "extend", error)
        del self.beliefs[thread]
        world.tell(thread, "releases")
        self.number += 1  # from here on, what is left may be this acquisition's, which is being released
        asked = world.time
        while not lease.ended or asyncio.current_task() in lock._leases:  # a release may be repeated
            try:
                await lock.release()
            except LockError as error:
                world.tell(thread, f"release raised {error}")
                self._see_failure(thread, lock, "release", error)
                await asyncio.sleep(0.05)
        self.number += 1
        self._is_given_back(thread, asked)
        self._is_taken()

    # What must never be seen

    def _begins(self, thread: TaskThread, lease: QuorumLease) -> None:
        """Note that the thread believes to hold the lock."""
        world = self.world
        world.tell(thread, f"holds it on {len(lease.held())} servers for {lease.expire} s")
        self.beliefs[thread], self.parts[thread] = lease, list(lease.parts.values())
        self.taken += 1
        self._see_overlap(thread, lease)

    def _stands(self, thread: TaskThread, lease: QuorumLease) -> bool:
        """Whether the holder would say so itself."""
        process = thread.process
        parts = lease.parts.values()
        held = [part for part in parts if not part._losses and process.clock() < part.deadline]
        return process.alive and lease.noted_loss is None and len(held) >= self.needed

    def _see_overlap(self, thread: TaskThread, lease: QuorumLease) -> None:
        if not self._stands(thread, lease):
            return
        for other, theirs in self.beliefs.items():
            if other is not thread and self._stands(other, theirs):
                self.fail(f"{thread} and {other} hold the lock at once")

    def _well_since(self, thread: TaskThread, since: float) -> int:
        """Return the number of servers between which and the process all has been well since then."""
        links: list[Link] = thread.process.links  # type: ignore[attr-defined]
        return sum(link.well <= since for link in links)

    def _see_failure(self, thread: TaskThread, lock: AsyncQuorumLock, what: str, error: LockError) -> None:
        if self.plan.calm and lock.renewal.auto_renewal:
            self.fail(f"{thread}: {what} raised {error}, though nothing was wrong")

    def _told(self, thread: TaskThread, lock: Any) -> None:
        """See that a reported loss is one: most of the servers still have the lock, and have said so in time."""
        lease = self.beliefs.get(thread)
        if lease is None:
            return
        held = 0
        for part in self.parts[thread]:  # the lease has given them back
            link: Link = part.server  # type: ignore[assignment]
            value = link.host.server.peek(KEYS.lock) or b""
            held += value.startswith(part.value_prefix) and link.watchdog.promised[part] > link.clock()
        self.world.tell(thread, f"was told of a loss; {held} servers have the lock")
        if held >= self.needed:
            self.fail(f"{thread} was told of a loss that there was not")

    def _is_given_back(self, thread: TaskThread, ended: float) -> None:
        """See that soon nothing of the process is left on the servers that have been well since it ended."""
        process, number, all_of = thread.process, self.number, self.world.processes
        freezes = [each.freezes for each in all_of]
        if any(each.frozen for each in all_of):  # what it has still to give back is not its fault (seed 44211921)
            return

        def look() -> None:
            alone = number == self.number and not self.waiting and not self.beliefs
            if not alone or not process.alive or [each.freezes for each in all_of] != freezes:
                return
            links: list[Link] = process.links  # type: ignore[attr-defined]
            if all(link.well <= ended for each in all_of for link in each.links):  # type: ignore[attr-defined]
                for link in links:
                    if not self._is_free(link.host):
                        self.fail(f"the lock of {thread} has ended, and something is still on {link.host}")

        self.world.at(self.world.time + GIVEN_BACK, look)

    def _is_taken(self) -> None:
        """See that somebody who waits gets the lock soon, if nothing goes wrong and nobody else has it after a loss."""
        taken = self.taken
        waiting = [(thread, call) for thread, call in self.waiting.items() if call.timeout is None]
        if not self.plan.calm or not waiting or self.beliefs:
            return

        def look() -> None:
            if self.taken == taken and all(self.waiting.get(thread) is call for thread, call in waiting):
                self.fail(f"{waiting} waited for a lock that was free for {QUIET} s")

        self.world.at(self.world.time + QUIET, look)

    def _is_free_everywhere(self) -> bool:
        return all(map(self._is_free, self.world.hosts))

    def _is_free(self, host: Host) -> bool:
        return not any(host.server.peek(key) for key in (KEYS.lock, KEYS.queue))

    def _look(self) -> None:
        """Look now and then whether losses are noticed, and whether the lock is free for too long."""
        world = self.world
        world.at(world.time + LOOK, self._look)
        for thread, lease in self.beliefs.items():
            self._see_overlap(thread, lease)
            process = thread.process
            if process.alive and not process.frozen and process.troubled < world.time:
                ends = sorted((part.deadline for part in lease.parts.values()), reverse=True)
                # The watchdog here does not look while it waits for the reply to a renewal.
                late = LOOK + max(SHORTEST_PATIENCE, lease.expire / 4)
                over = len(ends) < self.needed or process.clock() > ends[self.needed - 1] + late
                if lease.noted_loss is None and over:
                    self.fail(f"{thread} was not told that its lock has ended")
        self._see_free()

    def _see_free(self) -> None:
        """See that the lock is not free on most servers for too long, while somebody waits."""
        world = self.world
        waiting = {
            thread: call for thread, call in self.waiting.items() if thread.process.alive and not thread.process.frozen
        }
        free = 0
        for host in world.hosts:
            value = host.server.peek(KEYS.lock)
            free += host.troubled < world.time and (value is None or value.partition(b"\n")[2].startswith(b"0\n"))
        if free < self.needed:
            self.free_since = world.time
        for thread, call in waiting.items():
            links: list[Link] = thread.process.links  # type: ignore[attr-defined]
            well = sorted(link.well for link in links)[self.needed - 1]
            seconds = world.time - max(self.free_since, call.since, well)
            if seconds > PROMISED:
                self.fail(f"{thread} waits for a lock that is free for {seconds:.3f} s")

    def look_at_the_end(self) -> None:
        if self.plan.calm and self.world.time > 45:
            self.fail(f"it took {self.world.time} s")
