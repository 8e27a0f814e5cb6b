"""Virtual time, a network that fails, processes that are killed and frozen: every choice is drawn from the seed."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from django_redislock.core.base import BaseLock
from django_redislock.core.driver.effects import ScriptBatch, ScriptCall, Sleep, Subscribe, Unsubscribe, WaitForWakeup
from django_redislock.core.driver.server import Server
from django_redislock.core.driver.wakeups import POLL_INTERVAL, Waiter, Waiters
from django_redislock.core.lease import Lease
from django_redislock.core.loss import UNKNOWN
from django_redislock.core.operations import renew_call
from django_redislock.core.renewals import Renewals, patience_of
from django_redislock.exceptions import LockError

from .model_server import ModelServer

SOCKET_TIMEOUT = 5.0
EPOCH = 1_700_000_000.0
"""The server's clock at the beginning, in seconds."""


class World:
    """Everything there is in one history."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.time = 0.0
        self.running: Thread | None = None
        self.faults = 0.0
        """The probability that a request meets a fault."""
        self.server_clock = EPOCH
        """What the server's clock is ahead of `time` by."""
        self.server_until = 0.0
        """Until then the server answers nobody."""
        self.server = ModelServer(lambda: int((self.time + self.server_clock) * 1_000_000))
        self.processes: list[Process] = []
        self.story: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def tell(self, who: object, what: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.time:9.4f}  {who}: {what}")

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Have something happen then."""
        self._number += 1
        heapq.heappush(self._events, (max(time, self.time), self._number, event))

    def run(self, until: float, ended: Callable[[], bool]) -> bool:
        """Let everything happen until then, or until it has ended; tell whether it has."""
        while self._events and self._events[0][0] <= until and not ended():
            self.time, _, event = heapq.heappop(self._events)
            event()
        return ended()

    def clock(self) -> float:
        """Return what the monotonic clock of the running process says."""
        running = self.running
        return self.time if running is None else running.process.clock()

    def delay(self) -> float:
        """Return how long a packet takes."""
        return self.random.uniform(0.0001, 0.001) if self.random.random() < 0.9 else self.random.uniform(0.001, 0.05)


class Process(Server):
    """A process: its clock, its subscription, its watchdog, and whether it lives. `core` takes it for a server."""

    retry_for = 5.0

    def __init__(self, world: World, number: int, place: object) -> None:
        self.views = {}
        self.world = world
        self.name = f"process {number}"
        self.place = place
        self.offset = world.random.uniform(0, 1000)
        self.alive = True
        self.frozen = False
        self.freezes = 0
        self._missed: list[Callable[[], None]] = []
        self.room = Room(self)
        self.watchdog = SimulatedWatchdog(self)
        world.processes.append(self)

    def __repr__(self) -> str:
        return self.name

    def clock(self) -> float:
        return self.world.time + self.offset

    def soon(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen in the process, unless it is killed before, and as soon as it is not frozen."""
        self.world.at(self.world.time + seconds, partial(self._happen, event))

    def _happen(self, event: Callable[[], None]) -> None:
        if self.frozen:
            self._missed.append(event)
        elif self.alive:
            event()

    def kill(self) -> None:
        self.alive = False
        self.room.cut()
        self.world.tell(self, "killed")

    def freeze(self) -> None:
        self.frozen = True
        self.freezes += 1
        self.world.tell(self, "frozen")

    def thaw(self) -> None:
        if self.frozen and self.alive:
            self.world.tell(self, "goes on")
            self.frozen = False
            missed, self._missed = self._missed, []
            for event in missed:
                self.soon(0, event)

    # Requests

    def request(self, calls: list[ScriptCall], answer: Callable[[Any], None], patience: float = SOCKET_TIMEOUT) -> None:
        """Send scripts over a connection of their own; `answer` gets the replies, or the error."""
        world, chance = self.world, self.world.random
        fate = "well" if chance.random() >= world.faults else chance.choice(FATES)
        there, back = world.delay(), world.delay()
        if fate == "slow":
            there = patience + chance.uniform(0, 2)
        elif fate == "late":
            there = chance.uniform(0, 3)
        arrives = max(world.time + there, world.server_until)
        state = {"over": False}
        if fate != "well":
            world.tell(self, f"a request will be {fate}")

        def execute(undo: bool = False) -> None:
            replies = []
            for call in calls:
                try:
                    replies.append(world.server.run(call.script.text, call.keys, call.args))
                except ResponseError as error:
                    replies.append(error)
            if fate in ("well", "slow"):
                self.soon(back, partial(finish, replies))

        def finish(result: Any) -> None:
            if not state["over"]:
                state["over"] = True
                answer(result)

        def give_up() -> None:
            if state["over"]:
                return
            for call in calls:  # on the same connection, so after what it undoes
                if call.undo is not None and fate != "lost":
                    undo = call.undo()
                    world.at(max(arrives, world.time) + 0.0001, partial(self._undo, undo))
            finish(TimeoutError("no answer"))

        if fate not in ("lost", "refused"):
            world.at(arrives, execute)
        if fate in ("refused", "unanswered", "late"):
            broken = world.time + back if fate != "unanswered" else arrives + back
            self.soon(broken - world.time, partial(finish, ConnectionError(f"the connection broke ({fate})")))
        else:
            self.soon(patience, give_up)

    def _undo(self, call: ScriptCall) -> None:
        with suppress(ResponseError):
            self.world.server.run(call.script.text, call.keys, call.args)


FATES = ["refused", "unanswered", "late", "slow", "lost"]
"""refused: never executed, the connection breaks; unanswered: executed, the connection breaks; late: the connection breaks, and
it is executed afterwards; slow: executed after the patience is over; lost: never executed, and nobody says so."""


class SimulatedWaiter(Waiter):
    """One thread that waits for one lock."""

    __slots__ = ("stirred",)
    stirred: Callable[[], None] | None

    def interrupt(self) -> None:
        if self.stirred is not None:
            self.stirred()


class Room:
    """The waiting room of a process. Messages are heard in the order in which they were sent."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.channel = b"wake:%d" % len(process.world.processes)
        self.open = False
        self._waiters: Waiters[SimulatedWaiter] = Waiters()
        self._keep: set[SimulatedWaiter] = set()
        self._looks = False

    def register(self, lock: bytes, id: bytes, answer: Callable[[Any], None]) -> None:
        waiter = SimulatedWaiter(lock, id, self.channel)
        waiter.stirred = None
        self._waiters.add(waiter)
        self._keep.add(waiter)
        if self.open:
            answer(waiter)
            return

        def subscribed(error: RedisError | None) -> None:
            if error is not None:
                self.unregister(waiter)
                answer(error)
            else:
                answer(waiter)

        self.subscribe(subscribed)

    def subscribe(self, answer: Callable[[RedisError | None], None]) -> None:
        world, process = self.process.world, self.process
        if world.random.random() < world.faults:
            process.soon(world.delay(), partial(answer, ConnectionError("no subscription")))
            return

        def execute() -> None:
            if process.alive:
                world.server.subscribers.setdefault(self.channel, {})[self] = self._heard
            process.soon(world.delay(), done)

        def done() -> None:
            self.open = True
            self._look()
            self._waiters.wake_all()
            answer(None)

        world.at(max(world.time + world.delay(), world.server_until), execute)

    def _look(self) -> None:
        if not self._looks:
            self._looks = True
            self.process.soon(POLL_INTERVAL, self._looked)

    def _looked(self) -> None:
        self._looks = False
        if len(self._waiters):
            self._waiters.wake_pollers()
            self._look()

    def _heard(self, message: bytes) -> None:
        self.process.soon(self.process.world.delay(), partial(self._hear, message))

    def _hear(self, message: bytes) -> None:
        if self.open:
            self._waiters.dispatch([b"message", self.channel, message])

    def cut(self) -> None:
        """Break the subscription."""
        self.process.world.server.subscribers.get(self.channel, {}).pop(self, None)
        self.open = False

    def broken(self) -> None:
        """Notice that it broke: the waiters look for themselves, and one of them subscribes anew."""
        self.process.world.tell(self.process, "its subscription broke")
        self.cut()
        self._waiters.wake_all()
        self._mend()

    def _mend(self) -> None:
        def mended(error: RedisError | None) -> None:
            if error is not None:
                self._waiters.wake_pollers()
                self.process.soon(POLL_INTERVAL, self._mend)

        if len(self._waiters) and not self.open:
            self.subscribe(mended)

    def wait(self, waiter: SimulatedWaiter, until: float, poll_at: float, answer: Callable[[Any], None]) -> None:
        if poll_at < until and self._waiters.polls(waiter):
            until = poll_at
        process = self.process
        state = {"over": False}
        if not self.open:
            self._mend()
        self._look()

        def wake() -> None:
            if not state["over"]:
                state["over"] = True
                waiter.stirred = None
                answer(waiter.take_message())

        if waiter.woken:
            process.soon(0, wake)
        else:
            waiter.stirred = partial(process.soon, 0, wake)
            if until < math.inf:
                process.soon(max(0.0, until - process.clock()), wake)

    def unregister(self, waiter: SimulatedWaiter) -> None:
        self._waiters.remove(waiter)
        self._keep.discard(waiter)


class SimulatedWatchdog:
    """What `core.watchdog` does, without a thread."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._leases: dict[int, Lease] = {}
        self._looks: set[float] = set()

    def add(self, lease: Lease, renew: bool) -> None:
        lease.renewing = renew
        self._leases[id(lease)] = lease
        self.reschedule(lease)

    def reschedule(self, lease: Lease) -> None:
        seconds = max(0.0, lease.next_check - self._process.clock())
        self._process.soon(seconds + 0.0002, partial(self._look, lease))

    def remove(self, lease: Lease) -> bool:
        return self._leases.pop(id(lease), None) is not None

    def _look(self, lease: Lease) -> None:
        if id(lease) not in self._leases or lease.renewal_pending:
            return
        world, now = self._process.world, self._process.clock()
        before, world.running = world.running, Thread(self._process, "watchdog", None)
        try:
            if not Renewals._is_due(self, now, lease):  # type: ignore[arg-type]
                if id(lease) in self._leases and lease.next_check > now:
                    self.reschedule(lease)
                return
        finally:
            world.running = before
        lease.renewal_pending = True
        life = lease.expire
        self._process.request([renew_call([lease])], partial(self._answered, lease, now, life), patience_of(lease))

    def _answered(self, lease: Lease, sent: float, life: float, answer: Any) -> None:
        lease.renewal_pending = False
        world = self._process.world
        before, world.running = world.running, Thread(self._process, "watchdog", None)
        try:
            if isinstance(answer, RedisError):
                Renewals._unanswered(self, [lease], answer)  # type: ignore[arg-type]
            elif answer[0][0]:
                lease.renewed(sent, life)
            elif self.remove(lease):
                lease.note_loss(UNKNOWN)
                return
            self.reschedule(lease)
        finally:
            world.running = before


class Thread:
    """One thread of a process, which runs a program: a generator of the package's effects."""

    def __init__(self, process: Process, name: str, program: Generator[Any, Any, None] | None) -> None:
        self.process = process
        self.name = name
        self.program = program
        self.ended = False
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"{self.process} {self.name}"

    def is_alive(self) -> bool:
        return not self.ended and self.process.alive

    def start(self) -> None:
        self.process.soon(0, partial(self.go_on, None))

    def go_on(self, result: Any) -> None:
        """Give the program the result of its effect, or the error, and do what it wants next."""
        world = self.process.world
        before, world.running = world.running, self
        assert self.program is not None
        try:
            proceed = self.program.throw if isinstance(result, BaseException) else self.program.send
            effect = proceed(result)
        except StopIteration:
            self.ended = True
            return
        finally:
            world.running = before
        self._do(effect)

    def close(self) -> None:
        """End what a killed process left, without a word of it: its generators would complain when they are collected."""
        world = self.process.world
        before, world.running = world.running, self
        try:
            while self.program is not None and not self.ended:
                self.program.throw(GeneratorExit())
        except (GeneratorExit, StopIteration, RuntimeError, LockError):  # it may want to leave the room first
            self.ended = True
        finally:
            world.running = before

    def _do(self, effect: Any) -> None:
        process = self.process
        match effect:
            case ScriptCall():
                process.request([effect], self._replied)
            case ScriptBatch(calls):
                process.request(list(calls), self.go_on)
            case Subscribe(lock, id):
                process.room.register(lock, id, lambda result: process.soon(0, partial(self.go_on, result)))
            case WaitForWakeup(waiter, until, poll_at):
                process.room.wait(waiter, until, poll_at, self.go_on)
            case Unsubscribe(waiter):
                process.room.unregister(waiter)
                process.soon(0, partial(self.go_on, None))
            case Sleep(seconds):
                process.soon(seconds, partial(self.go_on, None))
            case _:
                raise NotImplementedError(effect)

    def _replied(self, result: Any) -> None:
        self.go_on(result[0] if isinstance(result, list) else result)


class SimulatedLock(BaseLock):
    """The shipped lock, driven by the world."""

    world: World

    def _acquirer(self) -> Any:
        return self.world.running
