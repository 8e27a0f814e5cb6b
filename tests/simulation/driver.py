"""The third driver, beside threads and asyncio: it performs the effects of operations in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import ConnectionError, RedisError, TimeoutError

from django_redislock.core.driver.effects import (
    Invoke,
    Pipeline,
    ScriptBatch,
    ScriptCall,
    Sleep,
    Subscribe,
    WaitForFuture,
    WaitForWakeup,
)
from django_redislock.core.driver.wakeups import POLL_INTERVAL, Waiter, Waiters
from django_redislock.core.lease import UNKNOWN, Lease
from django_redislock.core.operations import renew_call
from django_redislock.core.watchdog import Renewals, patience_of
from django_redislock.exceptions import LockError

from .requests import SOCKET_TIMEOUT

if TYPE_CHECKING:
    from .world import Process


class RunAt(NamedTuple):
    """What a program yields to run an operation at another server."""

    server: Any
    operation: Any


class Violation(AssertionError):
    """What must never be seen, with the history that led to it."""


class Killed(BaseException):
    """Ends the generators of a killed process. Not GeneratorExit, after which Python lets them do no more effects."""


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
        self.channel = b"wake:%d" % process.number
        self.open = False
        self._waiters: Waiters[SimulatedWaiter] = Waiters()
        self._keep: set[SimulatedWaiter] = set()
        self._looks = False

    def register(self, lock: bytes, id: bytes, answer: Callable[[Any], None]) -> None:
        waiter = SimulatedWaiter(lock, id, self.channel)
        waiter.stirred, waiter.room = None, self
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

    def admit(self, waiter: SimulatedWaiter) -> None:
        """Take in a waiter of another room, without subscribing."""
        waiter.room = self
        self._waiters.add(waiter)
        self._keep.add(waiter)
        self._look()

    def subscribe(self, answer: Callable[[RedisError | None], None]) -> None:
        process = self.process
        world, host = process.world, process.host
        fate, there, back, _ = process.delays()
        if fate != "well":
            process.trouble()
            process.soon(back, partial(answer, ConnectionError("no subscription")))
            return
        if host.silent_until > world.time + SOCKET_TIMEOUT:
            process.soon(SOCKET_TIMEOUT, partial(answer, TimeoutError("no subscription")))
            return

        def execute() -> None:
            if host.down_until > world.time:
                process.soon(back, partial(answer, ConnectionError("the server is down")))
                return
            if process.alive:
                host.server.subscribers.setdefault(self.channel, {})[self] = self._heard
            process.soon(back, done)

        def done() -> None:
            self.open = True
            self._look()
            self._waiters.wake_all()
            answer(None)

        world.at(max(world.time + there, host.silent_until), execute)

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
        self.process.soon(0.0002, partial(self._hear, message))

    def _hear(self, message: bytes) -> None:
        if self.open:
            self._waiters.dispatch([b"message", self.channel, message])

    def cut(self) -> None:
        """Break the subscription."""
        self.process.host.server.subscribers.get(self.channel, {}).pop(self, None)
        self.open = False
        self.process.trouble()

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
            self.process.trouble()
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

    late = 0.0

    def __init__(self, process: Process) -> None:
        self._process = process
        self._leases: dict[int, Lease] = {}
        self.promised: dict[Lease, float] = {}
        """Until when the server's answers allow each lease to be believed in."""

    def add(self, lease: Lease, renew: bool) -> None:
        lease.renewing = renew
        self._leases[id(lease)] = lease
        self.promised[lease] = lease.deadline
        self.reschedule(lease)

    def reschedule(self, lease: Lease) -> None:
        seconds = max(0.0, lease.next_check - self._process.clock())
        self._process.soon(seconds + 0.0002, partial(self._look, lease))

    def remove(self, lease: Lease) -> bool:
        return self._leases.pop(id(lease), None) is not None

    def _look(self, lease: Lease) -> None:
        if id(lease) not in self._leases:
            return
        world, now = self._process.world, self._process.clock()
        with world.run_by(Thread(self._process, "watchdog", None)):
            if not Renewals._is_due(self, now, lease):  # type: ignore[arg-type]
                if id(lease) in self._leases and lease.next_check > now:
                    self.reschedule(lease)
                return
        lease.renewal_pending = True
        life = lease.expire
        self.reschedule(lease)  # a substitute sees its deadline
        self._process.request(renew_call([lease]), partial(self._answered, lease, now, life), patience_of(lease))

    def _answered(self, lease: Lease, sent: float, life: float, answer: Any) -> None:
        lease.renewal_pending = False
        with self._process.world.run_by(Thread(self._process, "watchdog", None)):
            if isinstance(answer, RedisError):
                Renewals._unanswered(self, [lease], answer)  # type: ignore[arg-type]
            elif answer[0] > 0:
                lease.renewed(sent, life)
                if lease in self.promised and not lease._losses:  # else the answer came after the deadline
                    self.promised[lease] = max(self.promised[lease], sent + life)
            elif self.remove(lease):
                lease.refused(answer[0])
                self._lost(lease)
                return
            self.reschedule(lease)

    def _lost(self, lease: Lease) -> None:
        lease.lose(UNKNOWN)


class Thread:
    """One thread of a process, which runs a program: a generator of the package's effects."""

    def __init__(self, process: Process, name: str, program: Generator[Any, Any, Any] | None) -> None:
        self.process = process
        self.name = name
        self.programs = [] if program is None else [program]
        """The program, and the functions and the operations at other servers that it called: they may wait, too."""
        self.places: dict[int, Process] = {}
        """The servers of those operations, by how many programs are below them."""
        self.ended = False
        self.context: Context | None = None

    def __repr__(self) -> str:
        return f"{self.process} {self.name}"

    def is_alive(self) -> bool:
        return not self.ended and self.process.alive

    def start(self) -> None:
        self.context = Context()
        self.process.soon(0, partial(self.go_on, None))

    def go_on(self, result: Any) -> None:
        """Give the program the result of its effect, or the error, and do what it wants next."""
        world, programs, context = self.process.world, self.programs, self.context
        assert context is not None
        with world.run_by(self):
            while True:
                program = programs[-1]
                try:
                    proceed = program.throw if isinstance(result, BaseException) else program.send
                    effect = context.run(proceed, result)
                except StopIteration as stop:
                    programs.pop()
                    if not programs:
                        self.ended = True
                        return
                    result = stop.value if self.places.pop(len(programs), None) else (stop.value, None)
                    continue
                except Exception as error:
                    if len(programs) == 1 or isinstance(error, Violation):
                        raise
                    programs.pop()
                    result = error if self.places.pop(len(programs), None) else (None, error)
                    continue
                if type(effect) is RunAt:
                    self.places[len(programs)] = effect.server
                    programs.append(effect.operation)
                    result = None
                    continue
                if type(effect) is not Invoke:
                    break
                result = context.run(effect.function)
                if isinstance(result, Generator):
                    programs.append(result)
                    result = None
                else:
                    result = result, None
        PERFORM[type(effect)](self, effect)

    def close(self) -> None:
        """End what a killed process left, without a word: its generators would complain when they are collected."""
        with self.process.world.run_by(self):
            for program in reversed(self.programs):
                with suppress(Killed, StopIteration, LockError, AssertionError):
                    while True:  # it may want to leave the room first
                        program.throw(Killed())
        self.ended = True

    @property
    def at(self) -> Process:
        """The server at which the effects of the program are done, as its process sees it."""
        return self.places[max(self.places)] if self.places else self.process

    def _request(self, effect: Any) -> None:
        self.at.request(effect, self.go_on)

    def _subscribe(self, effect: Subscribe) -> None:
        process = self.at
        process.room.register(effect.lock, effect.id, lambda result: process.soon(0, partial(self.go_on, result)))

    def _wait(self, effect: WaitForWakeup) -> None:
        self.at.room.wait(effect.waiter, effect.until, effect.poll_at, self.go_on)

    def _sleep(self, effect: Sleep) -> None:
        self.process.soon(effect.seconds, partial(self.go_on, None))

    def _wait_for_future(self, effect: WaitForFuture) -> None:
        future, process, state = effect.future, self.process, {"over": False}

        def finish() -> None:
            if not state["over"]:
                state["over"] = True
                self.go_on(future.result() if future.done() else None)

        future.add_done_callback(lambda _: process.soon(0, finish))
        if effect.until < math.inf:
            process.soon(max(0.0, effect.until - process.clock()), finish)


PERFORM: dict[type, Callable[[Thread, Any], None]] = {
    ScriptCall: Thread._request,
    ScriptBatch: Thread._request,
    Pipeline: Thread._request,
    Subscribe: Thread._subscribe,
    WaitForWakeup: Thread._wait,
    Sleep: Thread._sleep,
    WaitForFuture: Thread._wait_for_future,
}
