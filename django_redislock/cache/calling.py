"""Callables of both kinds, called from a task, and where they take place."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import AsyncToSync, _restore_context, iscoroutinefunction, sync_to_async
from django.core.cache import caches

from ..core.driver.async_server import async_server_of
from ..core.driver.effects import Operation
from ..core.driver.server import Server
from .lease.request import computing

T = TypeVar("T")


async def read(server: Server, steps: Operation[T]) -> T:
    """Run steps that only read, in a task.

    The loop of an asynchronous view under WSGI lives for one request only. There the thread behind the loop runs them,
    because its connections stay open.
    """
    if asyncio.get_running_loop() in AsyncToSync.loop_thread_executors:
        return await sync_to_async(server.run)(steps)
    return await async_server_of(server).run(steps)


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what the function returns; what is not a coroutine function runs where `sync_to_async` runs it."""
    if is_asynchronous(function):
        return await function(*args, **kwargs)
    value = await sync_to_async(function)(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def is_asynchronous(function: Any) -> bool:
    """Whether calling the function returns a coroutine, as far as it can be known before."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def current_task() -> asyncio.Task[Any]:
    """Return the task that runs; raises RuntimeError outside of one."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a value is wanted by a task")
    return task


def as_here(function: Callable[[], None]) -> Callable[[], None]:
    """Return the function for another thread: there it finds what is in context here, the language and the time zone, too.

    asgiref moves its own context variables, Django's among them, to the thread that it is told to move them to, and no other.
    What belongs to this thread stays here: its cache objects, what it waits for, and the computation that it is in.
    """
    context = copy_context()

    def run() -> None:
        _restore_context(context)
        AsyncToSync.executors.current = None
        for alias in caches:
            with suppress(AttributeError):
                del caches[alias]
        computing.set(())
        function()

    return run
