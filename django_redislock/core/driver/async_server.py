"""The asyncio driver: one Redis server as one event loop sees it, over two connections for all tasks."""

from __future__ import annotations

import asyncio
import inspect
import math
import weakref
from builtins import TimeoutError as LoopTimeout
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, TimeoutError

from .. import events
from ..clock import monotonic
from .async_connection import AsyncConnection, SharedConnection
from .connection import clear_frames
from .effects import (
    CallAside,
    Effect,
    Invoke,
    Operation,
    Pipeline,
    RunAt,
    RunAtEach,
    ScriptBatch,
    ScriptCall,
    Sleep,
    Subscribe,
    WaitForFuture,
    WaitForWakeup,
    Within,
    with_text_once,
)
from .kinds import close_at_once, is_at_end, is_of_provider, new_async_connection
from .process import notice_fork
from .resp import NotPrimary, encode_command
from .server import Server
from .wakeups_tasks import AsyncWaitingRoom

T = TypeVar("T")

LAST_MOMENT = 0.05
"""Seconds for which the last of several operations are waited for, after the others have sufficed. A later one is
cancelled, and what it got is given back afterwards: with 0.01 s, on a busy machine, that refused the next try."""


class AsyncServer:
    """The connections of one event loop to one Redis server.

    The connections close when the loop ends its asynchronous generators, as `asyncio.run` has it do.
    """

    def __init__(self, server: Server) -> None:
        self._loop = asyncio.get_running_loop()
        self.place = server.place
        self._kind, self._settings, self._patience = server.connection_class, server.settings, server.timeout
        self._commands = SharedConnection(self._connect, server.patience)
        self.room = AsyncWaitingRoom(self._connect, server.patience, server.refusal)
        self._connections: set[AsyncConnection] = set()
        self._running: weakref.WeakSet[Operation[Any]] = weakref.WeakSet()
        self._loop_watch: AsyncGenerator[None, None] | None = None
        self._ends = False

    async def run(self, steps: Operation[T]) -> T:
        """Carry out the effects of the operation, and return its result. An interrupted operation has no more of
        them."""
        proceed: Callable[[Any], Effect] = steps.send
        result: Any = None
        self._running.add(steps)
        try:
            while True:
                try:
                    effect = proceed(result)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                try:
                    proceed, result = steps.send, await self._do(effect)
                except BaseException as error:
                    proceed, result = steps.throw, error
        finally:
            del proceed, result  # as in `Server`: an error that leads here must not lead back to itself
            self._running.discard(steps)
            if self._ends and not self._running:
                self._close()
                with suppress(RuntimeError):  # the loop is closed already
                    self._loop.call_soon(self._abort)

    async def _do(self, effect: Effect) -> Any:
        # One case for each effect, as in `Server`.
        match effect:
            case ScriptCall() | Pipeline():
                return await self.call(effect)
            case ScriptBatch(calls):
                return await asyncio.gather(*map(self.call, with_text_once(calls)), return_exceptions=True)
            case Subscribe(lock, id):
                return await self.room.register(lock, id)
            case WaitForWakeup(waiter, until, poll_at):
                return await self.room.wait(waiter, until, poll_at)
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
            case Invoke(function):
                try:
                    with events.step("compute") if events.observers else nullcontext():
                        value = function()
                        return await value if inspect.isawaitable(value) else value, None
                except Exception as error:  # not CancelledError: a cancelled task must not wait for what comes next
                    return None, error
                finally:
                    notice_fork()  # as in `Server`
            case CallAside(function):
                return await asyncio.to_thread(function)
            case Within(call, seconds):
                try:
                    async with asyncio.timeout(seconds):
                        return await self.call(call)
                except LoopTimeout as error:
                    raise TimeoutError(f"no reply within {seconds:.3g} s") from error
            case RunAt(server, operation):
                return await async_server_of(server).run(operation)
            case RunAtEach():
                return await _run_at_each(effect)
            case WaitForFuture(future, until):
                return await _result_of(future, until)

    async def call(self, call: ScriptCall | Pipeline) -> Any:
        """Run a script or commands, and return the reply or the replies."""
        if not events.observers:
            return await self._call(call)
        with events.step("command", (self.place, call)):
            return await self._call(call)

    async def _call(self, call: ScriptCall | Pipeline) -> Any:
        connection = await self._commands.open()
        try:
            if isinstance(call, ScriptCall):
                return await connection.request(call.request)
            if len(call.commands) == 1:
                return [await connection.request(encode_command(*call.commands[0]))]
            return await asyncio.gather(*[connection.request(encode_command(*command)) for command in call.commands])
        except NotPrimary:
            self.room.distrust()
            raise

    async def _connect(self, on_push: Callable[[Any], None] | None = None) -> AsyncConnection:
        if self._loop_watch is None and not self._ends:
            self._loop_watch = self._until_the_loop_ends()
            await anext(self._loop_watch)
        redis_connection = new_async_connection(self._kind, self._settings)
        cancellations = getattr(asyncio.current_task(), "cancelling", int)
        before = cancellations()
        try:
            await redis_connection.connect()
            # `wait_for` of Python 3.11, in the handshake, swallows one that comes as it ends: the task waited for ever.
            if cancellations() > before:
                raise asyncio.CancelledError
            if is_at_end(redis_connection):  # later, no task would notice it
                raise ConnectionError("Connection closed by server.")
        except BaseException as error:
            clear_frames(error)
            del cancellations  # by the task it leads to the error, and so to this frame
            close_at_once(redis_connection)
            if is_of_provider(error, redis_connection):
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
            raise
        connection = AsyncConnection(redis_connection, self._patience, on_push)
        self._connections.add(connection)
        connection.lost.add_done_callback(lambda _: self._connections.discard(connection))
        return connection

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._ends = True
            self._loop_watch = None
            # Else, or when another generator releases its lock later, the last operation closes them.
            if not self._running:
                self._close()
                lost = [connection.lost for connection in self._connections]
                if lost:
                    await asyncio.wait(lost, timeout=0.5)
                self._abort()

    def end_soon(self) -> None:
        """Close the connections after the last operation. Any thread may call this, and a destructor."""
        try:
            self._loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop is closed
            self._abort()

    def _end(self) -> None:
        self._ends = True
        if not self._running:
            self._close()

    def _close(self) -> None:
        for connection in list(self._connections):
            connection.close()

    def _abort(self) -> None:
        for steps in list(self._running):  # of a loop that was closed under them: they give back what they asked for
            steps.close()
        for connection in list(self._connections):
            connection.abort()


async def _run_at_each(effect: RunAtEach) -> None:
    pending = {asyncio.create_task(async_server_of(server).run(todo)) for server, todo in effect.operations}
    try:
        while pending:
            patience = LAST_MOMENT if effect.enough() else None
            done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not done:
                break
    finally:
        for task in pending:
            task.cancel()


async def _result_of(future: Future[Any], until: float) -> Any:
    loop = asyncio.get_running_loop()
    # Not asyncio.wrap_future(), because the first task that stops waiting would cancel the future for all.
    done = loop.create_future()

    def finish(_: object = None) -> None:
        if not done.done():
            done.set_result(None)

    def notify(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no task waits
            loop.call_soon_threadsafe(finish)

    future.add_done_callback(notify)
    timer = None if until == math.inf else loop.call_later(max(0.0, until - monotonic()), finish)
    try:
        await done
    finally:
        if timer is not None:
            timer.cancel()
    return future.result(0) if future.done() else None


def async_server_of(server: Server) -> AsyncServer:
    """Return the server as the running event loop sees it. A forked child notices its fork before."""
    notice_fork()
    loop = asyncio.get_running_loop()
    try:
        return server.views[loop]  # type: ignore[no-any-return]
    except KeyError:
        pass
    leave_closed_loops(server)
    return server.views.setdefault(loop, (server.view_kind or AsyncServer)(server))  # type: ignore[no-any-return]


def leave_closed_loops(server: Server) -> None:
    """End the views of event loops that were closed before they had ended everything."""
    for loop in list(server.views):
        if loop.is_closed():
            view = server.views.pop(loop, None)
            if view is not None:
                view.end_soon()
