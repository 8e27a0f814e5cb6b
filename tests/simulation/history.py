"""One history of any kind: its plan, its threads, its end, and what must never be seen in it."""

from __future__ import annotations

import itertools
import logging
import random
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

from redis.exceptions import RedisError

from django_redislock.cache.lease import single_flight
from django_redislock.celery import execution_lock
from django_redislock.core import chance, clock, keys, scripts, watchdog
from django_redislock.core.driver import async_server, wakeups
from django_redislock.core.driver.effects import ScriptCall
from django_redislock.core.lease import Lease

from .driver import Thread
from .model_server import ModelServer
from .world import Fault, Plan, Process, ThreadPlan, Violation, World

FAULTS = ("freeze", "freeze", "cut", "silence", "kill")
FAULTS_OF_SERVER = ("step", "restart", "loss", "failover")
HIGHEST_LIMIT = 4
"""More than any limit of a history."""
FAULTS_UNTIL = 12.0
LIMIT = 60.0
"""Seconds after the last fault within which every thread has come to its end."""
MARK = 5
"""Arguments of an undo without a mark: all that its id has got is given back."""
LONGEST_LIFE = 31 * 86400
"""Seconds: no key may live longer, unless a lock's own expiry is longer."""


class _Now:
    """What the package's clock and ids come from: the world of the history that runs."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.numbers = itertools.count()
        self.thread = threading.get_ident()

    def monotonic(self) -> float:
        world = self.world
        if world is None or threading.get_ident() != self.thread:  # another thread of the process that tests
            return real_monotonic()
        return world.clock()

    def new_id(self) -> str:
        return f"id{next(self.numbers)}"

    def random(self) -> float:
        return next(self.numbers) * 0.618034 % 1

    def seeded(self, name: str) -> Callable[..., Any]:
        """Return a function of `chance` that draws the history's numbers, and in other threads its own."""
        real = getattr(chance, name)

        def draw(*args: Any) -> Any:
            own = self.world is not None and threading.get_ident() == self.thread
            return (getattr(random, name) if own else real)(*args)

        return draw

    def urandom(self, size: int) -> bytes:
        return b"%032x" % next(self.numbers)

    def note_loss(self, lease: Lease, cause: Any) -> bool:
        if self.world is not None and not lease._losses:
            self.world.losses[lease] = self.world.time
        return real_note_loss(lease, cause)

    def new_channel(self) -> bytes:
        assert self.world is not None
        return b"wake:%d" % self.world.running.process.number

    def thread_number(self) -> int:
        world = self.world
        return threading.get_ident() if world is None or world.running is None else id(world.running)


real_monotonic = clock.monotonic
real_note_loss = Lease.note_loss
now = _Now()


@contextmanager
def simulated() -> Iterator[None]:
    """Let the package read the clock and the ids of the history that runs; the log stays silent."""
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    log = logging.getLogger("django_redislock")
    level, now.thread = log.level, threading.get_ident()
    log.setLevel(logging.CRITICAL)
    try:
        new_id = keys.new_id
        for name, module in list(sys.modules.items()):
            if name.startswith("django_redislock"):
                if vars(module).get("monotonic") is real_monotonic:
                    replace(module, "monotonic", now.monotonic)
                if vars(module).get("new_id") is new_id:
                    replace(module, "new_id", now.new_id)
        replace(Lease, "note_loss", lambda lease, cause: now.note_loss(lease, cause))
        replace(watchdog, "report", lambda tell: tell())  # it would start a thread
        replace(single_flight.os_threads, "ident", now.thread_number)
        for name in ("random", "uniform", "shuffle"):
            replace(chance, name, now.seeded(name))
        replace(execution_lock, "os", SimpleNamespace(urandom=now.urandom))
        replace(wakeups, "new_channel", now.new_channel)
        # A message looks at all slots up to the highest limit. With 100 that took half of the time.
        replace(keys.LockKeys.slots, "__defaults__", (HIGHEST_LIMIT,))
        replace(async_server, "new_async_connection", lambda kind, settings: kind())
        yield
    finally:
        log.setLevel(level)
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)


class History:
    """What the threads of some processes do, by a plan, and what is seen of it."""

    kind: ClassVar[str]
    world_kind: ClassVar[type[World]] = World
    thread_kind: ClassVar[type[Thread]] = Thread

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.undone: dict[bytes, list[int]] = {}
        """The ids of attempts that were given up, and the data of the servers at that time."""
        self.world = self.world_kind(plan, self._see_executed)
        self.server: ModelServer = self.world.server
        self.threads: list[Thread] = []
        for number, each in enumerate(plan.threads):
            thread = self.thread_kind(self.world.processes[each.process], f"thread {number}", None)
            thread.programs.append(self.program(thread, each))
            self.threads.append(thread)

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """Draw a plan."""
        raise NotImplementedError

    def program(self, thread: Thread, plan: ThreadPlan) -> Generator[Any, Any, Any]:
        """Do the steps of a thread."""
        raise NotImplementedError

    def executed(self, process: Process, what: Any, before: Any, reply: Any) -> None:
        """See what the server did."""

    def _see_executed(self, process: Process, what: Any, before: Any, reply: Any) -> None:
        if isinstance(what, ScriptCall) and not isinstance(reply, RedisError):
            self._see_given_up(process.host.server, what)
        self.executed(process, what, before, reply)

    def _data(self) -> list[int]:
        """Return what tells the data of all servers from others, as after a loss."""
        return [id(each.data) for each in self.world.servers]

    def _see_given_up(self, server: ModelServer, call: ScriptCall) -> None:
        """See that who gave up holds nothing, from when the server has executed the undo, whatever arrives later."""
        data = self._data()
        if call.script is scripts.UNDO and len(call.args) == MARK:
            self.undone[call.args[0]] = data
        if not self.undone:
            return
        for key in call.keys:
            if b":lock:" in key:
                found = {(server.peek(key) or b"").partition(b"\n")[0]}
            elif b":queue:" in key:
                found = {entry.partition(b"\n")[2] for entry in server.data.get(key) or ()}
            else:
                continue
            for each in found & self.undone.keys():
                if self.undone[each] == data:
                    self.fail(f"{each!r} gave up, and is still there")

    def look_at_the_end(self) -> None:
        """See what is left."""

    def record(self, number: int) -> list[dict[str, Any]]:
        """Run the history, and return its lines for `tests.histories.check`. Within `simulated()`."""
        raise NotImplementedError(f"histories of kind {self.kind} are not written")

    def fail(self, what: str) -> None:
        """Say what should not have been seen; a history that is written leaves that to who reads it."""
        if self.world.notes is not None:
            self.world.tell("VIOLATION", what)
            return
        story = self.world.story
        raise Violation("\n".join([*story[-80:], f"{self.world.time:9.4f}  VIOLATION: {what}"]))

    def run(self) -> None:
        """Raise Violation when something is seen that must not be. Within `simulated()`."""
        world = self.world
        now.world, now.numbers = world, itertools.count()
        random.seed(self.plan.seed)
        try:
            for thread, each in zip(self.threads, self.plan.threads, strict=True):
                world.at(each.starts, thread.start)
            if not world.run(FAULTS_UNTIL + LIMIT, self._over):
                self.fail(f"{[thread for thread in self.threads if thread.is_alive()]} did not come to an end")
            self._look_at_the_keys()
            self.look_at_the_end()
        except RedisError as error:
            self.fail(f"a caller got {error!r} in place of an error of the package")
        finally:
            for thread in self.threads:
                thread.close()
            single_flight._flights.clear()
            single_flight._paused.clear()
            now.world = None

    def see_nothing_left(self, server: ModelServer) -> None:
        """See that no lock is held on this server, and that nobody waits for one."""
        for key in server.live_keys():
            if b":lock:" in key or b":queue:" in key or key.endswith(b"}:waits"):
                self.fail(f"{key!r} is left")

    def _over(self) -> bool:
        return not any(thread.is_alive() for thread in self.threads)

    def _look_at_the_keys(self) -> None:
        for server in self.world.servers:
            seconds = server._now() / 1_000_000
            for key in server.live_keys():
                ends = server.ends.get(key)
                if ends is None:
                    self.fail(f"{key!r} has no expiry")
                elif ends / 1000 > seconds + LONGEST_LIFE and not self.world.clock_stepped:
                    self.fail(f"{key!r} lives for {ends / 1000 - seconds:.0f} s")


def draw_faults(
    chance: random.Random, plan: Plan, kinds: Sequence[str] = FAULTS, once: Sequence[str] = FAULTS_OF_SERVER
) -> None:
    """Draw what goes wrong: in one history of five, nothing. `once`: at most one of these."""
    if chance.random() < 0.2:
        return
    plan.faulty_until = FAULTS_UNTIL
    plan.rate = chance.choice([0.0, 0.02, 0.1, 0.3])
    kills = chance.random() < 0.5
    for _ in range(chance.randint(0, 4)):
        what, process, at = chance.choice(kinds), chance.randrange(plan.processes), chance.uniform(0, FAULTS_UNTIL)
        if what == "kill" and not kills:
            what = "freeze"
        seconds = 0.0
        if what == "freeze":
            seconds = chance.choice([0.1, 0.4, 0.8, 2, 5, 9]) * chance.uniform(0.8, 1.2)
        elif what == "cut":
            seconds = chance.choice([0.001, 0.3, 1.5])
        elif what == "silence":
            seconds = chance.choice([0.2, 1.0, 4.0])
        plan.faults.append(Fault(at, what, process, seconds))
    if once and chance.random() < 0.3:
        what, at = chance.choice(once), chance.uniform(0, FAULTS_UNTIL / 2)
        if what == "step":
            seconds = chance.choice([-10.0, -2.0, -0.4, 0.4, 2.0, 10.0])
        else:
            seconds = chance.choice([0.01, 0.3, 2.0])
        plan.faults.append(Fault(at, what, 0, seconds))
