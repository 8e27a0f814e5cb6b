"""Histories of one lock in a Cluster of two nodes, between which its slot moves. The routing of calls is as shipped."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError, TryAgainError

from django_redislock.core.driver.cluster.cluster import RETRY_FOR_BY_CLUSTER, operation_of
from django_redislock.core.driver.cluster.routes import ClusterRoom, home_of, subscribe
from django_redislock.core.driver.cluster.table import SLOTS, SlotTable
from django_redislock.core.driver.effects import At, AtEach, ScriptBatch, Subscribe
from django_redislock.exceptions import LockBackendError, LockError

from .beliefs import Belief
from .driver import Room, Thread
from .history import FAULTS_UNTIL
from .hosts import Host, Link, Machine, WideWorld
from .lock_rules import KEYS
from .locks import LockHistory
from .model_server import ModelServer, Status
from .world import SOCKET_TIMEOUT, Fault, Plan, Process, World

SLOT = key_slot(KEYS.lock)
BUS = 0.001
"""Seconds that a message takes from one node to another."""


class NodeModel(ModelServer):
    """The data of a node.

    It answers as the Cluster specification says to a call for a slot that it has not, or that moves.
    """

    def __init__(self, node: NodeHost, now: Callable[[], int]) -> None:
        super().__init__(now)
        self._node = node
        self._asking = False

    def run(self, text: bytes, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> Any:
        asking, self._asking = self._asking, False
        self._us = self._now()
        node, missing = self._node, [key for key in keys if self._get(key) is None]
        if node.owns:
            if node.moves and missing:
                if len(missing) < len(keys):
                    raise TryAgainError("Multiple keys request during rehashing of slot")
                raise AskError(f"{SLOT} {node.other.address}")
        elif not (node.moves and asking):
            raise MovedError(f"{SLOT} {node.other.address}")
        elif missing and len(keys) > 1:
            raise TryAgainError("Multiple keys request during rehashing of slot")
        return super().run(text, keys, args)

    def command(self, *parts: bytes) -> Any:
        if parts[0] == b"ASKING":
            self._asking = True
            return Status(b"OK")
        if parts[0] == b"EVAL":
            number = int(parts[2])
            return self.run(parts[1], parts[3 : 3 + number], parts[3 + number :])
        if parts == (b"CLUSTER", b"SLOTS"):
            if self._node.left:
                return []
            hosts = self._node.world.hosts[:2]
            owner = next(host for host in hosts if host.owns)
            places = [[[b"node", host.number, b"id"]] for host in hosts]
            return [[0, SLOTS - 2, *places[0]], [SLOTS - 1, SLOTS - 1, *places[1]], [SLOT, SLOT, *places[owner.number]]]
        return super().command(*parts)

    def _do_publish(self, channel: bytes, message: bytes) -> int:
        """Count the listeners here; the other node passes the message on to its own."""
        world, other = self._node.world, self._node.other.server
        world.at(
            world.time + BUS, lambda: [hear(message) for hear in list(other.subscribers.get(channel, {}).values())]
        )
        return super()._do_publish(channel, message)


class NodeHost(Host):
    """A node of the Cluster."""

    world: ClusterWorld
    other: NodeHost

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number, 1.0)
        self.server = NodeModel(self, self.server._now)
        self.address = f"node:{number}"
        self.owns = number == 0
        self.moves = False
        """Whether the slot is on its way to or from here."""
        self.left = False
        """Whether it is no member any more, and knows none."""


class Node(Link):
    """A node as a process sees it."""

    reached = False
    failed = float("-inf")

    def __init__(self, owner: Machine, host: Host, address: tuple[str, int], channel: bytes) -> None:
        super().__init__(owner, host)
        self.address = address
        self.room.channel = channel
        host.links.append(self)

    def trouble(self, seconds: float = 0.0) -> None:
        """Note that the process suffers from a fault for so long, because it needs this node."""
        self.owner.trouble(seconds)


class Rooms(ClusterRoom):
    """The waiting rooms of a process at all nodes."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.table, lambda node: node.room)  # type: ignore[arg-type]
        self._member = member

    def register(self, lock: bytes, id: bytes, answer: Callable[[Any], None]) -> None:
        """Subscribe at the node of the lock."""
        self._member.drive(subscribe(self._table, Subscribe(lock, id)), answer)

    def wait(self, waiter: Any, until: float, poll_at: float, answer: Callable[[Any], None]) -> None:
        """Wait at the node that has the slot now."""
        with_clock = self._member.as_running(lambda: home_of(self._table, waiter, lambda node: node.room))
        with_clock.room.wait(waiter, until, poll_at, answer)

    def unregister(self, waiter: Any) -> None:
        """Leave the room."""
        waiter.home.room.unregister(waiter)

    def cut(self) -> None:
        """Break all subscriptions."""
        for node in self._rooms():
            node.cut()

    def broken(self) -> None:
        """Notice that they broke."""
        for node in self._rooms():
            node.broken()

    def _rooms(self) -> list[Room]:
        return [node.room for node in self._table.nodes.values()]


class Member(Machine):
    """A process that uses the Cluster."""

    world: ClusterWorld
    splits = True
    retry_for = RETRY_FOR_BY_CLUSTER

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.links = []
        self._driver = Thread(self, "driver", None)
        self.table = SlotTable([("node", 2)], None, self._new_node)  # type: ignore[arg-type]
        self.table.place.nodes = frozenset({("node", 0), ("node", 1)})  # named to another client of this process
        self.table.channel = b"wake:%d" % number
        self.room: Any = Rooms(self)

    def _new_node(self, address: tuple[str, int], channel: bytes) -> Node:
        node = Node(self, self.world.hosts[address[1]], address, channel)
        self.links.append(node)
        return node

    def as_running(self, function: Callable[[], Any]) -> Any:
        """Call a function that reads the clock."""
        with self.world.run_by(self._driver):
            return function()

    def request(self, effect: Any, answer: Callable[[Any], None], patience: float | None = None) -> None:
        if patience is None:
            self.drive(operation_of(self.table, effect), answer)
        else:  # of the watchdog, whose calls are split by slot
            batch = operation_of(self.table, ScriptBatch((effect,)), patience)
            self.drive(batch, lambda replies: answer(replies[0] if isinstance(replies, list) else replies))

    def drive(self, operation: Any, answer: Callable[[Any], None], result: Any = None) -> None:
        """Carry out an operation of the routes, and answer by its result or its error."""
        try:
            proceed = operation.throw if isinstance(result, BaseException) else operation.send
            effect = self.as_running(lambda: proceed(result))
        except StopIteration as stop:
            answer(stop.value)
            return
        except RedisError as error:
            answer(error)
            return
        resume = partial(self.drive, operation, answer)
        if isinstance(effect, AtEach):
            self._do_each(effect, resume)
        else:
            self._do_at(effect, resume)

    def _do_each(self, effect: AtEach, resume: Callable[[Any], None]) -> None:
        results: dict[int, Any] = {}

        def add(number: int, result: Any) -> None:
            results[number] = result
            if len(results) == len(effect.effects):
                resume([results[each] for each in range(len(results))])

        for number, each in enumerate(effect.effects):
            self._do_at(each, partial(add, number))
        if not effect.effects:
            resume([])

    def _do_at(self, at: At, resume: Callable[[Any], None]) -> None:
        node: Node = at.node
        if isinstance(at.effect, Subscribe):
            node.room.register(at.effect.lock, at.effect.id, resume)
        else:
            node.request(at.effect, resume, SOCKET_TIMEOUT if at.patience is None else at.patience)


class ClusterWorld(WideWorld):
    """A world with a Cluster of two nodes, and a third one without slots, which the URL names and which may leave."""

    hosts: list[NodeHost]  # type: ignore[assignment]

    def __init__(self, plan: Plan, executed: Callable[[Process, Any, Any, Any], None]) -> None:
        self.hosts = [NodeHost(self, number) for number in range(3)]
        for host in self.hosts:
            host.other = self.hosts[1 - host.number if host.number < 2 else 0]
        World.__init__(self, plan, executed)

    def new_process(self, number: int) -> Process:
        return Member(self, number)

    def _cut(self, fault: Fault) -> None:
        World._cut(self, fault)

    def _silence(self, fault: Fault) -> None:
        super()._silence(fault)
        self.trouble(self.time + fault.seconds)

    def _restart(self, fault: Fault) -> None:
        super()._restart(fault)
        self.trouble(self.time + fault.seconds)

    def _leave(self, fault: Fault) -> None:
        self.hosts[2].left = True
        self.tell(self.hosts[2], "leaves the Cluster")

    def _move(self, fault: Fault) -> None:
        """Move the slot to the other node, key by key."""
        seconds = fault.seconds
        source = next(host for host in self.hosts if host.owns)
        target = source.other
        if source.moves:
            return
        self.tell(source, f"its slot moves to {target} within {seconds:.3f} s")
        self.trouble(self.time + seconds)
        source.moves = target.moves = True
        keys = source.server.live_keys()
        random.Random(self.plan.seed).shuffle(keys)

        def migrate(key: bytes) -> None:
            if source.server.peek(key) is not None:
                target.server.data[key] = source.server.data.pop(key)
                if key in source.server.ends:
                    target.server.ends[key] = source.server.ends.pop(key)

        def end() -> None:
            for key in source.server.live_keys():
                migrate(key)
            source.moves = target.moves = source.owns = False
            target.owns = True
            self.tell(target, "has the slot")

        for number, key in enumerate(keys, 1):
            self.at(self.time + seconds * number / (len(keys) + 1), partial(migrate, key))
        self.at(self.time + seconds, end)


class ClusterHistory(LockHistory):
    """Some processes that want one lock, whose slot moves. Nothing is lost, so no move excuses anything but a delay."""

    kind = "cluster"
    may_reset = False
    world_kind = ClusterWorld
    patience = 4 * SOCKET_TIMEOUT
    """Seconds: the table may be read from two nodes that are silent, before the last try."""
    world: ClusterWorld
    server = property(
        lambda self: next(host for host in self.world.hosts if host.owns).server, lambda self, value: None
    )

    @classmethod
    def draw(cls, seed: int) -> Plan:
        plan, chance = super().draw(seed), random.Random(seed + 1)
        faults = [fault for fault in plan.faults if fault.what in ("freeze", "kill", "cut")]
        if plan.faulty_until:
            for _ in range(chance.choice([1, 1, 2, 3])):
                faults.append(Fault(chance.uniform(0, FAULTS_UNTIL), "move", 0, chance.choice([0.002, 0.1, 1.0, 3.0])))
            if chance.random() < 0.5:
                faults.append(Fault(chance.uniform(0, FAULTS_UNTIL), "leave", 2, 0.0))
            if chance.random() < 0.3:
                what, seconds = chance.choice([("silence", 0.3), ("silence", 4.0), ("restart", 0.3)])
                faults.append(Fault(chance.uniform(0, FAULTS_UNTIL), what, chance.randrange(2), seconds))
        plan.faults[:] = faults
        return plan

    def see_error(self, thread: Thread, timeout: float | None, error: LockError) -> None:
        """See that a move alone is no error: the call is tried again until it ends."""
        if isinstance(error, LockBackendError) and timeout is None and self._only_moves(RETRY_FOR_BY_CLUSTER):
            self.fail(f"{thread} got an error, though only the slot moved: {error}")

    def _see_loss(self, thread: Thread, belief: Belief) -> None:
        super()._see_loss(thread, belief)
        lease = belief.lease
        if lease._losses and lease.renewing and belief.forced_at is None and self._only_moves(lease.expire / 3):
            self.fail(f"{thread} lost its lock, though only the slot moved")

    def _only_moves(self, seconds: float) -> bool:
        """Whether nothing happens but short moves."""
        plan = self.plan
        short = all(fault.what in ("move", "leave") and fault.seconds < seconds for fault in plan.faults)
        return short and not (plan.rate or plan.fates or plan.pauses)
