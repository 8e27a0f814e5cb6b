"""Histories of one lock on a primary with a replica: `min_replicas=1`, and failovers in which nothing may get lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, RedisError, TimeoutError

from django_redislock.core.driver.effects import Effect, Operation, ScriptCall
from django_redislock.core.driver.replicated import ReplicatedServer, Wait, grants, judged, with_wait
from django_redislock.core.driver.resp import NotPrimary

from .history import FAULTS_UNTIL
from .hosts import Host
from .locks import LockHistory, SimulatedLock
from .model_server import ModelServer
from .world import SOCKET_TIMEOUT, Captured, Fault, Plan, Process, World

T = TypeVar("T")
LAG = 2.0
"""Seconds: `min-replicas-max-lag`, where `min-replicas-to-write` is set."""
FAILOVERS = ("killed", "hangs", "planned", "parted")


class ReplicatedModel(ModelServer):
    """The data of a host: only a primary takes scripts, and its replica gets what they wrote."""

    def __init__(self, host: ReplicatedHost, now: Callable[[], int]) -> None:
        super().__init__(now)
        self._host = host

    def run(self, text: bytes, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> Any:
        self._host.check()
        reply = super().run(text, keys, args)
        self._host.wrote(keys)
        return reply


class Confirmation:
    """WAIT: how many replicas have what was written before."""

    def __init__(self, host: ReplicatedHost, seconds: float) -> None:
        self._host, self._offset = host, host.offset
        self._answer: Callable[[Any], None] | None = None
        self._result: Any = None
        host.waits.append(self)
        host.world.at(host.world.time + seconds, self.end)
        self.look()

    def look(self) -> None:
        """See whether the replica has it."""
        if self._host.acknowledged >= self._offset:
            self.end()

    def end(self) -> None:
        host = self._host
        if self not in host.waits:
            return
        host.waits.remove(self)
        self._result = int(host.acknowledged >= self._offset)
        if max(host.down_until, host.silent_until) > host.world.time or not host.primary:
            self._result = ConnectionError("the connection broke while it waited for the replica")
        if self._answer is not None:
            self._answer(self._result)

    def then(self, answer: Callable[[Any], None]) -> None:
        """Call this with the number, or the error, when it is known."""
        if self in self._host.waits:
            self._answer = answer
        else:
            answer(self._result)


class ReplicatedHost(Host):
    """A primary, or the replica of the other host."""

    world: ReplicatedWorld
    other: ReplicatedHost

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number, 1.0)
        self.server = ReplicatedModel(self, self.server._now)
        self.primary = number == 0
        self.synced = number == 1
        """Of a replica: whether it gets what its primary writes."""
        self.lost_at: float | None = None
        """Of a primary: since when it has no replica."""
        self.offset = self.acknowledged = 0
        self.waits: list[Confirmation] = []
        self._next = 0.0

    def check(self) -> None:
        """Raise the error of a server that takes no scripts."""
        if not self.primary:
            raise NotPrimary("READONLY You can't write against a read only replica.")
        lost_at = self.lost_at
        if self.world.plan.options["min_to_write"] and lost_at is not None and self.world.time > lost_at + LAG:
            raise NotPrimary("NOREPLICAS Not enough good replicas to write.")

    def wait(self, effect: Wait) -> Confirmation:
        """Begin to wait for the replica."""
        return Confirmation(self, int(effect.request.split(b"\r\n")[6]) / 1000)

    def wrote(self, keys: tuple[bytes, ...]) -> None:
        """Send the replica what was written."""
        self.offset += 1
        if self.other.synced:
            world, server = self.world, self.server
            state = [(key, copy(server.data.get(key)), server.ends.get(key)) for key in keys]
            self._next = max(self._next, world.time + world.delay())
            world.at(self._next, partial(self.other.apply, self.offset, state))

    def apply(self, offset: int, state: list[tuple[bytes, Any, int | None]]) -> None:
        """Take over what the primary wrote."""
        if self.primary or not self.synced:
            return
        for key, value, ends in state:
            self.server._drop(key)
            if value is not None:
                self.server.data[key] = value
            if ends is not None:
                self.server.ends[key] = ends
        self.world.at(self.world.time + self.world.delay(), partial(self.other.acknowledge, offset))

    def acknowledge(self, offset: int) -> None:
        """Note that the replica has everything until there."""
        if self.primary and self.other.synced:
            self.acknowledged = max(self.acknowledged, offset)
            for wait in list(self.waits):
                wait.look()

    def follow(self) -> None:
        """Become the replica of the other host, with its data."""
        self.world.tell(self, f"is the replica of {self.other}")
        self.primary, self.synced = False, True
        for wait in list(self.waits):
            wait.end()
        self.server.data, self.server.ends = deepcopy((self.other.server.data, self.other.server.ends))
        self.other.lost_at = None
        self.break_links()
        self.world.at(self.world.time + self.world.delay(), partial(self.other.acknowledge, self.other.offset))

    def lead(self) -> None:
        """Become a primary, without a replica."""
        self.world.tell(self, "is the primary")
        self.primary, self.synced = True, False
        self.lost_at = self.other.lost_at = self.world.time
        self.offset, self.acknowledged = 1, 0

    def break_links(self) -> None:
        for client in self.world.processes:
            if client.host is self:
                client.room.cut()
                client.soon(0.01, client.connect)  # type: ignore[attr-defined]


class Replied(Process):
    """What `ReplicatedServer` builds on."""

    renewed: tuple[Any] | None = None

    def renew(self, call: Any, patience: float) -> Any:
        """Return the reply to the renewal that was sent."""
        reply, self.renewed = self.renewed, None
        if reply is None:
            raise Captured(call)
        if isinstance(reply[0], Exception):
            raise reply[0]
        return reply[0]


class Client(ReplicatedServer, Replied):
    """A process: each new connection leads to the primary that the Sentinels name."""

    world: ReplicatedWorld

    def __init__(self, world: World, number: int) -> None:
        Process.__init__(self, world, number)
        self.host = self.world.hosts[0]
        self.min_replicas = 1
        self.timeout = SOCKET_TIMEOUT

    def connect(self) -> None:
        """Open connections anew."""
        host = self.world.leader
        if self.world.time < self.world.parted_until and self.number % 2 == 0:
            host = self.world.hosts[1 - host.number]  # it is on the side of the former primary
        if host is not self.host:
            self.room.cut()
            self.host = host
            self.world.tell(self, f"is connected to {host}")
        if not self.room.open:
            self.room.broken()

    def request(self, effect: Any, answer: Callable[[Any], None], patience: float = SOCKET_TIMEOUT) -> None:
        if type(effect) is ScriptCall and effect.script.granted is not None:  # of the watchdog
            self._renew(effect, answer, patience)
        else:
            super().request(effect, partial(self._answered, answer), patience)

    def _answered(self, answer: Callable[[Any], None], reply: Any) -> None:
        replies = reply if isinstance(reply, list) else [reply]
        if any(isinstance(each, (ConnectionError, TimeoutError)) for each in replies):
            self.connect()
        if isinstance(replies[-1], Confirmation):
            replies[-1].then(lambda number: self.soon(0, partial(answer, [*replies[:-1], number])))
        else:
            answer(reply)

    def _renew(self, call: ScriptCall, answer: Callable[[Any], None], patience: float) -> None:
        """Do what `ReplicatedServer.renew` does: it is called again when it has the reply."""
        try:
            reply: Any = self.renew(call, patience)
        except Captured as captured:

            def resume(result: Any) -> None:
                self.renewed = (result,)
                self._renew(call, answer, patience)

            super().request(captured.operation, partial(self._answered, resume), patience)
            return
        except RedisError as error:
            reply = error
        answer(reply)


class ReplicatedWorld(World):
    """A world with a primary, its replica and Sentinels."""

    single = False

    def __init__(self, plan: Plan, executed: Callable[[Process, Any, Any, Any], None]) -> None:
        self.hosts = [ReplicatedHost(self, number) for number in range(2)]
        self.hosts[0].other, self.hosts[1].other = self.hosts[1], self.hosts[0]
        self.leader = self.hosts[0]
        """The host that the Sentinels name."""
        self.parted_until = 0.0
        self._chance = random.Random(plan.seed)
        super().__init__(plan, executed)

    def new_process(self, number: int) -> Process:
        return Client(self, number)

    @property
    def servers(self) -> list[ModelServer]:
        return [host.server for host in self.hosts]

    def delay(self) -> float:
        """Draw how long the way to the replica takes."""
        return self._chance.choice([0.0002, 0.001] if self.plan.calm else [0.0002, 0.001, 0.02, 0.2])

    def _silence(self, fault: Fault) -> None:
        self.leader.silence(fault.seconds)
        self.trouble(self.time + fault.seconds)

    def _killed(self, fault: Fault) -> None:
        self._fail_over(lambda former: former.restart(fault.seconds + 1), fault)

    def _hangs(self, fault: Fault) -> None:
        self._fail_over(lambda former: former.silence(fault.seconds), fault)

    def _planned(self, fault: Fault) -> None:
        self._fail_over(lambda former: None, fault)

    def _parted(self, fault: Fault) -> None:
        def part(former: ReplicatedHost) -> None:
            self.tell(former, "is cut off, with every second process")
            self.parted_until = self.time + 1.0 + fault.seconds
            former.other.synced, former.lost_at = False, self.time
            for client in self.processes:
                if client.number % 2:
                    client.soon(0.0, client.room.cut)
                    client.host = former.other

        self._fail_over(part, fault)

    def _fail_over(self, begin: Callable[[ReplicatedHost], None], fault: Fault) -> None:
        """Let the replica become the primary, and the former primary its replica some seconds later."""
        former = self.leader
        if not former.other.synced or former.other.down_until > self.time:  # the Sentinels would not choose it
            return
        self.trouble(self.time + 1.5 + fault.seconds)
        self.tell(former, "fails: a failover begins")
        begin(former)

        def promote() -> None:
            self.leader = former.other
            former.other.lead()

        def follow() -> None:
            former.silent_until = min(former.silent_until, self.time)
            former.down_until = min(former.down_until, self.time)
            former.follow()

        self.at(self.time + self._chance.choice([0.001, 0.5]), promote)
        self.at(self.time + 1.0 + fault.seconds, follow)


def confirmed(operation: Operation[T]) -> Operation[T]:
    """Do what the operation does, with WAIT behind each call that may grant a lock.

    The driver of a `ReplicatedServer` does the same.
    """
    wait = Wait(1, SOCKET_TIMEOUT)
    step: Callable[[], Effect] = partial(next, operation)
    while True:
        try:
            effect = step()
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        try:
            result = judged(effect, wait, (yield with_wait(effect, wait))) if grants(effect) else (yield effect)
        except BaseException as error:
            step = partial(operation.throw, error)
        else:
            step = partial(operation.send, result)


class ReplicatedLock(SimulatedLock):
    """The shipped lock with `min_replicas=1`."""

    def _acquire(self, *args: Any) -> Any:
        return confirmed(super()._acquire(*args))

    def _release(self, lease: Any) -> Any:
        return confirmed(super()._release(lease))

    def _extend(self, acquirer: Any, expire: Any) -> Any:
        return confirmed(super()._extend(acquirer, expire))


class ReplicatedHistory(LockHistory):
    """Some processes that want one lock, which a replica must confirm. No failover excuses two holders."""

    kind = "replicas"
    may_reset = False  # on the former primary it would have two meanings
    lock_kind = ReplicatedLock
    written_slack = 1.0
    """The last call begins when the one before is answered: two confirmations, of 0.2 s each way, and two packets of
    0.05 s for each."""
    world_kind = ReplicatedWorld
    world: ReplicatedWorld
    server = property(lambda self: self.world.leader.server, lambda self, value: None)

    @classmethod
    def draw(cls, seed: int) -> Plan:
        plan, chance = super().draw(seed), random.Random(seed + 1)
        plan.options["min_to_write"] = chance.random() < 0.5
        faults = [fault for fault in plan.faults if fault.what in ("freeze", "kill", "cut", "silence")]
        if plan.faulty_until:
            for _ in range(chance.choice([0, 1, 1, 2])):
                seconds = chance.choice([0.1, 1.0, 3.0, 9.0])
                faults.append(Fault(chance.uniform(0, FAULTS_UNTIL), chance.choice(FAILOVERS), 0, seconds))
        plan.faults[:] = faults
        return plan

    def _see_turn(self, call: ScriptCall, before: bytes | None) -> None:
        """See nothing: one who came later may be earlier in the queue.

        The reason: who is refused joins the queue when the replica has answered, too.
        """

    def _see_given_up(self, server: ModelServer, call: ScriptCall) -> None:
        """See nothing: the note may be at the former primary only."""

    def _look_for_remains(self, thread: Any, lease: Any) -> None:
        """See nothing, for the same reason."""
