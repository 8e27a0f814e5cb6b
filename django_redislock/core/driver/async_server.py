"""The asyncio driver: one Redis server as one event loop sees it, over two connections for all tasks."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, RedisError

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
    ScriptBatch,
    ScriptCall,
    Sleep,
    Subscribe,
    Unsubscribe,
    WaitForFuture,
    WaitForWakeup,
)
from .kinds import close_at_once, is_at_end, is_of_provider, new_async_connection
from .resp import NotPrimary, encode_command
from .server import Server
from .wakeups_tasks import AsyncWaitingRoom

UNDO_WITHIN = 1.0
"""Seconds for which a cancelled task may connect once more, to send its undo."""
NOT_UNDONE = (
    "A task was cancelled while Redis could not be reached (%s): a lock that it acquired or released may stay until "
    "the lock's expiry."
)

T = TypeVar("T")


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
        self._running = 0
        self._loop_watch: AsyncGenerator[None, None] | None = None
        self._ends = False

    async def run(self, steps: Operation[T]) -> T:
        """Carry out the effects of the operation, and return its result.

        After a cancellation, the scripts that undo its work are sent without waiting for their replies.
        """
        proceed: Callable[[Any], Effect] = steps.send
        result: Any = None
        cancelled = False
        undos: dict[bytes, Callable[[], ScriptCall]] = {}
        self._running += 1
        try:
            while True:
                try:
                    effect = proceed(result)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                if isinstance(effect, ScriptCall | ScriptBatch):
                    for call in (effect,) if isinstance(effect, ScriptCall) else effect.calls:
                        if call.undo is not None:
                            undos[call.keys[0]] = call.undo
                try:
                    proceed, result = steps.send, await self._do(effect, cancelled)
                except GeneratorExit:
                    self._abandon(steps, undos)
                    raise
                except BaseException as error:
                    cancelled = cancelled or not isinstance(error, Exception)
                    proceed, result = steps.throw, error
        finally:
            del proceed, result  # as in `Server`: an error that leads here must not lead back to itself
            self._running -= 1
            if self._ends and not self._running:
                self._close()
                with suppress(RuntimeError):  # the loop is closed already
                    self._loop.call_soon(self._leave)

    def _abandon(self, steps: Operation[Any], undos: dict[bytes, Callable[[], ScriptCall]]) -> None:
        """End the operation of a coroutine that is destroyed, as a rule because its loop was closed under it.

        What it would send after a cancellation is sent, as far as that needs no loop. It gets a CancelledError, because
        after a GeneratorExit Python lets no generator yield. The garbage collector may have destroyed a generator of
        the operation before this coroutine; then the undo of its last call for each lock is sent instead.
        """
        proceed: Callable[[Any], Effect] = steps.throw
        result: Any = asyncio.CancelledError()
        if _is_destroyed(steps):
            steps = _undo_all(undos)
            proceed, result = steps.send, None
        with suppress(StopIteration, asyncio.CancelledError, Exception):
            while True:
                doing = self._do(proceed(result), True)
                try:
                    doing.send(None)
                except StopIteration as stop:
                    proceed, result = steps.send, stop.value
                except Exception:
                    proceed, result = steps.throw, asyncio.CancelledError()
                else:  # it would have to wait
                    doing.close()
                    proceed, result = steps.throw, asyncio.CancelledError()
        del proceed, result

    async def _do(self, effect: Effect, cancelled: bool) -> Any:
        # One case for each effect, as in `Server`. After a cancellation scripts are sent without waiting for replies.
        match effect:
            case ScriptCall():
                return await (self._send_and_forget(effect) if cancelled else self.call(effect))
            case ScriptBatch(calls) if cancelled:
                # One after another, because a loop that is closed gathers nothing.
                return [await self._do(call, cancelled) for call in calls]
            case ScriptBatch(calls):
                return await asyncio.gather(*map(self.call, calls), return_exceptions=True)
            case Pipeline():
                return await self.call(effect)
            case Subscribe(lock, id):
                return await self.room.register(lock, id)
            case WaitForWakeup(waiter, until, poll_at):
                return await self.room.wait(waiter, until, poll_at)
            case Unsubscribe(waiter):
                return self.room.unregister(waiter)
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
            case Invoke(function):
                try:
                    with events.step("compute") if events.observers else nullcontext():
                        value = function()
                        return await value if inspect.isawaitable(value) else value, None
                except Exception as error:  # not CancelledError: a cancelled task must not wait for what comes next
                    return None, error
            case CallAside(function):
                return await asyncio.to_thread(function)
            case RunAt(server, operation):
                return await async_server_of(server).run(operation)
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
                return await connection.request(call.request, call)
            if len(call.commands) == 1:
                return [await connection.request(encode_command(*call.commands[0]))]
            return await asyncio.gather(*[connection.request(encode_command(*command)) for command in call.commands])
        except NotPrimary:
            self.room.distrust()
            raise

    async def _send_and_forget(self, call: ScriptCall) -> None:
        """Send a script without waiting for the reply, or log that it cannot be sent."""
        try:
            connection = self._commands.connection
            if connection is None:
                async with asyncio.timeout(UNDO_WITHIN):
                    connection = await self._commands.open()
            connection.send_and_forget(call.with_text().request)
        except (RedisError, OSError) as error:
            events.log.warning(NOT_UNDONE, str(error) or type(error).__name__)

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
                self._leave()

    def end_soon(self) -> None:
        """Close the connections after the last operation. Any thread may call this, and a destructor."""
        try:
            self._loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop is closed
            self._leave()

    def _end(self) -> None:
        self._ends = True
        if not self._running:
            self._close()

    def _close(self) -> None:
        for connection in list(self._connections):
            connection.close()

    def _leave(self) -> None:
        for connection in list(self._connections):
            connection.leave()


def _is_destroyed(steps: Any) -> bool:
    """Return whether the operation, or one that it waits for, has been destroyed."""
    while steps is not None:
        if steps.gi_frame is None:
            return True
        steps = steps.gi_yieldfrom if inspect.isgenerator(steps.gi_yieldfrom) else None
    return False


def _undo_all(undos: dict[bytes, Callable[[], ScriptCall]]) -> Operation[None]:
    """Send these undos, each of the last call for a lock."""
    for undo in undos.values():
        yield undo()


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
    """Return the server as the running event loop sees it."""
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
