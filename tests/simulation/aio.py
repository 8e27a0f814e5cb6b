"""Histories of one lock in event loops: the shipped driver of asyncio, over connections that many tasks share."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from django_redislock.core import AsyncLock, scripts
from django_redislock.core.driver.effects import ScriptCall, Sleep
from django_redislock.core.driver.wakeups import Refusal
from django_redislock.core.lease import Lease
from django_redislock.exceptions import LockBackendError

from .driver import Thread
from .history import FAULTS_UNTIL
from .lock_rules import NAME, WOKEN
from .locks import LockHistory
from .loop import EventLoop, TaskThread
from .wire import Dialled, Wire
from .world import SETTLED, SOCKET_TIMEOUT, Fault, Plan, Process, ThreadPlan, World


class Lines:
    """The connections of a process, where a world has its subscription."""

    def __init__(self, process: TaskProcess) -> None:
        self._process = process

    @property
    def _subscribed(self) -> list[Wire]:
        return [wire for wire in self._process.wires if wire.channels and not wire.over]

    def cut(self) -> None:
        """Break the subscription."""
        for wire in self._subscribed:
            wire.deafen()
        self._process.trouble()

    def broken(self) -> None:
        """Notice that it broke."""
        for wire in self._subscribed:
            self._process.world.tell(self._process, "its subscription broke")
            wire.lose()
            self._process.subscription_lost()


class TaskProcess(Process):
    """A process with an event loop. Its watchdog has connections of its own, as that of threads."""

    loop: EventLoop
    subscription_lost: Callable[[], None]

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.wires: list[Wire] = []
        self.broke_at = -math.inf
        """When a connection of its loop broke, or could not be opened."""
        self.timeout = self.patience = SOCKET_TIMEOUT
        self.connection_class = partial(Dialled, self)
        self.refusal = Refusal()
        self.room = Lines(self)  # type: ignore[assignment]


class TaskWorld(World):
    """A world of processes with event loops."""

    def new_process(self, number: int) -> Process:
        return TaskProcess(self, number)

    def _come_back(self, seconds: float, state: tuple[Any, Any] | None) -> None:
        super()._come_back(seconds, state)
        for process in self.processes:
            for wire in process.wires:  # type: ignore[attr-defined]
                process.soon(0.01, wire.lose)


class NotingLock(AsyncLock):
    """The shipped lock; it notes the lease of its last call."""

    asked: Lease | None = None

    def _new_lease(self, acquirer: Any, id: str) -> Lease:
        self.asked = super()._new_lease(acquirer, id)
        return self.asked


class TaskLock:
    """A lock of one task, as the histories of locks call it: each operation yields what its task awaits."""

    _given_id = None

    def __init__(self, thread: Thread, name: str, **options: Any) -> None:
        self.thread = thread
        self.lock = NotingLock(thread.process, name, **options)

    @classmethod
    def of(cls, thread: Thread, name: str, **options: Any) -> TaskLock:
        """Return a lock for this task."""
        return cls(thread, name, **options)

    @property
    def asked(self) -> Lease | None:
        """The lease of the last call."""
        return self.lock.asked

    @property
    def _leases(self) -> dict[Thread, Lease]:
        return {self.thread: next(iter(self.lock._leases.values()))}

    def _acquire(self, thread: Thread, timeout: float | None) -> Generator[Any, Any, bool]:
        return (yield self.lock.acquire(timeout=timeout))  # type: ignore[no-any-return]

    def _release(self, lease: Lease) -> Generator[Any, Any, None]:
        yield self.lock.release()

    def _extend(self, thread: Thread, expire: float) -> Generator[Any, Any, None]:
        yield self.lock.extend(expire)


class AsyncHistory(LockHistory):
    """Some tasks of some loops that want one lock. Tasks are cancelled, and loops end."""

    kind = "asyncio"
    may_reset = False
    lock_kind = TaskLock  # type: ignore[assignment]
    world_kind = TaskWorld
    thread_kind = TaskThread

    def __init__(self, plan: Plan) -> None:
        self.tried: dict[bytes, float] = {}
        """When the server executed the last try, by owner id."""
        self.locks: dict[Thread, TaskLock] = {}
        self.cancelled: set[Thread] = set()
        super().__init__(plan)
        self.processes: list[TaskProcess] = self.world.processes  # type: ignore[assignment]
        for process in self.processes:
            process.loop = EventLoop(process)
            process.subscription_lost = partial(self._see_waiters_woken, process)
        for thread in self.threads:
            thread.loop = thread.process.loop  # type: ignore[attr-defined]
        for at, number in plan.options.get("cancelled", ()):
            if number < len(self.threads):
                thread = self.threads[number]
                self.world.at(at, partial(thread.process.soon, 0, partial(self._cancel, thread)))
        for at, number in plan.options.get("ends", ()):
            process = self.processes[number]
            self.world.at(at, partial(process.soon, 0, partial(self._end_loop, process)))

    @classmethod
    def draw(cls, seed: int) -> Plan:
        plan, chance = super().draw(seed), random.Random(seed + 1)
        for thread in list(plan.threads):
            if chance.random() < 0.5:  # more tasks on one connection
                rounds = [cls.draw_round(chance, False) for _ in range(chance.randint(1, 2))]
                plan.threads.append(ThreadPlan(thread.process, chance.uniform(0, 0.3), thread.options, rounds))
        until = chance.choice([1.0, 4.0, FAULTS_UNTIL])
        many = chance.choice([0, 0, 1, 2, 6])
        plan.options["cancelled"] = []
        for number in chance.choices(range(len(plan.threads)), k=many):
            early = plan.threads[number].starts + chance.uniform(0, 0.01)
            plan.options["cancelled"].append((chance.choice([early, chance.uniform(0, until)]), number))
        plan.options["ends"] = []
        if chance.random() < 0.2:
            at = chance.uniform(0, until)
            plan.options["ends"].append((at, chance.randrange(plan.processes)))
            if plan.faulty_until and chance.random() < 0.5:  # while the server does not answer
                plan.faults.append(
                    Fault(max(0.0, at - chance.uniform(0, 0.3)), "silence", 0, chance.choice([1.0, 4.0]))
                )
        if plan.faulty_until and chance.random() < 0.2:  # nothing but subscriptions breaks
            plan.rate, plan.faults[:] = 0.0, []
            for _ in range(3):
                lasts = chance.choice([0.001, 0.3, 1.5])
                plan.faults.append(Fault(chance.uniform(0, until), "cut", chance.randrange(plan.processes), lasts))
        return plan

    def run(self) -> None:
        try:
            super().run()
        finally:
            for process in self.processes:
                for view in process.views.values():
                    view._connections.clear()  # its watch of the loop, which is destroyed, would wait for them

    # The tasks

    async def program(self, thread: Thread, plan: ThreadPlan) -> None:  # type: ignore[override]
        """Await what the program of a thread yields. A task that was cancelled releases what it holds, and ends."""
        steps: Any = super().program(thread, plan)
        proceed, result = steps.send, None
        while True:
            try:
                step = proceed(result)
            except StopIteration:
                return
            try:
                if type(step) is Sleep:
                    if thread not in self.cancelled:
                        await asyncio.sleep(step.seconds)
                    result = None
                else:
                    result = await step
                proceed = steps.send
            except asyncio.CancelledError:
                self.cancelled.add(thread)
                if thread not in self.beliefs:  # it acquires or releases
                    steps.close()
                    raise
                if type(step) is Sleep:
                    proceed, result = steps.send, None
                else:
                    proceed, result = steps.throw, LockBackendError(NAME, "cancelled")
            except Exception as error:
                proceed, result = steps.throw, error

    def _acquired(self, thread: Thread, lock: Any, timeout: float | None) -> Generator[Any, Any, bool]:
        if thread in self.cancelled:
            raise asyncio.CancelledError
        self.locks[thread] = lock
        return (yield from super()._acquired(thread, lock, timeout))

    def _cancel(self, thread: Any) -> None:
        for task in thread.loop._tasks:
            if task.get_coro() is thread.programs[0] and not task.done():
                self.world.tell(thread, "is cancelled")
                task.cancel()

    def _end_loop(self, process: TaskProcess) -> None:
        """Do what `asyncio.run` does at its end."""
        self.world.tell(process, "its loop ends")
        self.looks.append(process)

        async def end() -> None:
            own = asyncio.current_task()
            tasks = [task for task in process.loop._tasks if not task.done() and task is not own]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for view in list(process.views.values()):
                if view._loop_watch is not None:
                    await view._loop_watch.aclose()
            self.looks.remove(process)

        for thread in self.threads:
            if thread.process is process:
                self.cancelled.add(thread)
        process.loop.create_task(end())

    def _over(self) -> bool:
        on_their_way = any(wire.busy for process in self.processes for wire in process.wires)
        return super()._over() and not on_their_way

    # The rules

    def executed(self, process: Process, what: Any, before: Any, reply: Any) -> None:
        if isinstance(what, ScriptCall) and what.script is scripts.ACQUIRE:
            self.tried[what.args[0]] = self.world.time
        super().executed(process, what, before, reply)

    def _see_waiters_woken(self, process: TaskProcess) -> None:
        """See that all waiters of a process try when its subscription is lost: messages may be, too."""
        world, lost = self.world, self.world.time
        if self.plan.rate or any(fault.what != "cut" for fault in self.plan.faults):
            return
        waiting = {
            thread: self.locks[thread].lock.asked.id.encode() for thread in self.waiting if thread.process is process
        }

        def look() -> None:
            for thread, id in waiting.items():
                if thread in self.waiting and thread not in self.cancelled and self.tried.get(id, 0.0) < lost:
                    since = self.waiting[thread][1]
                    if since < lost - SETTLED:
                        self.fail(f"{thread} did not try within {WOKEN} s after its subscription was lost")

        world.at(lost + WOKEN, look)
