"""A server whose replicas must have a lock before its holder may believe in it.

Redisson does this by default. Each command that grants or renews a lock is followed by WAIT, in the same write. It is
no consensus: a replica may be promoted that was not among those that confirmed, and WAIT takes nothing back.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, RedisError

from .async_server import AsyncServer
from .effects import Effect, Operation, ScriptBatch, ScriptCall
from .primary import NotPrimary
from .resp import encode_command
from .server import Server

CONFIRM_WITHIN = 0.5
"""Seconds that replicas have, and half of the time in which the reply must come at most."""

T = TypeVar("T")


class TooFewReplicas(RedisError):
    """Too few replicas confirmed in time that they have what the server granted by this reply."""

    def __init__(self, confirmed: int, wanted: int, seconds: float, reply: Any) -> None:
        super().__init__(
            f"{confirmed} of {wanted} replicas (min_replicas) confirmed it within {seconds:g} s. Check the replicas and "
            "their links (INFO replication), or lower min_replicas."
        )
        self.reply = reply


def unconfirmed_grant(error: BaseException) -> int:
    """Return the fence of an acquisition that too few replicas confirmed, if that is the error's cause; otherwise 0."""
    cause = error.__cause__
    return cause.reply if isinstance(cause, TooFewReplicas) and isinstance(cause.reply, int) else 0


class Wait(ScriptCall):
    """WAIT, in a batch behind the call of a script; the result is the number of replicas that have its writes."""

    __slots__ = ()

    def __init__(self, replicas: int, seconds: float) -> None:
        self.undo = None
        self.request = encode_command(b"WAIT", b"%d" % replicas, b"%d" % max(1, round(seconds * 1000)))


class ReplicatedServer(Server):
    """A server that grants or renews a lock only when `min_replicas` replicas have it, over connections of its own."""

    def __init__(self, plain: Server, min_replicas: int) -> None:
        self.place, self.connection_class, self.settings = plain.place, plain.connection_class, plain.settings
        self.timeout, self.patience, self.limit = plain.timeout, plain.patience, plain.limit
        self.min_replicas = min_replicas
        self.forget_connections()

    def run(self, operation: Operation[T]) -> T:
        """Carry out the effects of the operation, and return its result."""
        return super().run(confirmed(operation, self.min_replicas, self.timeout))

    def send_ahead(self, call: ScriptCall) -> Callable[[], Any] | None:
        """Send nothing ahead that replicas must confirm."""
        return None if call.script.granted else super().send_ahead(call)

    def renew(self, call: Any, patience: float) -> Any:
        """Do what `Server.renew` does; raises TooFewReplicas, too, or returns it in place of a reply of a batch."""
        batch = isinstance(call, ScriptBatch)
        calls = call.calls if batch else (call,)
        if calls[0].script.granted is None:
            return super().renew(call, patience)
        seconds = _seconds(min(patience, self.timeout))
        wait = Wait(self.min_replicas, seconds)
        *replies, confirmations = super().renew(ScriptBatch((*calls, wait)), patience)
        if not batch and isinstance(replies[0], NoScriptError):
            *replies, confirmations = super().renew(ScriptBatch((call.with_text(), wait)), patience)
        judged = [_judged(calls[0], reply, confirmations, self.min_replicas, seconds) for reply in replies]
        try:
            return judged if batch else _raised(judged[0])
        finally:
            del replies, judged  # an error that is raised refers to this frame


class AsyncReplicatedServer(AsyncServer):
    """The replicated server as an event loop sees it. WAIT stops a connection, so each task that acquires has its own."""

    def __init__(self, server: ReplicatedServer) -> None:
        super().__init__(server)
        self._min_replicas, self._timeout = server.min_replicas, server.timeout
        self._turns = asyncio.Semaphore(server.limit)
        self._spare: list[Any] = []

    async def run(self, steps: Operation[T]) -> T:
        """Do what the steps ask for, and return their result."""
        return await super().run(confirmed(steps, self._min_replicas, self._timeout))

    async def _do(self, effect: Effect, cancelled: bool) -> Any:
        if not isinstance(effect, ScriptBatch):
            return await super()._do(effect, cancelled)
        async with self._turns:
            spare = [connection for connection in self._spare if connection.usable]
            self._spare = spare[1:]
            connection = spare[0] if spare else await self._connect()
            try:
                requests = [connection.request(call.request, call) for call in effect.calls]
                replies = await asyncio.gather(*requests, return_exceptions=True)
            finally:
                if self._spare or not connection.idle:
                    connection.close()
                else:
                    self._spare.append(connection)
        if any(isinstance(reply, NotPrimary) for reply in replies):
            self.room.distrust()
        return replies


ReplicatedServer.view_kind = AsyncReplicatedServer


def confirmed(operation: Operation[T], min_replicas: int, timeout: float) -> Operation[T]:
    """Do what the operation does, with a WAIT behind each call that may grant or renew a lock.

    The operation gets TooFewReplicas in place of a grant that too few replicas confirmed.
    """
    seconds = _seconds(timeout)
    proceed: Callable[[Any], Effect] = operation.send
    result: Any = None
    try:
        while True:
            try:
                while True:
                    effect = proceed(result)
                    proceed = operation.send
                    if isinstance(effect, ScriptCall) and effect.script.granted is not None:
                        result = yield ScriptBatch((effect, Wait(min_replicas, seconds)))
                        result = _raised(_judged(effect, result[0], result[1], min_replicas, seconds))
                    else:
                        result = yield effect
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            except BaseException as error:
                if inspect.getgeneratorstate(operation) == inspect.GEN_CLOSED:  # the operation itself ended with it
                    raise
                proceed, result = operation.throw, error
    finally:
        del proceed, result  # as in `Server.run`


def _seconds(timeout: float) -> float:
    return min(CONFIRM_WITHIN, timeout / 2)


def _judged(call: ScriptCall, reply: Any, confirmations: Any, min_replicas: int, seconds: float) -> Any:
    """Return the reply to the call, or the error in its place, which may be TooFewReplicas."""
    if isinstance(reply, BaseException) or call.script.granted is None or not call.script.granted(reply):
        return reply
    if isinstance(confirmations, BaseException):
        return confirmations
    return reply if confirmations >= min_replicas else TooFewReplicas(confirmations, min_replicas, seconds, reply)


def _raised(reply: Any) -> Any:
    """Return the reply; raise an error."""
    if isinstance(reply, BaseException):
        try:
            raise reply
        finally:
            del reply  # it refers to this frame
    return reply
