"""Histories of one lock: what processes do with it, what goes wrong, and what must never be seen."""

from __future__ import annotations

import itertools
import logging
import random
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from django_redislock.core import clock, records
from django_redislock.exceptions import LockError, LockLost

from .world import SOCKET_TIMEOUT, Process, SimulatedLock, Thread, World

FAULTS_UNTIL = 12.0
QUIET = 0.3
"""Seconds within which a free lock is held by somebody who waits for it, when nothing goes wrong."""


class Violation(AssertionError):
    """What must never be seen, with the history that led to it."""


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Let the package read the world's clock and ids."""
    numbers = itertools.count()
    monotonic, new_id = clock.monotonic, records.new_id
    patched = []
    for name, module in list(sys.modules.items()):
        if name.startswith("django_redislock"):
            for attribute, real, fake in (
                ("monotonic", monotonic, world.clock),
                ("new_id", new_id, lambda: f"id{next(numbers)}"),
            ):
                if getattr(module, attribute, None) is real:
                    setattr(module, attribute, fake)
                    patched.append((module, attribute, real))
    try:
        yield
    finally:
        for module, attribute, real in patched:
            setattr(module, attribute, real)


class History:
    """Some processes that want one lock."""

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        self.chance = chance = world.random
        random.seed(seed)
        self.name = "a"
        self.last_fence = 0
        self.lost = False
        """Whether a holder's lock ended before it released it."""
        self.beliefs: dict[Thread, Any] = {}
        self.waiting: dict[Thread, float | None] = {}
        self.faulty = chance.random() < 0.8
        self.kills = self.faulty and chance.random() < 0.5
        if self.faulty:
            world.faults = chance.choice([0.0, 0.02, 0.1, 0.3])
        place = object()
        self.processes = [Process(world, number, place) for number in range(chance.randint(2, 3))]
        self.threads = []
        for process in self.processes:
            for number in range(chance.choice([1, 1, 2])):
                thread = Thread(process, f"thread {number}", None)
                thread.program = self.program(thread, chance.randint(1, 4))
                self.threads.append(thread)
                world.at(chance.uniform(0, 0.3), thread.start)
        self._plan_faults()

    def _plan_faults(self) -> None:
        world, chance = self.world, self.chance
        if not self.faulty:
            return
        for _ in range(chance.randint(0, 4)):
            when, process = chance.uniform(0, FAULTS_UNTIL), chance.choice(self.processes)
            what = chance.choice(["freeze", "freeze", "cut", "pause", "kill" if self.kills else "freeze"])
            if what == "freeze":
                world.at(when, process.freeze)
                world.at(when + chance.choice([0.1, 0.4, 0.8, 2, 5, 9]) * chance.uniform(0.8, 1.2), process.thaw)
            elif what == "cut":
                world.at(when, process.room.cut)
                process.soon(when + chance.choice([0.001, 0.3, 1.5]), process.room.broken)
            elif what == "pause":
                world.at(when, lambda: self._pause_server(chance.choice([0.2, 1.0, 4.0])))
            else:
                world.at(when, process.kill)
        world.at(FAULTS_UNTIL, lambda: setattr(world, "faults", 0.0))

    def _pause_server(self, seconds: float) -> None:
        self.world.tell("server", f"silent for {seconds} s")
        self.world.server_until = self.world.time + seconds

    def program(self, thread: Thread, rounds: int) -> Generator[Any, Any, None]:
        """Acquire and release, in one of the ways that the package offers."""
        from django_redislock.core.driver.effects import Sleep

        world, chance, process = self.world, self.chance, thread.process
        lock = SimulatedLock.__new__(SimulatedLock)
        lock.world = world
        expire = chance.choice([0.3, 1.0, 3.0])
        lock.__init__(process, self.name, expire=expire, auto_renewal=chance.random() < 0.8)  # type: ignore[misc]
        for _ in range(rounds):
            timeout = chance.choice([None, None, 0.0, 0.4, 2.0])
            asked, freezes = world.time, process.freezes
            self.waiting[thread] = timeout
            try:
                got = yield from lock._acquire(thread, timeout)
            except LockError as error:
                world.tell(thread, f"acquire raised {error}")
                self._is_back(thread, timeout, asked, freezes)
                yield Sleep(chance.uniform(0, 0.2))
                continue
            self._is_back(thread, timeout, asked, freezes)
            if not got:
                world.tell(thread, f"did not get it within {timeout} s")
                continue
            self.begins(thread, lock)
            held = chance.choice([0.0, 0.01, 0.2, 1.0, 4.0]) * chance.uniform(0.5, 1.0)
            if held:
                yield Sleep(held)
            if chance.random() < 0.1:
                try:
                    yield from lock._extend(thread, chance.choice([None, expire * 2, expire / 2]))
                except LockError as error:
                    world.tell(thread, f"extend raised {error}")
            lease = self.beliefs.pop(thread)
            world.tell(thread, "releases")
            ends = lease.deadline if lease.loss is None else 0.0
            try:
                yield from lock._release(lease)
            except LockError as error:
                world.tell(thread, f"release raised {error}")
                self.lost = True
                if process.clock() < ends and isinstance(error, LockLost):
                    self.fail(f"{thread} was told of a loss that there was not")
            self._is_free(lease.fence)
            if chance.random() < 0.7:
                yield Sleep(chance.choice([0.0, 0.001, 0.1]))

    def _is_back(self, thread: Thread, timeout: float | None, asked: float, freezes: int) -> None:
        """See that an acquisition with a deadline came back in time.

        One socket timeout may pass before the last try is sent, and one in it.
        """
        del self.waiting[thread]
        took = self.world.time - asked
        if timeout is not None and freezes == thread.process.freezes and took > timeout + 2 * SOCKET_TIMEOUT + 0.2:
            self.fail(f"{thread} came back after {took:.3f} s, though its timeout is {timeout} s")

    def _is_free(self, fence: int) -> None:
        """See that somebody who waits for the lock gets it."""
        world = self.world
        waiting = [thread for thread, timeout in self.waiting.items() if timeout is None]
        if self.faulty or not waiting:
            return

        def look() -> None:
            if self.last_fence == fence and all(thread in self.waiting for thread in waiting):
                self.fail(f"{waiting} waited for a lock that was free for {QUIET} s")

        world.at(world.time + QUIET, look)

    def begins(self, thread: Thread, lock: SimulatedLock) -> None:
        """Note that the thread believes to hold the lock, and look whether anybody else does."""
        world = self.world
        lease = lock._leases[thread]
        world.tell(thread, f"holds it, fence {lease.fence}, for {lease.expire} s")
        believes = not lease._losses and thread.process.clock() < lease.deadline
        for other, theirs in list(self.beliefs.items()):
            if not other.process.alive:
                continue
            if believes and not theirs._losses and other.process.clock() < theirs.deadline:
                self.fail(f"{thread} (fence {lease.fence}) and {other} (fence {theirs.fence}) hold the lock at once")
        if lease.fence <= self.last_fence and believes:
            self.fail(f"fence {lease.fence} came after {self.last_fence}")
        self.last_fence = max(self.last_fence, lease.fence)
        self.beliefs[thread] = lease

    def fail(self, what: str) -> None:
        raise Violation("\n".join([*self.world.story[-60:], f"VIOLATION: {what}"]))

    def run(self) -> None:
        """Raise Violation when something is seen that must not be."""
        world = self.world
        with simulated(world):
            try:
                self._run()
            finally:
                for thread in self.threads:
                    thread.close()

    def _run(self) -> None:
        world = self.world
        limit = FAULTS_UNTIL + 60 if self.faulty else 60
        if not world.run(limit, self._over):
            living = [thread for thread in self.threads if thread.is_alive()]
            self.fail(f"{living} did not come to an end")
        if not self.faulty and world.time > 45:
            self.fail(f"it took {world.time} s")
        self._look_at_what_is_left()

    def _over(self) -> bool:
        return all(not thread.is_alive() for thread in self.threads) and not any(
            process.frozen and process.alive for process in self.processes
        )

    def _look_at_what_is_left(self) -> None:
        server = self.world.server
        for key in server.live_keys():
            if key not in server.ends:
                self.fail(f"{key!r} has no expiry")
            if not self.faulty and not self.lost and (b":lock:" in key or b":queue:" in key):
                self.fail(f"{key!r} is left")


def explore(seeds: Iterator[int] | range) -> int:
    """Run a history for each seed; return how many."""
    logging.getLogger("django_redislock").setLevel(logging.CRITICAL)
    number = 0
    for seed in seeds:
        try:
            History(seed).run()
        except Violation as violation:
            raise Violation(f"seed {seed}\n{violation}") from None
        number += 1
    return number


__all__ = ["SOCKET_TIMEOUT", "History", "Violation", "explore"]
