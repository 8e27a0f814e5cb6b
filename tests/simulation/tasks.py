"""Histories of task messages: copies arrive in any order, one of them runs, and no other one after it has ended.

Real are the operations of `ExecutionLock` and their scripts. What `SingleInstanceMixin` and the broker do with them is
told again here, without Celery.
"""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Generator
from typing import Any

from redis.exceptions import RedisError

from django_redislock.celery.execution_lock import FINISH, PUBLISH, START
from django_redislock.core.driver.effects import Sleep
from django_redislock.core.scripts import RELEASE
from django_redislock.exceptions import LockBackendError

from .driver import Thread
from .history import draw_faults
from .worker import GRACE, MARKER, QUEUE_LIFE, Body, Message, Publish, Worker, call
from .world import Plan, Process, ThreadPlan

SCOPES = ("run", "queued", "queued+run", "job")
POLICIES = ("skip", "reschedule", "wait")
VISIBILITY = 3.0
"""Seconds after which the broker gives a message to another worker when the first one is gone."""


class CeleryHistory(Worker):
    """Some workers, which are publishers, too, and their messages."""

    kind = "celery"

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        plan = Plan(seed, chance.randint(2, 3), [])
        plan.options = {
            "scope": chance.choice(SCOPES),
            "policy": chance.choice(POLICIES),
            "late": chance.random() < 0.5,
            "expire": chance.choice([0.6, 1.0, 3.0]),
        }
        copies, retries = chance.random() < 0.6, chance.random() < 0.3
        for process in range(plan.processes):
            steps = []
            for _ in range(chance.randint(1, 3)):
                arrivals = [
                    (chance.choice([0.0, 0.01, 0.5, 2.0]) * chance.uniform(0.5, 1), chance.randrange(plan.processes))
                ]
                while copies and len(arrivals) < 3 and chance.random() < 0.6:
                    arrivals.append(
                        (chance.choice([0.0, 0.5, 2.0, 5.0]) * chance.random(), chance.randrange(plan.processes))
                    )
                steps.append(
                    Publish(
                        chance.choice("kk2"),
                        tuple(arrivals),
                        chance.choice([0.0, 0.2, 1.0, 4.0]) * chance.uniform(0.5, 1),
                        chance.choice([0, 1, 2]) if retries else 0,
                        chance.uniform(0, 1) if chance.random() < 0.05 else None,
                        chance.random() < 0.05,
                        chance.choice([0.0, 0.01, 0.5, 2.0]),
                    )
                )
            plan.threads.append(ThreadPlan(process, chance.uniform(0, 0.3), {}, steps))
        draw_faults(chance, plan)
        plan.options["replace"] = plan.options["scope"] in ("queued", "queued+run") and chance.random() < 0.5
        return plan

    # Publishing

    def program(self, thread: Thread, plan: ThreadPlan) -> Generator[Any, Any, Any]:
        """Publish messages."""
        for number, step in enumerate(plan.steps):
            message = Message(f"{thread.name[-1]}.{number}", step, 0, 0)
            yield from self.publish(thread, message)
            if step.pause:
                yield Sleep(step.pause)

    def publish(self, thread: Thread, message: Message) -> Generator[Any, Any, None]:
        self.publishing.append(message.key)
        self.published.append(message.key)
        try:
            yield from self._publish(thread, message)
        finally:
            self.publishing.remove(message.key)

    def _publish(self, thread: Thread, message: Message) -> Generator[Any, Any, None]:
        world, step, known = self.world, message.publish, message.retry > 0
        message.epoch = world.epoch
        if self.scope != "run":
            lock = self.waiting_lock(thread, message)
            others: list[Any] = [other for other in self.messages if other.key == message.key and self._is_open(other)]
            others += [key for key in self.publishing if key == message.key][1:]
            before = len(self.published)
            try:
                taken = yield from call(thread, lock.take, fresh=not known)
                if not (taken or known) and self.plan.options.get("replace"):
                    taken = not (yield from self._replace(thread, message, lock))
            except LockBackendError as error:
                world.tell(thread, f"publishing {message} raised {error}")
                yield from self._quietly(thread, lock)
                return
            if not taken and not known:
                world.tell(thread, f"{message} is a duplicate, and not published")
                # One that was published meanwhile may have run and ended already.
                others += [key for key in self.published[before:] if key == message.key]
                if self.plan.calm and not others:
                    self.fail(f"{message} was not published, though no other message of its key waited or ran")
                return
            if step.broken and not known:
                world.tell(thread, f"the broker refuses {message}")
                yield from self._quietly(thread, lock)
                return
        world.tell(thread, f"publishes {message}")
        self.messages.append(message)
        for delay, process in step.copies if not known else step.copies[:1]:
            self.deliver(message, delay, process, 0, None)
        if step.revoked is not None and not known:
            world.at(world.time + step.revoked, lambda: setattr(message, "revoked", message.ran == 0))

    def _replace(self, thread: Thread, message: Message, lock: Any) -> Generator[Any, Any, bool]:
        """Give the message that waits the arguments of this one; False when this one is to be published."""
        while True:
            holder = yield from lock._owner()
            if holder is None:
                if (yield from lock._acquire(thread, GRACE)):
                    return False
                holder = yield from lock._owner()
                if holder is None:
                    return False
            mine = str(message).encode()
            if (yield from call(thread, lock.replace_arguments, holder, mine)):
                if message.epoch == self.world.epoch and all(given[2] != mine for given in self.given.values()):
                    self.fail(f"{message} was told that {holder.label} has its arguments, which nobody has")
                self.world.tell(thread, f"{message} gave {holder.label} its arguments")
                return True

    def _is_open(self, message: Message) -> bool:
        """Whether the message may still hold something, perhaps only until its worker has released it."""
        at_work = any(copy is message and thread.is_alive() for thread, copy in self.begun.items())
        return at_work or not (message.over or message.refused or message.excused)

    def deliver(self, message: Message, delay: float, number: int, version: int, seen: int | None) -> None:
        """Have a copy arrive at a worker, or at another one when that one is gone."""
        world = self.world

        def arrive() -> None:
            self.pending -= 1
            living = [process for process in world.processes if process.alive]
            if not living:
                message.excused = True
                return
            process = world.processes[number]
            if not process.alive:
                self.deliver(message, VISIBILITY, self.chance.choice(living).number, version, seen)
                return
            thread = Thread(process, f"run {len(self.threads)}", None)
            thread.programs.append(self.execute(thread, message, version, seen))
            self.threads.append(thread)
            self._guard(thread, message, number, version, seen)
            thread.start()

        self.pending += 1
        world.at(world.time + delay, arrive)

    pending = 0
    """Copies that are on their way."""

    def __init__(self, plan: Plan) -> None:
        self.given: dict[bytes, tuple[bytes, bytes, bytes]] = {}
        """By receipt, in the order of the server: the lock key, the fence, and the arguments that a duplicate gave."""
        super().__init__(plan)

    def _guard(self, thread: Thread, message: Message, number: int, version: int, seen: int | None) -> None:
        """Let the broker deliver it again when its worker died; one acknowledged early is gone once it has begun."""

        def look() -> None:
            self.pending -= 1
            if thread.ended:
                return
            if thread.process.alive:
                watch()
            elif self.late or thread not in self.begun:
                self.deliver(message, 0.0, number, version, seen)
            else:
                message.excused = True

        def watch() -> None:
            self.pending += 1
            self.world.at(self.world.time + VISIBILITY, look)

        watch()

    def _over(self) -> bool:
        return self.pending <= 0 and super()._over()

    def begins(self, thread: Thread, message: Message, lock: Any) -> Body:
        """See that no copy of the message ran, and that nobody else runs under its lock."""
        world = self.world
        body = Body(thread, message, lock, world.epoch_now())
        world.tell(thread, f"runs {message}, fence {body.lease.fence}")
        others = [each for each in self.bodies if each.epoch == body.epoch and each.name == body.name and each.stands]
        if others and body.stands:
            self.see_others(body, others)
        message.ran += 1
        self.bodies.append(body)
        return body

    def see_others(self, body: Body, others: list[Body]) -> None:
        """See that no other body runs under the lock of this one."""
        self.fail(f"{body.message} and {others[0].message} run at once")

    def executed(self, process: Process, what: Any, before: Any, reply: Any) -> None:
        """See that no copy of a message starts after one has ended, or was refused."""
        script = getattr(what, "script", None)
        if script is START and (isinstance(reply, bytes) or (isinstance(reply, int) and reply > 0)):
            fence, _, waited, *_ = (b"%d 0 0" % reply if isinstance(reply, int) else reply).split(b" ")
            if (what.args[0], fence) in self.granted:  # an earlier call did it, perhaps by another slot than the first
                return
            self.granted.add((what.args[0], fence))
            copies = what.args[10].decode()
            kept, until, epoch = self.kept.pop(what.keys[0], (b"", 0.0, 0))
            if kept not in (b"", what.args[8]) and self.world.time < until and epoch == self.world.epoch:
                self.fail(f"{copies} starts between a run and the retry of {kept.decode()}")
            until, epoch = self.ended.get(copies, (0.0, 0))
            if self.world.time < until and epoch == self.world.epoch:
                self.fail(f"{copies} starts again, after one of its copies has ended")
            if waited == b"1" and what.args[12]:
                self._note_arguments(copies, what.keys[5], what.args[8])
        elif script is PUBLISH and what.args[0] == b"replace":
            id, fence, arguments, receipt = what.args[1], *what.args[5:]
            if before is not None and before.startswith(b"%b\n%b\n" % (id, fence)) and receipt not in self.given:
                self.given[receipt] = what.keys[0], fence, base64.b64decode(arguments)
        elif script is PUBLISH and what.args[0] == b"again" and isinstance(reply, int):
            if before is not None and before.startswith(what.args[1] + b"\n"):  # the new one keeps its arguments
                of_lock = [
                    given for given in self.given.values() if given[:2] == (what.keys[0], before.split(b"\n")[1])
                ]
                if of_lock:
                    self.given[b"kept by %d" % reply] = what.keys[0], b"%d" % reply, of_lock[-1][2]
        elif script is RELEASE:
            if self.kept.get(what.keys[0], (b"",))[0] == what.args[0]:
                del self.kept[what.keys[0]]
        elif script is FINISH and not isinstance(reply, RedisError):
            self._see_finished(what, before, reply)
        for key in getattr(what, "keys", ()):
            if b":lock:celery-queue:" in key:
                self.places[key] = self.server.peek(key), self.server.ends.get(key, math.inf)

    def _see_finished(self, what: Any, before: Any, reply: int) -> None:
        verb, expire_ms, id, _, fence, keep_id, *more = what.args
        marker = what.keys[min(4, len(what.keys) - 1)]
        if fence and reply == 1:
            self.left.add((id.decode(), int(fence)))
            kept_now = before is not None and before.startswith(b"%b\n%b\n" % (id, fence))
            if keep_id and kept_now:  # else an earlier call did it
                self.kept[what.keys[0]] = keep_id, self.world.time + QUEUE_LIFE, self.world.epoch
        if verb in (b"done", b"ending"):
            self._note_end(marker, float(expire_ms) / 1000)
        elif verb == b"refuse" and reply == 1:
            if id and self.kept.get(what.keys[0], (b"",))[0] == id:
                del self.kept[what.keys[0]]
            if more[4] == b"done":
                self._note_end(marker, MARKER)

    def _note_arguments(self, copies: str, place: bytes, id: bytes) -> None:
        """Note the newest arguments of a message that has begun, if it held its place until then."""
        value, ends = self.places.get(place, (None, 0.0))
        if value is not None and value.startswith(id + b"\n") and self.server.time_ms <= ends:
            of_lock = [given[2] for given in self.given.values() if given[:2] == (place, value.split(b"\n")[1])]
            if of_lock:
                self.newest[copies] = of_lock[-1]

    def see_loss(self, body: Body) -> None:
        lease, world = body.lease, self.world
        if (lease.id, lease.fence) in self.left and body.epoch == world.epoch and not world.clock_stepped:
            self.fail(f"{body.message} was told that it lost its lock, which it had released")

    def _note_end(self, marker: bytes, seconds: float) -> None:
        copies = marker.partition(b":done:")[2].decode()
        message = next(message for message in self.messages if message.delivery == copies)
        message.over = True
        until, epoch = self.ended.get(copies, (0.0, 0))
        earlier = until if epoch == self.world.epoch else 0.0
        self.ended[copies] = max(earlier, self.world.time + seconds), self.world.epoch

    def look_at_the_end(self) -> None:
        for message in self.messages:
            if not (message.ran or message.refused or message.revoked or message.excused):
                self.fail(f"{message} was dropped in silence")
            if self.plan.calm and message.ran > 1:
                self.fail(f"{message} ran {message.ran} times")
        if self.plan.calm:
            self.see_nothing_left(self.server)
