"""Calls from a task: functions of both kinds, and operations that only read."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from asgiref.sync import AsyncToSync, iscoroutinefunction, sync_to_async

from ..core.driver.async_server import async_server_of
from ..core.driver.effects import Operation, T
from ..core.driver.server import Server


async def run_read(server: Server, operation: Operation[T]) -> T:
    """Run an operation that only reads.

    The loop of an asynchronous view under WSGI lives for one request only. There the thread behind the loop runs the
    operation, because its connections stay open.
    """
    if ends_with_its_call(asyncio.get_running_loop()):
        return await sync_to_async(server.run)(operation)
    return await async_server_of(server).run(operation)


def ends_with_its_call(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop was made by `async_to_sync`, or for an asynchronous view under WSGI, and ends with that call."""
    return loop in getattr(AsyncToSync, "loop_thread_executors", ())


async def call_any(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function and return its result; a plain function runs where `sync_to_async` runs it."""
    if is_async_callable(function):
        return await function(*args, **kwargs)
    value = await sync_to_async(function)(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def is_async_callable(function: Any) -> bool:
    """Whether a call of the function returns a coroutine, as far as that is known before the call."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
