"""The driver of a Cluster for asyncio: the Cluster as one event loop sees it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from .async_server import AsyncServer, async_server_of, leave_closed_loops
from .cluster import Cluster, operation_of
from .effects import At, AtEach, Call, Effect, Operation, ScriptCall, Subscribe, Unsubscribe, WaitForWakeup
from .routes import ClusterRoom, home_of, subscribe
from .slot_table import Node, slot_of
from .wakeups import new_channel


class AsyncCluster(AsyncServer):
    """The nodes of a Cluster as one event loop sees them. Each node has its connections there, and closes them."""

    def __init__(self, cluster: Cluster) -> None:
        self.place = cluster.place
        self._table = cluster.table
        # Nothing here refers back to this object: in a cycle it would keep the nodes until the garbage collector runs.
        self._view = view = partial(_view_of, new_channel(), asyncio.get_running_loop())
        self._running = 0
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

    async def _do(self, effect: Effect, cancelled: bool) -> Any:
        match effect:
            case At(node, call):
                return await self._view(node).run(_only(call))
            case AtEach(effects):
                return await asyncio.gather(*[self._do(each, cancelled) for each in effects], return_exceptions=True)
            case ScriptCall() if cancelled:
                node = self._table.last_owner(slot_of(effect.keys[0]))  # even if the node did not answer
                return None if node is None else await self._view(node)._do(effect, cancelled)
            case _ if isinstance(effect, Call) and not cancelled:
                return await self.call(effect)
            case Subscribe():
                return await self.run(subscribe(self._table, effect))
            case WaitForWakeup(waiter):
                home = home_of(self._table, waiter, lambda node: self._view(node).room)
                return await self._view(home)._do(effect, cancelled)
            case Unsubscribe(waiter):
                return await self._view(waiter.home)._do(effect, cancelled)
        return await super()._do(effect, cancelled)


def _view_of(channel: bytes, loop: asyncio.AbstractEventLoop, node: Node) -> AsyncServer:
    # When the loop was closed, what its tasks leave is undone outside of it.
    view = node.views.get(loop) or async_server_of(node)
    view.room.channel = channel
    return view


def _only(effect: Any) -> Operation[Any]:
    return (yield effect)
