"""What a worker does with a copy of a message: the operations of `ExecutionLock` are real.

What `SingleInstanceMixin` does with them is told again here, without Celery.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from django_redislock.celery.execution_lock import AfterRelease, Delivery, ExecutionLock
from django_redislock.core.driver.effects import Sleep
from django_redislock.exceptions import LockBackendError, LockError, LockLost
from django_redislock.task_names import waiting_id

from .driver import Thread
from .history import History
from .locks import SimulatedLock
from .world import Captured, Plan

QUEUE_LIFE = 30.0
MARKER = 3600.0
MARGIN = 0.1
GRACE = 1.0


class Publish(NamedTuple):
    """One message: when and where its copies arrive, and what becomes of its body."""

    key: str
    copies: tuple[tuple[float, int], ...]
    runs: float
    retries: int
    revoked: float | None
    broken: bool
    pause: float


class SimulatedExecutionLock(SimulatedLock, ExecutionLock):
    """The shipped lock of messages and executions, driven by the world."""


class Message:
    """A message with its copies, and what became of it."""

    def __init__(self, id: str, publish: Publish, retry: int, number: int) -> None:
        self.id = id
        self.publish = publish
        self.retry = retry
        self.key = publish.key
        self.delivery = f"{waiting_id(id)}:{retry}:{number}"
        self.ran = 0
        self.over = self.refused = self.revoked = self.excused = False
        self.epoch = 0

    def __repr__(self) -> str:
        return f"{self.id}/{self.retry}"


class Body:
    """One execution of a message."""

    def __init__(self, thread: Thread, message: Message, lock: Any, epoch: float) -> None:
        self.thread, self.message, self.name, self.epoch = thread, message, lock.name, epoch
        self.lease = lock._leases[thread]

    @property
    def stands(self) -> bool:
        process = self.thread.process
        return process.alive and not self.lease._losses and process.clock() < self.lease.deadline


def call(thread: Thread, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
    """Call a method of the package that runs one operation on its server."""
    thread.process.captures = True
    try:
        return method(*args, **kwargs)
    except Captured as captured:
        operation = captured.operation
    finally:
        thread.process.captures = False
    try:
        result = yield from operation
    except LockError as error:
        result = error
    thread.process.answer = (result,)
    return method(*args, **kwargs)


class Worker(History):
    """Workers, which are publishers, too."""

    def __init__(self, plan: Plan) -> None:
        self.scope, self.policy, self.late = (plan.options[name] for name in ("scope", "policy", "late"))
        self.expire = plan.options["expire"]
        self.messages: list[Message] = []
        self.retried = itertools.count(1)
        """Numbers of the messages of retries: two runs of one message may both publish one."""
        self.bodies: list[Body] = []
        self.kept: dict[bytes, tuple[bytes, float, int]] = {}
        """By lock: the id that keeps it for the retry of a job, until when, and the epoch."""
        self.ended: dict[str, tuple[float, int]] = {}
        """By message: until when none of its copies may start, because one has ended, and the epoch."""
        self.left: set[tuple[str, int]] = set()
        """The owner id and the fence of each execution that has released its lock, or left it to its retry."""
        self.granted: set[tuple[bytes, bytes]] = set()
        """The owner id and the fence of each execution that has started."""
        self.publishing: list[str] = []
        """The keys of the messages that are just published."""
        self.published: list[str] = []
        """The keys of all messages that somebody has begun to publish, in this order."""
        self.begun: dict[Thread, Message] = {}
        """The copies that a worker has begun with."""
        self.places: dict[bytes, tuple[bytes | None, float]] = {}
        """By lock of waiting messages: its last value, and when it expires (ms)."""
        self.newest: dict[str, bytes] = {}
        """By message: the arguments that its last duplicate gave it before it began."""
        self.chance = random.Random(plan.seed)
        super().__init__(plan)

    def begins(self, thread: Thread, message: Message, lock: Any) -> Body:
        """Note that the body begins."""
        raise NotImplementedError

    def publish(self, thread: Thread, message: Message) -> Generator[Any, Any, None]:
        """Publish a message, unless it is a duplicate."""
        raise NotImplementedError

    def deliver(self, message: Message, delay: float, number: int, version: int, seen: int | None) -> None:
        """Have a copy arrive at a worker."""
        raise NotImplementedError

    def lock_of(self, thread: Thread, name: str, message: Message, **changes: Any) -> Any:
        """Return a lock of a message or an execution."""
        base = SimulatedExecutionLock.of(thread, "celery", kind="celery", expire=self.expire, auto_renewal=True)
        return base.with_name(name, label=f"task[{message.id}]", **{"details": {}, **changes})

    def lock_of_run(self, thread: Thread, name: str, message: Message, delivery: Delivery) -> Any:
        """Return the lock of an execution."""
        return self.lock_of(thread, name, message, delivery=delivery)

    def waiting_lock(self, thread: Thread, message: Message) -> Any:
        """Return the lock that the message holds while it waits."""
        name = f"celery{'' if self.scope == 'job' else '-queue'}:t:{message.key}"
        return self.lock_of(thread, name, message, id=waiting_id(message.id), expire=QUEUE_LIFE, auto_renewal=False)

    def leave_queue(self, thread: Thread, queued: Any) -> Generator[Any, Any, None]:
        """Release what the message held while it waited."""
        if queued is not None:
            try:
                yield from call(thread, queued.release_given_id)
            except LockBackendError as error:
                self.world.tell(thread, f"release raised {error}")

    def execute(self, thread: Thread, message: Message, version: int, seen: int | None) -> Generator[Any, Any, None]:
        """Do with a copy what the task class does in a worker."""
        self.begun[thread] = message
        queued = self.waiting_lock(thread, message) if self.scope in ("queued", "queued+run") else None
        if message.revoked:
            self.world.tell(thread, f"{message} was revoked")
            message.excused = True
            if self.scope != "run":
                yield from self.leave_queue(thread, self.waiting_lock(thread, message))
            return
        delivery = Delivery(waiting_id(message.id), message.delivery, True, version)
        of_message = self.scope == "queued"
        name = f"celery-message:t:{message.key}:{delivery.message}" if of_message else f"celery:t:{message.key}"
        lock = self.lock_of_run(thread, name, message, delivery)
        lock.place, lock.replaces, lock.arguments_expire = queued, True, MARKER
        try:
            acquired, holder = yield from self._acquire(thread, lock, queued)
        except LockBackendError as error:
            self.world.tell(thread, f"{message} fails: {error}")
            message.excused = True
            yield from self.leave_queue(thread, queued)
            return
        if acquired:
            yield from self._run(thread, message, lock)
        elif not (yield from self._ends_as_copy(thread, message, lock, seen)):
            yield from self._conflict(thread, message, lock, holder, queued, seen)

    def _acquire(self, thread: Thread, lock: Any, queued: Any) -> Generator[Any, Any, tuple[bool, Any]]:
        wait = 2.0 if self.policy == "wait" and queued is None else 0.0
        if (yield from lock._acquire(thread, wait)):
            return True, None
        holder = None
        if not lock.refused:
            try:
                holder = yield from lock._owner()
                if holder is None or holder.label == lock.label:
                    if (yield from lock._acquire(thread, GRACE)):
                        return True, None
                    holder = None if lock.refused else (yield from lock._owner())
            except LockBackendError as error:
                self.world.tell(thread, f"asking for the holder raised {error}")
        return False, holder

    def _run(self, thread: Thread, message: Message, lock: Any) -> Generator[Any, Any, None]:
        world, step = self.world, message.publish
        body = self.begins(thread, message, lock)
        if lock.place is not None:
            self._see_arguments(message, lock)
        yield Sleep(step.runs)
        retries = message.retry < step.retries
        keep_id, keep = "", 0.0
        if retries:
            again = Message(message.id, step, message.retry + 1, next(self.retried))
            if self.scope != "run":
                yield from self.publish(thread, again)
            else:
                self.messages.append(again)
                self.deliver(again, step.copies[0][0], step.copies[0][1], 0, None)
            if self.scope == "job" and again in self.messages:
                keep_id, keep = waiting_id(message.id), QUEUE_LIFE
        lock.ending = AfterRelease("ending", self.expire, keep_id, keep)
        if not self.late:
            lock.ending = AfterRelease("done", MARKER, keep_id, keep)
        world.tell(thread, f"{message} ends{', and will be retried' if retries else ''}")
        self.bodies.remove(body)
        left, lost = True, body.lease.noted_loss
        in_time = thread.process.clock() < body.lease.deadline  # an answer may come meanwhile (celery, seed 43144247)
        try:
            yield from lock._release(body.lease)
        except LockLost as error:
            world.tell(thread, f"release raised {error}")
            if lost is None and in_time:
                self.see_loss(body)
        except LockError as error:
            world.tell(thread, f"release raised {error}")
            left = False
        if self.late:
            yield Sleep(0.05)
            yield from self._confirm(thread, message, lock)
        message.excused = message.excused or not left

    def _see_arguments(self, message: Message, lock: Any) -> None:
        """See that a message runs with the newest arguments."""
        expected, kept_all = self.newest.get(message.delivery), message.epoch == self.world.epoch_now()
        if lock.newest != expected and kept_all and not self.world.clock_stepped:
            self.fail(f"{message} runs with the arguments {lock.newest} in place of {expected}")

    def _quietly(self, thread: Thread, lock: Any) -> Generator[Any, Any, None]:
        try:
            yield from lock._release(lock._require_lease(thread))
        except LockError as error:
            self.world.tell(thread, f"release raised {error}")

    def see_loss(self, body: Body) -> None:
        """See that an execution that released its lock was not told of a loss."""

    def _confirm(self, thread: Thread, message: Message, lock: Any) -> Generator[Any, Any, None]:
        """Mark the message when its result is stored."""
        try:
            yield from call(thread, lock.mark_processed, MARKER)
        except LockBackendError as error:
            self.world.tell(thread, f"marking {message} raised {error}")

    def _conflict(
        self, thread: Thread, message: Message, lock: Any, holder: Any, queued: Any, seen: int | None
    ) -> Generator[Any, Any, None]:
        """Refuse the message, or publish it again for later."""
        same = holder is not None and holder.label == lock.label
        again = same or self.policy == "reschedule"
        done, claimed = not again and not self.late, False
        left = not again and self.chance.random() < 0.5  # a callable policy may ask for another delivery
        try:
            yield from call(thread, lock.claim, MARKER if done else self.expire, "done" if done else "ending", left)
        except LockBackendError as error:
            self.world.tell(thread, f"claiming {message} raised {error}")
            left = False
        else:
            claimed = True
            if (yield from self._ends_as_copy(thread, message, lock, seen)):
                return
        if again:
            if queued is not None:
                yield from self._wait_on(thread, message, queued)
            yield from self._publish_again(thread, message, lock, self.chance.uniform(0.3, 0.9), None, alone=True)
            return
        self.world.tell(thread, f"{message} is refused: {holder} holds the lock")
        message.refused = True
        if message.ran and self.plan.calm:
            self.fail(f"{message} was refused though a copy of it ran")
        if self.late and claimed:
            yield from self._confirm(thread, message, lock)
        if not left:
            yield from self.leave_queue(thread, queued)

    def _wait_on(self, thread: Thread, message: Message, queued: Any) -> Generator[Any, Any, None]:
        """Take the lock under which the message waits anew."""
        try:
            yield from call(thread, queued.take_again)
        except LockBackendError as error:
            self.world.tell(thread, f"waiting on of {message} raised {error}")

    def _ends_as_copy(self, thread: Thread, message: Message, lock: Any, seen: int | None) -> Generator[Any, Any, bool]:
        """Whether a copy of the message is why it was refused; if so, it is dropped, or looks again later."""
        if lock.processed:
            self.world.tell(thread, f"a copy of {message} was processed")
            return True
        if lock.retry_in is None:
            return False
        delay, fence = lock.retry_in, None
        try:
            holder = yield from lock._owner()
            fence = holder.fence if lock.is_copy(holder) else None
        except LockBackendError as error:
            self.world.tell(thread, f"asking for the holder raised {error}")
        if fence is not None and fence == seen and not self.late:
            self.world.tell(thread, f"a copy of {message} runs")
            return True
        yield from self._publish_again(thread, message, lock, delay + MARGIN, fence, alone=False)
        return True

    def _publish_again(
        self, thread: Thread, message: Message, lock: Any, delay: float, fence: int | None, alone: bool
    ) -> Generator[Any, Any, None]:
        version = lock.delivery.version + 1
        self.world.tell(thread, f"publishes {message} again, for {delay:.3f} s later")
        self.deliver(message, delay, self.chance.randrange(self.plan.processes), version, fence)
        try:
            yield from call(thread, lock.mark_processed, MARKER, version, alone=alone)
        except LockBackendError as error:
            self.world.tell(thread, f"marking {message} raised {error}")
