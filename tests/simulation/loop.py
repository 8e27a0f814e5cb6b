"""An event loop in virtual time: one for each process. The tasks in it are asyncio's, and so are the futures."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from django_redislock.core.driver.async_server import AsyncServer
from django_redislock.core.driver.effects import (
    Effect,
    Pipeline,
    RunAtEach,
    ScriptBatch,
    ScriptCall,
    Sleep,
    Subscribe,
    WaitForWakeup,
    Within,
)

from .driver import Killed, Thread
from .world import SOCKET_TIMEOUT, Process


class EventLoop(asyncio.AbstractEventLoop):
    """The event loop of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._stand_in = Thread(process, "loop", None)
        self._ready: deque[asyncio.Handle] = deque()
        self._planned = self._closed = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._failure: BaseException | None = None

    def time(self) -> float:
        return self._process.clock()

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return self._closed

    def is_running(self) -> bool:
        return not self._closed

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._process.soon(max(0.0, when - self.time()), partial(self._add, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.fail(context.get("exception") or RuntimeError(context["message"]))

    def fail(self, error: BaseException) -> None:
        """Let the history end by this error."""
        self._failure = self._failure or error

    def _add(self, handle: asyncio.Handle) -> None:
        if handle.cancelled() or self._closed:
            return
        self._ready.append(handle)
        if not self._planned:
            self._planned = True
            self._process.soon(0, self._run_once)

    def _run_once(self) -> None:
        self._planned = False
        with self._as_running():
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        if self._failure is not None:
            raise self._failure
        if self._ready and not self._planned:
            self._planned = True
            self._process.soon(0, self._run_once)

    def close(self) -> None:
        """End what is left, without a word of it: coroutines would complain when they are collected."""
        self._closed = True
        with self._as_running():
            while self._tasks:
                _end(self._tasks.pop())

    @contextmanager
    def _as_running(self) -> Iterator[None]:
        asyncio._set_running_loop(self)
        try:
            with self._process.world.run_by(self._stand_in):
                yield
        finally:
            asyncio._set_running_loop(None)


def _end(task: asyncio.Task[Any]) -> None:
    if task.done():
        if not task.cancelled():
            task.exception()  # it has been seen
        return
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine: Any = task.get_coro()
    if coroutine.cr_frame is not None and coroutine.cr_await is None:  # it has not begun
        coroutine.close()
        return
    with suppress(Killed, StopIteration, Exception):
        while True:
            coroutine.throw(Killed())


class View(AsyncServer):
    """A server seen by the event loop of a simulated process: `run` is as shipped, the connections are the world's."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.place = server.place
        self.room = server.room
        self._running = set()
        self._ends = False

    def end_soon(self) -> None:
        """Do nothing: there are no connections."""

    async def _do(self, effect: Effect) -> Any:
        match effect:
            case ScriptCall() | ScriptBatch() | Pipeline():
                return await self._request(effect)
            case Subscribe(lock, id):
                return await self._result(partial(self.room.register, lock, id), self.room.unregister)
            case WaitForWakeup(waiter, until, poll_at):
                return await self._result(partial(self.room.wait, waiter, until, poll_at))
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
            case Within() | RunAtEach():
                return await super()._do(effect)
        raise AssertionError(effect)

    async def call(self, call: Any) -> Any:
        return await self._request(call)

    async def _request(self, effect: Any) -> Any:
        return await self._result(partial(self._server.request, effect, patience=SOCKET_TIMEOUT))

    async def _result(self, begin: Callable[..., None], too_late: Callable[[Any], object] = lambda result: None) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def settle(result: Any) -> None:
            if future.done():  # the task was cancelled
                if not isinstance(result, BaseException):
                    too_late(result)
            elif isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        begin(answer=settle)
        return await future


class TaskThread(Thread):
    """A task of an event loop, which stands for a thread of the process."""

    loop: EventLoop

    def start(self) -> None:
        self.process.soon(0, self._begin)

    def _begin(self) -> None:
        program: Coroutine[Any, Any, None] = self.programs[0]  # type: ignore[assignment]
        self.loop.create_task(program).add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self.ended = True
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.loop.fail(error)

    def close(self) -> None:
        program: Any = self.programs[0]
        if not self.ended and program.cr_frame is not None and program.cr_await is None and not program.cr_running:
            program.close()
        self.loop.close()
