"""Virtual time, a network that fails, killed and frozen processes: one plan says all that happens in a history."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from django_redislock.core.driver import janitor
from django_redislock.core.driver.effects import ScriptCall
from django_redislock.core.driver.server import Server

from .driver import Room, SimulatedWatchdog, Violation
from .model_server import ModelServer
from .requests import FATES, SOCKET_TIMEOUT, Trial, delay_of, execute_soon

__all__ = ["FATES", "SOCKET_TIMEOUT", "Captured", "Fault", "Plan", "Process", "ThreadPlan", "Violation", "World"]

EPOCH = 1_700_000_000.0
"""The server's clock at the beginning, in seconds."""
SETTLED = 0.7
"""Seconds after a fault until which its victim may still pause before its next try."""
MOST_EVENTS = 200_000
"""Of one history; the longest of those that the suite runs has a few thousand."""
AGAIN = 0.5
"""Seconds until a call is sent again that gives something back."""
CONSEQUENCES = SOCKET_TIMEOUT + 6
"""Seconds after a fault until which a request may still be executed, and what it was granted may end."""


class Fault(NamedTuple):
    """Something that goes wrong at a time, perhaps with a process, for so many seconds."""

    at: float
    what: str
    process: int
    seconds: float


class ThreadPlan(NamedTuple):
    """What one thread of a process does."""

    process: int
    starts: float
    options: dict[str, Any]
    steps: list[Any]


@dataclass
class Plan:
    """All choices of a history: the same plan gives the same history."""

    seed: int
    """Of the delays of packets, and of what the package itself draws at random."""
    processes: int
    threads: list[ThreadPlan]
    faults: list[Fault] = field(default_factory=list)
    rate: float = 0.0
    """The probability that a request meets a fault."""
    faulty_until: float = 0.0
    fates: dict[tuple[int, int], str] | None = None
    """What becomes of a request, by process and number, in place of `rate`."""
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)
    """Processes that are frozen when they sent a request, by process and number: for how many seconds."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong."""
        return not (self.faults or self.rate or self.fates or self.pauses)


class World:
    """Everything there is in one history."""

    single = True
    """Whether there is one server that never moves."""

    def __init__(self, plan: Plan, executed: Callable[[Process, Any, Any, Any], None]) -> None:
        self.plan = plan
        self.executed = executed
        """Is told of each script and command that the server executed: by whom, what, the value of its first key
        before, the reply."""
        self.time = 0.0
        self.running: Any = None
        self.server_clock = EPOCH
        """What the server's clock is ahead of `time` by."""
        self.silent_until = 0.0
        """Until then the server answers nobody."""
        self.down_until = 0.0
        """Until then every connection is refused."""
        self.troubled = 0.0
        """Until then something is wrong with the server."""
        self.packets = 0.0
        """Seconds that all packets took together, from when they were sent."""
        self.on_their_way = 0.0
        """Until then some of them are on their way."""
        self.epoch = 0
        """How often data was lost, or its expiry came early."""
        self._epoch_noted = 0
        self.clock_stepped = False
        self.server = ModelServer(lambda: int((self.time + self.server_clock) * 1_000_000))
        self.processes = [self.new_process(number) for number in range(plan.processes)]
        self.story: list[str] = []
        self.notes: list[dict[str, Any]] | None = None
        """The lines of the history for `tests.histories.check`, if it is to be written."""
        self.losses: dict[Any, float] = {}
        """When each loss was noted by its holder."""
        self.met: dict[tuple[int, int], str] = {}
        """The faults that requests met."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._kept: list[tuple[Any, Any]] = []
        """The state to which a failover will go back."""
        for fault in plan.faults:
            self._plan_fault(fault)

    def new_process(self, number: int) -> Process:
        """Return a process."""
        return Process(self, number)

    @property
    def servers(self) -> list[ModelServer]:
        """All servers."""
        return [self.server]

    @property
    def senders(self) -> list[Process]:
        """All that send requests."""
        return self.processes

    def tell(self, who: object, what: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.time:9.4f}  {who}: {what}")

    def note(self, event: str, **values: object) -> None:
        """Add a line to the history that is written."""
        if self.notes is not None:
            self.notes.append({"event": event, "at": self.time, **values})

    def note_fault(self, who: object, until: float, what: str, loses: bool = False) -> None:
        """Note that something goes wrong from now, and has consequences for a while after `until`."""
        names = ["a"] if loses else []
        self.note("fault", who=str(who), what=what, until=until + CONSEQUENCES, loses=names)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Have something happen then."""
        self._number += 1
        heapq.heappush(self._events, (time if time > self.time else self.time, self._number, event))

    def run(self, until: float, ended: Callable[[], bool]) -> bool:
        """Let everything happen until then, or until it has ended; tell whether it has."""
        events, pop, last = self._events, heapq.heappop, self._number + MOST_EVENTS
        while events and events[0][0] <= until:
            if self._number > last:
                raise Violation(
                    "\n".join([*self.story[-20:], f"VIOLATION: more than {MOST_EVENTS} events: a livelock"])
                )
            self.time, _, event = pop(events)
            event()
            if ended():
                return True
        return ended()

    @contextmanager
    def run_by(self, thread: Any) -> Iterator[None]:
        """Have the block run by this thread: the package reads the clock of its process."""
        before, self.running = self.running, thread
        try:
            yield
        finally:
            self.running = before

    def clock(self) -> float:
        """Return what the monotonic clock of the running process says."""
        running = self.running
        return self.time if running is None else self.time + running.process.offset

    def epoch_now(self) -> float:
        """Return the epoch in which something begins; one of its own when the request before may be of the last one."""
        return self.epoch if not self.epoch or self.time > self.troubled + 6 else -self.time

    def fate(self, process: Process, chance: float) -> str:
        """Return what becomes of the request that the process sends now."""
        plan, which = self.plan, (process.number, process.requests)
        if plan.fates is not None:
            fate = plan.fates.get(which, "well")
        elif chance < plan.rate and self.time < plan.faulty_until:
            fate = FATES[int(chance / plan.rate * len(FATES))]
        else:
            return "well"
        if fate != "well":
            self.met[which] = fate
            self.tell(process, f"its request {process.requests} will be {fate}")
        return fate

    # Faults

    def _plan_fault(self, fault: Fault) -> None:
        self.at(fault.at, partial(getattr(self, f"_{fault.what}"), fault))
        if fault.what == "failover":
            self.at(fault.at - 0.3 * fault.seconds, self._keep)

    def _kill(self, fault: Fault) -> None:
        self.processes[fault.process].kill()

    def _freeze(self, fault: Fault) -> None:
        process = self.processes[fault.process]
        process.freeze()
        self.at(self.time + fault.seconds, process.thaw)

    def _cut(self, fault: Fault) -> None:
        process = self.processes[fault.process]
        process.room.cut()
        process.soon(fault.seconds, process.room.broken)

    def _silence(self, fault: Fault) -> None:
        self.tell("server", f"silent for {fault.seconds:.3f} s")
        self.silent_until = self.time + fault.seconds
        self.trouble(self.silent_until)

    def _step(self, fault: Fault) -> None:
        self.tell("server", f"its clock steps by {fault.seconds:.3f} s")
        self.server_clock += fault.seconds
        self.clock_stepped = True
        self.epoch += fault.seconds > 0
        self.trouble(self.time + abs(fault.seconds))

    def _restart(self, fault: Fault) -> None:
        self._come_back(fault.seconds, None)

    def _loss(self, fault: Fault) -> None:
        self._come_back(fault.seconds, ({}, {}))

    def _keep(self) -> None:
        self._kept.append(deepcopy((self.server.data, self.server.ends)))

    def _failover(self, fault: Fault) -> None:
        self._come_back(fault.seconds, self._kept.pop(0))

    def _come_back(self, seconds: float, state: tuple[Any, Any] | None) -> None:
        self.tell("server", f"restarts within {seconds:.3f} s{'' if state is None else ', with other data'}")
        self.down_until = self.time + seconds
        if state is not None:
            self.server.data, self.server.ends = state
            self.epoch += 1
        self.trouble(self.down_until)
        for process in self.processes:
            process.room.cut()
            process.soon(0.01, process.room.broken)

    def trouble(self, until: float) -> None:
        """Note that something is wrong with the server until then."""
        self.troubled = max(self.troubled, until + SETTLED)
        self.note_fault("server", self.troubled, "trouble", self.epoch > self._epoch_noted)
        self._epoch_noted = self.epoch


class Captured(BaseException):
    """An operation that a method of the package gave to its server."""

    def __init__(self, operation: Any) -> None:
        self.operation = operation


class Process(Server):
    """A process: its clock, its subscription, its watchdog, and whether it lives. `core` takes it for a server."""

    retry_for = 5.0
    timeout = SOCKET_TIMEOUT
    min_replicas = 0
    captures = False
    """Whether a method is called to learn its operation only, so that nothing of it was sent."""
    settings: dict[str, Any] = {}

    def __init__(self, world: World, number: int) -> None:
        self.views = {}
        self.world = world
        self.number = number
        self.name = f"process {number}"
        self.place = world
        self.host: Any = world
        """The server that it talks to, with the faults of that server."""
        self.random = random.Random(world.plan.seed * 16 + number)
        self.offset = self.random.uniform(0, 1000)
        self.alive = True
        self.killed_at = math.inf
        self.frozen = False
        self.freezes = 0
        self.requests = 0
        self.answer: tuple[Any] | None = None
        self.troubled = 0.0
        """Until then it may suffer from a fault."""
        self._missed: list[Callable[[], None]] = []
        self.room = Room(self)
        self.watchdog = SimulatedWatchdog(self)

    def __repr__(self) -> str:
        return self.name

    def run(self, operation: Any) -> Any:
        """Hand the operation to the simulated thread, which calls again when it has the answer."""
        answer, self.answer = self.answer, None
        if answer is None:
            raise Captured(operation)
        operation.close()
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def clock(self) -> float:
        return self.world.time + self.offset

    def send_in_any_case(self, call: ScriptCall) -> None:
        """Do what the janitor does, without a thread."""

        def answered(reply: Any) -> None:
            if isinstance(reply, NoScriptError):
                self.send_in_any_case(call.with_text())
            elif janitor.is_unanswered(reply):
                self.soon(AGAIN, lambda: self.send_in_any_case(call))

        if self.alive and not self.captures:
            self.request(call, answered, patience=janitor.PATIENCE)

    def soon(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen in the process, unless it is killed before, and as soon as it is not frozen."""
        world = self.world
        world.at(world.time + seconds, partial(self._happen, event))

    def _happen(self, event: Callable[[], None]) -> None:
        if self.frozen:
            self._missed.append(event)
        elif self.alive:
            event()

    def trouble(self, seconds: float = 0.0) -> None:
        """Note that it suffers from a fault for so long."""
        self.troubled = max(self.troubled, self.world.time + seconds + SETTLED)
        self.world.note_fault(self, self.troubled, "trouble")

    def kill(self) -> None:
        self.alive = False
        self.killed_at = self.world.time
        self.room.cut()
        self.world.tell(self, "killed")
        self.world.note_fault(self, self.world.time, "killed")

    def freeze(self) -> None:
        if self.alive and not self.frozen:
            self.frozen = True
            self.freezes += 1
            self.world.note_fault(self, self.world.time, "frozen")
            self.world.tell(self, "frozen")

    def thaw(self) -> None:
        if self.frozen and self.alive:
            self.world.tell(self, "goes on")
            self.frozen = False
            self.trouble()
            missed, self._missed = self._missed, []
            for event in missed:
                self.soon(0, event)

    # Requests

    def delays(self) -> tuple[str, float, float, float]:
        """Draw what becomes of a request: always as many numbers, so that a change of one fate changes no other."""
        draw = self.random.random
        self.requests += 1
        fate = self.world.fate(self, draw())
        pause = self.world.plan.pauses.get((self.number, self.requests))
        if pause is not None:
            self.world.at(self.world.time, self.freeze)
            self.world.at(self.world.time + pause, self.thaw)
        there, back = delay_of(draw()), delay_of(draw())
        self.world.packets += there + back
        self.world.on_their_way = max(self.world.on_their_way, self.world.time + there + back)
        return fate, there, back, draw()

    def request(self, effect: Any, answer: Callable[[Any], None], patience: float = SOCKET_TIMEOUT) -> None:
        """Send scripts or commands over a connection of their own; `answer` gets the replies, or the error."""
        world = self.world
        fate, there, back, extra = self.delays()
        if fate == "well" and self.host.silent_until <= world.time >= self.host.down_until:
            world.at(world.time + there, partial(execute_soon, self, effect, answer, back))
            return
        Trial(self, effect, answer, patience, fate, there, back, extra)
