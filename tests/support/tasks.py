from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

from django_redislock.core import AsyncLock


class Tasks:
    """An event loop in a thread, with a task for each thread that has something done in it.

    The task ends with its thread. Use it in a with statement.
    """

    def __init__(self) -> None:
        self._mine = threading.local()
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),), name="tasks")

    async def _main(self) -> None:
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop = self._started.result(timeout=20)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def do(self, function: Callable[[], Any]) -> Any:
        """Call the function in the task of this thread; return its result, awaited."""
        if not hasattr(self._mine, "hand"):
            self._mine.hand = Hand(self._loop)
        return self._mine.hand.do(function)


class Hand:
    """One task, as long as somebody has this object."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: asyncio.Queue[tuple[Callable[[], Any], Future[Any]] | None] = asyncio.Queue()
        asyncio.run_coroutine_threadsafe(_work(self._jobs), loop)
        weakref.finalize(self, _put, loop, self._jobs, None)

    def do(self, function: Callable[[], Any]) -> Any:
        result: Future[Any] = Future()
        _put(self._loop, self._jobs, (function, result))
        return result.result(timeout=120)


def _put(loop: asyncio.AbstractEventLoop, jobs: asyncio.Queue[Any], job: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(jobs.put_nowait, job)


async def _work(jobs: asyncio.Queue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (job := await jobs.get()) is not None:
        await _work_on(*job)
        del job  # or the function's objects would live until the next one comes


async def _work_on(function: Callable[[], Any], result: Future[Any]) -> None:
    try:
        value = function()
        if asyncio.iscoroutine(value):
            value = await value
    except Exception as error:
        result.set_exception(error)
    else:
        result.set_result(value)


def lock_for_threads(tasks: Tasks, kind: Any = AsyncLock) -> type:
    """Return a class that is used like `Lock`, but is an `AsyncLock`, or another kind, which the task of each thread
    uses for it."""

    class TaskLock:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.lock = kind(*args, **options)

        def __getattr__(self, name: str) -> Any:
            lock = self.lock
            value = tasks.do(lambda: getattr(lock, name))
            if callable(value):
                return lambda *args, **options: tasks.do(lambda: value(*args, **options))
            return value

        def __enter__(self) -> Self:
            tasks.do(self.lock.__aenter__)
            return self

        def __exit__(self, *exc_info: Any) -> None:
            tasks.do(lambda: self.lock.__aexit__(*exc_info))

    return TaskLock
