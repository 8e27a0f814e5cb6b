"""The slots of a Cluster, its nodes, and which of them has which slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from redis.exceptions import AskError, AuthenticationError, ConnectionError, MovedError, RedisError, TimeoutError

from ... import chance
from ...clock import monotonic
from ..effects import At, AtEach, Operation, Pipeline
from ..resp import NotPrimary
from ..server import Endpoint, Server
from ..wakeups import new_channel

SLOTS = 16384
REFRESH_PAUSE = 0.5
"""Seconds between two readings of the slot table."""
TRIED = 2
"""Further nodes that are tried when the first one cannot be reached, to find out whether any can be."""
READ_SLOTS = Pipeline(((b"CLUSTER", b"SLOTS"),))
PING = Pipeline(((b"PING",),))

Address = tuple[str, int]


class NotNow(ConnectionError):
    """The Cluster cannot serve the slot at the moment, because the slot moves or a failover is under way."""


def slots_in(reply: list[Any]) -> int:
    """Return how many slots have an owner in a table, as a node sends it."""
    return sum(last + 1 - first for first, last, *_ in reply)


def no_owner(slot: int) -> NotNow:
    """Return the error for a slot that no node has."""
    return NotNow(f"CLUSTERDOWN No node of the Cluster has the slot {slot}.")


def is_unanswered(error: Any) -> bool:
    """Whether this is an error, and no answer of the node."""
    answers = (NotPrimary, AuthenticationError)
    return isinstance(error, (ConnectionError, TimeoutError)) and not isinstance(error, answers)


class NodesUnreachable(RedisError):
    """The nodes have addresses that this process cannot reach."""


class Node(Server):
    """One node of a Cluster, with its own connections and its own waiting room."""

    reached = False
    """Whether it has ever answered."""
    failed = -math.inf
    """The last time when it did not answer."""

    def __init__(self, endpoint: Endpoint, address: Address, channel: bytes, min_replicas: int = 0) -> None:
        self.address = address
        self.channel = channel
        """The channel on which this process is woken, the same at all nodes. So a waiter keeps its place in the queue
        when its slot moves, and a message that another node passes on finds it, too."""
        super().__init__(endpoint, min_replicas)

    def forget_connections(self) -> None:
        """Forget every connection without touching it: in a forked child they are the parent's."""
        super().forget_connections()
        self.room.channel = self.channel


class ClusterPlace:
    """Where a Cluster is, as far as this process knows: it is equal to another place that has a node in common.

    Clients of one Cluster share it, so that each of them may ask the nodes that another one knows.
    """

    def __init__(self, seeds: Iterable[Address]) -> None:
        self.seeds = set(seeds)
        """The nodes that the clients were given."""
        self.nodes: frozenset[Address] = frozenset()
        """The nodes of the table that was read last."""

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, ClusterPlace) and not (self.seeds | self.nodes).isdisjoint(other.seeds | other.nodes)
        )

    def __hash__(self) -> int:
        return hash(ClusterPlace)  # the nodes change

    def __str__(self) -> str:
        return "cluster {}:{}".format(*min(self.seeds))


class SlotTable:
    """Which node has which slot, as far as this process knows. Each change is one operation, so there is no lock."""

    def __init__(
        self,
        seeds: Iterable[Address],
        remap: Callable[[Address], Address] | None,
        new_node: Callable[[Address, bytes], Node],
    ) -> None:
        self.place = ClusterPlace(seeds)
        self._remap = remap
        self._new_node = new_node
        self.channel = new_channel()
        self._owners: list[Node | None] = [None] * SLOTS
        self._next_reading = -math.inf
        self.nodes: dict[Address, Node] = {}
        self.primaries: tuple[Node, ...] = ()
        self.members: tuple[Node, ...] = ()
        """The primaries and their replicas, when the table was read last."""
        self.outdated = False
        """Whether to read the table anew, as soon as that is due."""

    def node_at(self, address: Address) -> Node:
        """Return the node with this address."""
        node = self.nodes.get(address)
        return self.nodes.setdefault(address, self._new_node(address, self.channel)) if node is None else node

    def forget_connections(self) -> list[Any]:
        """Forget every connection, in a forked child; return the parent's views."""
        self.channel = new_channel()
        views = []
        for node in list(self.nodes.values()):
            views.append(node.views)
            node.channel = self.channel
            node.forget_connections()
        return views

    def known_owner(self, slot: int) -> Node | None:
        """Return the owner of the slot; None when it is unknown, or the table is to be read anew."""
        if self.outdated and monotonic() >= self._next_reading:
            return None
        return self._owners[slot]

    def last_owner(self, slot: int) -> Node | None:
        """Return the owner of the slot as it was known last; None when it never was."""
        return self._owners[slot]

    def name_of_owner(self, slot: int) -> str:
        """Return the host and the port of the owner of the slot, for messages."""
        node = self._owners[slot]
        return "of an unknown address" if node is None else ":".join(map(str, node.address))

    def find_owner(self, slot: int, patience: float | None = None) -> Operation[Node]:
        """Return the owner of the slot, after reading the table if that is necessary or due. Raises RedisError."""
        yield from self.refresh([slot], patience)
        node = self._owners[slot]
        if node is None:
            raise no_owner(slot)
        return node

    def refresh(self, slots: Iterable[int], patience: float | None = None) -> Operation[None]:
        """Read the table once, if it lacks the owner of a slot that has to be known, or if a reading is due."""
        needed = any(self._owners[slot] is None for slot in slots)
        if needed or (self.outdated and monotonic() >= self._next_reading):
            yield from self._read(needed, patience)

    def read_anew(self) -> Operation[None]:
        """Read the table. Raises RedisError."""
        return self._read(True, None)

    def _read(self, needed: bool, patience: float | None) -> Operation[None]:
        """Read the table from the first node that knows all slots; if it is `needed`, raise an error if none answers.

        Other tables are taken only if they say as much as what is known: a node that left the Cluster, or that has just
        joined it, knows no slots or some. A silent node costs the caller a socket timeout. So the second one ends the
        reading, or the first one if the table is not needed; the next reading begins with the others.
        """
        self._next_reading = monotonic() + REFRESH_PAUSE
        nodes = [*self.nodes.values(), *map(self.node_at, self.place.seeds | self.place.nodes)]
        chance.shuffle(nodes)
        failure: RedisError | None = None
        best: tuple[list[Any], Node] | None = None
        silent, known = 0, max(1, SLOTS - self._owners.count(None))
        try:
            for node in sorted(dict.fromkeys(nodes), key=lambda node: node.failed):
                try:
                    (reply,) = yield At(node, READ_SLOTS, patience)
                except RedisError as error:
                    node.failed = monotonic()
                    failure = error if failure is None or is_unanswered(failure) else failure  # an answer says more
                    silent += isinstance(error, TimeoutError)
                    if silent > needed:
                        break
                    continue
                node.reached, self.outdated = True, False
                covered = slots_in(reply)
                if covered >= known:
                    best, known = (reply, node), covered + 1
                if covered >= SLOTS:
                    break
            if best is not None:
                self._fill(*best)
            elif needed and failure is not None:
                raise failure
        finally:
            # Dated from its end, too: a reading may take longer than the pause, and each call would begin another one.
            self._next_reading = monotonic() + REFRESH_PAUSE
            del failure  # it refers to this frame

    def _fill(self, reply: list[Any], asked: Node) -> None:
        owners: list[Node | None] = [None] * SLOTS
        nodes: dict[Address, Node] = {}
        primaries: dict[Node, None] = {}
        for first, last, *places in reply:
            for number, (host, port, *_) in enumerate(places):
                node = self.node_at(self._address(host, port, asked))
                nodes[node.address] = node
                if number == 0:
                    primaries[node] = None
                    owners[first : last + 1] = [node] * (last + 1 - first)
        self._owners, self.primaries = owners, tuple(primaries)
        self.members = tuple(dict.fromkeys((*primaries, *nodes.values())))
        self.place.nodes = frozenset(nodes)
        self.nodes = {seed: self.node_at(seed) for seed in self.place.seeds} | nodes

    def _address(self, host: bytes | str | None, port: int, asked: Node) -> Address:
        """Return the address of a node that another one names; a node that does not know its own host sends none."""
        name = host.decode() if isinstance(host, bytes) else host
        address = (asked.address[0] if name in (None, "", "?") else name), port
        return address if self._remap is None else self._remap(address)

    def redirect(self, error: AskError, asked: Node) -> Node:
        """Return the node that MOVED or ASK names; note it after MOVED."""
        node = self.node_at(self._address(error.host, error.port, asked))
        if isinstance(error, MovedError):
            self._owners[error.slot_id] = node
            if node not in self.primaries:
                self.primaries += (node,)
            self.outdated = True
        return node

    def note_failure(self, failed: Iterable[Node], patience: float | None) -> Operation[None]:
        """Note that these nodes did not answer. Raises NodesUnreachable if it looks as if none could be reached."""
        silent = list(failed)
        for node in reversed(silent):  # those that were asked last had the least time: they are asked first next time
            node.failed = monotonic()
        self.outdated = True
        if any(node.reached for node in silent) or sum(node.reached for node in list(self.nodes.values())) > 1:
            return
        others = [other for other in self.primaries if not other.reached and other not in silent]
        others = others[: max(0, 1 + TRIED - len(silent))]
        answers = yield AtEach(tuple(At(other, PING, patience) for other in others))
        silent += others
        if len(silent) > 1 and all(map(is_unanswered, answers)):
            named = ", ".join(f"{host}:{port}" for host, port in (each.address for each in silent))
            raise NodesUnreachable(
                f"the Cluster names its nodes {named}, and none of them can be reached from here. Give the client an "
                "address_remap, or set cluster-announce-ip or cluster-announce-hostname of the nodes to what clients "
                "can reach"
            )
