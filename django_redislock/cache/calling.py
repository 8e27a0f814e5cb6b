"""Callables of both kinds, called from a task."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what the function returns; what is not a coroutine function runs where `sync_to_async` runs it."""
    if inspect.iscoroutinefunction(function) or iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await sync_to_async(function)(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def current_task() -> asyncio.Task[Any]:
    """Return the task that runs; raises RuntimeError outside of one."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a value is wanted by a task")
    return task
