"""The drivers of a Cluster for threads and for asyncio: each sends a call to its node, by the driver of that node."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from redis import ConnectionPool, Redis
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, RedisError, TimeoutError, TryAgainError

from .. import effects, idle, os_threads
from ..async_server import AsyncServer, async_server_of, leave_closed_loops
from ..effects import (
    At,
    AtEach,
    Call,
    Effect,
    Operation,
    Pipeline,
    ScriptBatch,
    ScriptCall,
    Subscribe,
    WaitForWakeup,
    Within,
    without_frames,
)
from ..kinds import inherited_settings, nodes_of
from ..replicated import ReplicatedNode
from ..server import Endpoint, Server, endpoint_of
from ..wakeups import new_channel
from .routes import ClusterRoom, home_of, route, route_commands, route_each, subscribe
from .table import Address, ClusterPlace, Node, SlotTable

RETRY_FOR_BY_CLUSTER = 40.0
"""Longer than a failover takes: by default the nodes wait 15 s before they consider a primary down."""

_inherited: list[Any] = []
"""The parent's views, kept because their destructors would disturb the parent's connections."""


class Cluster(Server):
    """A Cluster as this process sees it, shared by all clients with the same settings."""

    splits = True

    def __init__(self, client: Any, min_replicas: int = 0) -> None:
        """Take over the settings of a `redis.RedisCluster` or a `redis.asyncio.RedisCluster`, or those of a `Cluster`.

        It opens no connection. So many replicas of each node must confirm a lock.
        """
        self.nodes_like: tuple[Any, ...] = client.nodes_like if isinstance(client, Cluster) else _nodes_like(client)
        kind, settings, addresses, remap = self.nodes_like
        self.table = SlotTable(addresses, remap, partial(_new_node, min_replicas, kind, settings))
        self.remap = remap
        self.room: Any = ClusterRoom(self.table, lambda node: node.room)
        node = self.table.node_at(min(addresses))
        settings = {name: value for name, value in node.settings.items() if name not in ("host", "port")}
        super().__init__(Endpoint(self.table.place, node.connection_class, settings, node.limit), min_replicas)

    def forget_connections(self) -> None:
        """Forget every connection without touching it: in a forked child they are the parent's."""
        self.views = {}
        _inherited.extend(filter(None, self.table.forget_connections()))

    @property
    def retry_for(self) -> float:
        """Seconds for which calls are repeated while a node cannot be reached, or until the caller's deadline."""
        return RETRY_FOR_BY_CLUSTER if effects.retry_for is None else effects.retry_for

    def call(self, call: Call) -> Any:
        """Run a script, several scripts or commands, each at the node of its keys."""
        return self.carry_out(operation_of(self.table, call))

    def send_ahead(self, call: ScriptCall) -> Callable[[], Any] | None:
        """Send a script on a connection that is open and free, as `Server.send_ahead` does; None when there is none."""
        node = self.table.known_owner(key_slot(call.keys[0]))
        receive = None if node is None else node.send_ahead(call)
        return None if receive is None else partial(self._receive_from_owner, receive, call)

    def _receive_from_owner(self, receive: Callable[[], Any], call: ScriptCall) -> Any:
        try:
            return receive()
        except (AskError, TryAgainError, ClusterDownError):
            return self.call(call)

    def renew(self, call: Any, patience: float) -> Any:
        """Run a renewal, or several ones, and wait for each node's reply for so many seconds."""
        return self.carry_out(operation_of(self.table, call, patience))

    def all_nodes(self) -> list[Node]:
        """Ask for the nodes, and return all: the primaries first. Raises RedisError when none answers."""
        self.carry_out(self.table.read_anew())
        return list(self.table.members)

    def leave(self) -> None:
        """Close the connections that only the calling thread, which ends, could use."""
        for node in list(self.table.nodes.values()):
            node.leave()

    @property
    def ready(self) -> bool:
        """Whether a renewal finds open connections."""
        return all(node.ready for node in self.table.primaries if node.reached)

    def close_idle(self, before: float, keep: int = 1) -> float:
        """Close the connections of all nodes that were last used before this time, as `Server.close_idle` does."""
        return min([node.close_idle(before, keep) for node in list(self.table.nodes.values())], default=math.inf)

    def _do(self, effect: Effect) -> Any:
        match effect:
            case At(node, call, None):
                return node._do(call)
            case At(node, call, patience):
                # Greenlets of one thread would share the connection for renewals, and take each other's replies.
                return node.renew(call, patience) if os_threads.greenlet() is None else node._do(call)
            case Within(call, seconds):
                return self.carry_out(operation_of(self.table, call, seconds))
            case AtEach(effects):
                return self._at_each(effects)
            case Subscribe():
                return self.carry_out(subscribe(self.table, effect))
            case WaitForWakeup(waiter):
                home = home_of(self.table, waiter, lambda node: node.room)
                if not home.watched:
                    idle.housekeeper.watch(home)
                return home._do(effect)
        return super()._do(effect)

    def _at_each(self, effects: tuple[At, ...]) -> list[Any]:
        """Carry out each effect, one after the other.

        After each node that is silent the next ones get a quarter of its time. So all of them together cost less than
        one and a half socket timeouts, however many are silent. A node that was silent lately is asked last.
        """
        results: list[Any] = []
        share = 1.0
        for effect in effects:
            if share < 1:
                patience = self.timeout if effect.patience is None else effect.patience
                effect = effect._replace(patience=patience * share)
            results.append(self._result_of(effect))
            if isinstance(results[-1], TimeoutError):
                share /= 4
        return results

    def _result_of(self, effect: At) -> Any:
        try:
            return self._do(effect)
        except RedisError as error:
            return without_frames(error)


def operation_of(table: SlotTable, call: Call, patience: float | None = None) -> Any:
    """Return the operation that carries out a call at the nodes of its keys."""
    match call:
        case ScriptCall():
            return route(table, call, patience)
        case ScriptBatch(calls):
            return route_each(table, calls, patience)
        case Pipeline():
            return route_commands(table, call, patience)


def is_same(one: Server, other: Server) -> bool:
    """Whether two servers are the same one, or one of them is a node of the other, as far as their clients know."""
    mixed = isinstance(one, Cluster) is not isinstance(other, Cluster)
    places = [
        server.place
        if isinstance(server, Cluster) or not mixed
        else ClusterPlace([(server.settings.get("host", "localhost"), int(server.settings.get("port", 6379)))])
        for server in (one, other)
    ]
    return bool(places[0] == places[1])


def _nodes_like(client: Any) -> tuple[Any, ...]:
    """Return the class and the settings of connections to nodes, the nodes that are known, and the address remap."""
    kind, given, addresses, remap = nodes_of(client)
    timeouts = {name: given[name] for name in ("socket_timeout", "socket_connect_timeout") if given.get(name)}
    return kind, inherited_settings(given) | timeouts, addresses, remap  # nothing that refers back to the client


def _new_node(min_replicas: int, kind: Any, settings: dict[str, Any], address: Address, channel: bytes) -> Node:
    host, port = address
    client = Redis(connection_pool=ConnectionPool(kind, host=host, port=port, **settings))
    return (ReplicatedNode if min_replicas else Node)(endpoint_of(client), address, channel, min_replicas)


class AsyncCluster(AsyncServer):
    """The nodes of a Cluster as one event loop sees them. Each node has its connections there, and closes them."""

    def __init__(self, cluster: Cluster) -> None:
        self.place = cluster.place
        self._table = cluster.table
        # Nothing here refers back to this object: in a cycle it would keep the nodes until the garbage collector runs.
        self._view = view = partial(_view_of, new_channel(), asyncio.get_running_loop())
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loop = asyncio.get_running_loop()
        self._ends = False
        self.room: Any = ClusterRoom(self._table, lambda node: view(node).room)

    async def call(self, call: Call) -> Any:
        """Run a script, several scripts or commands, each at the node of its keys."""
        return await self.run(operation_of(self._table, call))

    def end_soon(self) -> None:
        """Have each node leave the loops that are closed, because the next loop may not use all nodes.

        Otherwise each node closes its connections by itself.
        """
        for node in list(self._table.nodes.values()):
            leave_closed_loops(node)
        if self._loop.is_closed():
            for steps in list(self._running):
                steps.close()

    async def _do(self, effect: Effect) -> Any:
        match effect:
            case At(node, call):
                return await self._view(node).run(_only(call))
            case AtEach(effects):
                return await asyncio.gather(*[self._do(each) for each in effects], return_exceptions=True)
            case _ if isinstance(effect, Call):
                return await self.call(effect)
            case Subscribe():
                return await self.run(subscribe(self._table, effect))
            case WaitForWakeup(waiter):
                home = home_of(self._table, waiter, lambda node: self._view(node).room)
                return await self._view(home)._do(effect)
        return await super()._do(effect)


def _view_of(channel: bytes, loop: asyncio.AbstractEventLoop, node: Node) -> AsyncServer:
    # When the loop was closed, what its tasks leave is undone outside of it.
    view = node.views.get(loop) or async_server_of(node)
    view.room.channel = channel
    return view


def _only(effect: Any) -> Operation[Any]:
    return (yield effect)


Cluster.view_kind = AsyncCluster
