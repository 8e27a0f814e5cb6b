"""The asyncio driver: one Redis server as one event loop sees it, over two connections, however many tasks there are."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, NoScriptError, RedisError

from ..clock import monotonic
from .async_connection import AsyncConnection, SharedConnection
from .connection_kinds import new_async_connection
from .effects import (
    Effect,
    Invoke,
    Operation,
    Pipeline,
    ScriptBatch,
    ScriptCall,
    Sleep,
    Subscribe,
    Unsubscribe,
    WaitForFuture,
    WaitForWakeup,
)
from .resp import NotPrimary, pack
from .server import Server
from .wakeups_tasks import AsyncWaitingRoom

UNDO_WITHIN = 1.0
"""Seconds for which a cancelled task may have to connect once more, to take back what it asked for."""

T = TypeVar("T")


class AsyncServer:
    """One Redis server, for the tasks of one event loop.

    The connections close when the loop ends its asynchronous generators, as `asyncio.run` has it do.
    """

    def __init__(self, server: Server) -> None:
        self._loop = asyncio.get_running_loop()
        self.place = server.place
        self._kind, self._settings, self._patience = server.connection_class, server.settings, server.timeout
        self._commands = SharedConnection(self._connect, server.patience)
        self.room = AsyncWaitingRoom(self._connect, server.patience)
        self._lines: set[AsyncConnection] = set()
        self._running = 0
        self._loop_watch: AsyncGenerator[None, None] | None = None
        self._ends = False

    async def run(self, steps: Operation[T]) -> T:
        """Do what the steps ask for, and return their result.

        Cancelled, it tells the server what is to be undone, but does not wait for the answers.
        """
        proceed: Callable[[Any], Effect] = steps.send
        result: Any = None
        cancelled = False
        self._running += 1
        try:
            while True:
                try:
                    effect = proceed(result)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                try:
                    proceed, result = steps.send, await self._do(effect, cancelled)
                except BaseException as error:
                    cancelled = cancelled or not isinstance(error, Exception)
                    proceed, result = steps.throw, error
        finally:
            del proceed, result  # as in `Server`: an error that leads here must not lead back to itself
            self._running -= 1
            if self._ends and not self._running:
                self._close()

    async def _do(self, effect: Effect, cancelled: bool) -> Any:
        match effect:
            case ScriptCall():
                return await (self._send(effect) if cancelled else self.call(effect))
            case ScriptBatch(calls):
                return await asyncio.gather(*map(self.call, calls), return_exceptions=True)
            case Pipeline():
                return await self.ask(effect)
            case Subscribe(lock, id, along):
                return await self.room.join(lock, id, along)
            case WaitForWakeup(waiter, until, look):
                return await self.room.wait(waiter, until, look)
            case Unsubscribe(waiter):
                return self.room.leave(waiter)
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
            case Invoke(function):
                try:
                    value = function()
                    return await value if inspect.isawaitable(value) else value, None
                except Exception as error:  # cancelled, the task is not to be kept waiting by what comes after it
                    return None, error
            case WaitForFuture(made, until):
                return await _outcome(made, until)

    async def call(self, call: ScriptCall) -> Any:
        """Run a script and return its reply."""
        line = await self._commands.open()
        undo = None if call.undo is None else partial(_undoing, call.undo)
        try:
            try:
                return await line.ask(call.request, undo)
            except NoScriptError:
                return await line.ask(call.whole, undo)
        except NotPrimary:
            self.room.distrust()
            raise

    async def ask(self, commands: Pipeline) -> list[Any]:
        """Send commands and return their replies."""
        line = await self._commands.open()
        try:
            if len(commands.commands) == 1:
                return [await line.ask(pack(*commands.commands[0]))]
            return await asyncio.gather(*[line.ask(pack(*command)) for command in commands.commands])
        except NotPrimary:
            self.room.distrust()
            raise

    async def _send(self, call: ScriptCall) -> None:
        """Have a script run without waiting for the reply."""
        with suppress(RedisError, OSError):
            async with asyncio.timeout(UNDO_WITHIN):
                line = await self._commands.open()
            line.tell(call.whole)

    async def _connect(self, hear: Callable[[Any], None] | None = None) -> AsyncConnection:
        if self._loop_watch is None and not self._ends:
            self._loop_watch = self._until_the_loop_ends()
            await anext(self._loop_watch)
        connection = new_async_connection(self._kind, self._settings)
        try:
            await connection.connect()
        except BaseException:
            connection._close()
            raise
        if connection._reader.at_eof():  # which nobody would notice later
            connection._close()
            raise ConnectionError("Connection closed by server.")
        line = AsyncConnection(connection, self._patience, hear)
        self._lines.add(line)
        line.lost.add_done_callback(lambda _: self._lines.discard(line))
        return line

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._ends = True
            self._loop_watch = None
            if not self._running:  # else, or when another generator releases its lock later, the last one closes them
                self._close()
                lost = [line.lost for line in self._lines]
                if lost:
                    await asyncio.wait(lost, timeout=0.5)
                for line in self._lines:
                    line.abort()

    def end_soon(self) -> None:
        """Close the connections when nobody needs them any more. It may be called from any thread, and by a destructor."""
        try:  # noqa: SIM105 (a destructor may run at the interpreter's exit, when `suppress` is gone)
            self._loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop is closed
            pass

    def _end(self) -> None:
        self._ends = True
        if not self._running:
            self._close()

    def _close(self) -> None:
        for line in list(self._lines):
            line.close()


async def _outcome(made: Future[Any], until: float) -> Any:
    loop = asyncio.get_running_loop()
    here = (
        loop.create_future()
    )  # of one's own: asyncio's would be cancelled for all with the first who does not wait on

    def land(_: object = None) -> None:
        if not here.done():
            here.set_result(None)

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
            loop.call_soon_threadsafe(land)

    made.add_done_callback(tell)
    timer = None if until == math.inf else loop.call_later(max(0.0, until - monotonic()), land)
    try:
        await here
    finally:
        if timer is not None:
            timer.cancel()
    return made.result(0) if made.done() else None


def _undoing(undo: Callable[[], ScriptCall]) -> bytes:
    return undo().whole


def async_server_of(server: Server) -> AsyncServer:
    """Return the server as the running event loop sees it."""
    loop = asyncio.get_running_loop()
    try:
        return server.views[loop]  # type: ignore[no-any-return]
    except KeyError:
        pass
    for other in list(server.views):
        if other.is_closed():
            server.views.pop(other, None)
    return server.views.setdefault(loop, (server.view_kind or AsyncServer)(server))  # type: ignore[no-any-return]
