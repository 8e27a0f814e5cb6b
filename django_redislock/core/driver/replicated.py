"""A server whose replicas must have a lock before the lock counts as held.

Redisson does this by default. Each command that grants or renews a lock is followed by WAIT, in the same write. It is
no consensus: a replica may be promoted that was not among those that confirmed, and WAIT takes nothing back.
"""

from __future__ import annotations

import asyncio
from builtins import TimeoutError as LoopTimeout
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.exceptions import NoScriptError, RedisError, TimeoutError

from .async_server import AsyncServer
from .cluster.table import Node
from .effects import Call, Effect, ScriptBatch, ScriptCall
from .resp import NotPrimary, encode_command
from .server import Endpoint, Server

CONFIRM_WITHIN = 0.5
"""Seconds that replicas have, and half of the time in which the reply must come at most."""


class TooFewReplicas(RedisError):
    """Too few replicas confirmed in time that they have what the server granted by this reply."""

    def __init__(self, confirmed: int, wait: Wait, reply: Any) -> None:
        super().__init__(
            f"{confirmed} of {wait.replicas} replicas (min_replicas) confirmed it within {wait.seconds:g} s. Check the "
            "replicas and their links (INFO replication), or lower min_replicas."
        )
        self.reply = reply


class Wait(ScriptCall):
    """WAIT, in a batch behind the call of a script; the result is the number of replicas that have its writes.

    `timeout` is the number of seconds in which the reply must come.
    """

    __slots__ = ("replicas", "seconds")

    def __init__(self, replicas: int, timeout: float) -> None:
        self.replicas, self.seconds = replicas, min(CONFIRM_WITHIN, timeout / 2)
        self.request = encode_command(b"WAIT", b"%d" % replicas, b"%d" % max(1, round(self.seconds * 1000)))


class Confirming(Server):
    """A server, or a node of a Cluster, that grants or renews a lock only when `min_replicas` replicas have it."""

    def call(self, call: Call) -> Any:
        """Do what `Server.call` does; raises TooFewReplicas, too, or returns it in place of a reply of a batch."""
        return self._confirmed(super().call, call, self.timeout)

    def send_ahead(self, call: ScriptCall) -> Callable[[], Any] | None:
        """Send nothing ahead: only acquisitions are, and replicas must confirm them."""
        return None

    def renew(self, call: Any, patience: float) -> Any:
        """Do what `Server.renew` does; raises or returns TooFewReplicas as `call` does."""
        send, patience = partial(super().renew, patience=patience), min(patience, self.timeout)
        try:
            return self._confirmed(send, call, patience)
        except NoScriptError:
            return self._confirmed(send, call.with_text(), patience)

    def _confirmed(self, send: Callable[[Any], Any], call: Call, timeout: float) -> Any:
        if not grants(call):
            return send(call)
        wait = Wait(self.min_replicas, timeout)
        return judged(call, wait, send(with_wait(call, wait)))


class ReplicatedServer(Confirming):
    """One server whose replicas must confirm, over connections of its own."""

    def __init__(self, plain: Server, min_replicas: int) -> None:
        super().__init__(Endpoint(plain.place, plain.connection_class, plain.settings, plain.limit), min_replicas)


class ReplicatedNode(Confirming, Node):
    """A node of a Cluster whose replicas must confirm."""


class AsyncReplicatedServer(AsyncServer):
    """The replicated server as an event loop sees it. WAIT blocks a connection, so each acquiring task has its own."""

    def __init__(self, server: Confirming) -> None:
        super().__init__(server)
        self._min_replicas, self._timeout = server.min_replicas, server.timeout
        self._turns = asyncio.Semaphore(server.limit)
        self._spare: Any = None
        """A connection that no task uses now."""

    async def _do(self, effect: Effect) -> Any:
        if not grants(effect):
            return await super()._do(effect)
        wait = Wait(self._min_replicas, self._timeout)
        return judged(effect, wait, await self._on_own_connection(with_wait(effect, wait)))

    async def _on_own_connection(self, batch: ScriptBatch) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout):
                await self._turns.acquire()
        except LoopTimeout as error:
            raise TimeoutError(f"no connection was free within {self._timeout:g} s") from error
        *calls, wait = batch.calls
        try:
            connection, self._spare = self._spare, None
            if connection is not None and not connection.usable:
                connection.close()
                connection = None
            connection = connection or await self._connect()
            try:
                requests = [connection.request(call.request) for call in (*calls, wait)]
                replies = await asyncio.gather(*requests, return_exceptions=True)
            finally:
                if self._spare is None and connection.idle:
                    self._spare = connection
                else:
                    connection.close()
        finally:
            self._turns.release()
        if any(isinstance(reply, NotPrimary) for reply in replies):
            self.room.distrust()
        return replies


ReplicatedServer.view_kind = ReplicatedNode.view_kind = AsyncReplicatedServer


def grants(effect: Effect) -> bool:
    """Whether the effect is a call, or a batch of calls, that may grant or renew a lock."""
    first = effect.calls[0] if isinstance(effect, ScriptBatch) else effect
    return isinstance(first, ScriptCall) and first.script.granted is not None


def with_wait(call: Any, wait: Wait) -> ScriptBatch:
    """Return the call, or the calls of a batch, with WAIT behind it."""
    return ScriptBatch((*(call.calls if isinstance(call, ScriptBatch) else (call,)), wait))


def judged(call: Any, wait: Wait, replies: list[Any]) -> Any:
    """Return the reply to a call, or the replies to a batch, with an error in place of a grant that was not confirmed.

    Raises the error of a single call.
    """
    *replies, confirmations = replies
    calls = call.calls if isinstance(call, ScriptBatch) else (call,)
    found = [_judged(each, reply, confirmations, wait) for each, reply in zip(calls, replies, strict=True)]
    try:
        if isinstance(call, ScriptBatch):
            return found
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]
    finally:
        del replies, confirmations, found  # an error that is raised refers to this frame


def _judged(call: ScriptCall, reply: Any, confirmations: Any, wait: Wait) -> Any:
    if isinstance(reply, BaseException) or call.script.granted is None or not call.script.granted(reply):
        return reply
    if isinstance(confirmations, BaseException):
        return confirmations
    return reply if confirmations >= wait.replicas else TooFewReplicas(confirmations, wait, reply)
