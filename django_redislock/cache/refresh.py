"""Refreshes in the background: a thread or a task computes, and all callers get the stale value meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from asgiref.sync import AsyncToSync, _restore_context
from django.core.cache import caches
from django.db import connections

from ..core.driver.async_server import async_server_of
from ..core.driver.os_threads import start_here
from ..core.events import log
from .lease.request import Outcome, ValueRequest, computing
from .lease.single_flight import Caller, is_in_flight, is_refresh_paused, pause_refresh, refresh

FAILED = "The refresh of the value of %r failed; callers get the stale value until it expires."

_tasks: set[asyncio.Task[Any]] = set()
"""The refreshing tasks, because an event loop keeps only weak references to its tasks."""


def refresh_in_thread(request: ValueRequest, old: bytes) -> None:
    """Start a thread that refreshes the value in the caller's context, unless another caller refreshes it already."""
    if is_in_flight(request) or is_refresh_paused(request):
        return

    def run() -> None:
        try:
            _log_failure(request, request.server.run(refresh(request, Caller.thread(request.server), old, -math.inf)))
        except Exception:
            log.exception(FAILED, request.key)
        finally:
            connections.close_all()  # of this thread

    try:
        start_here(in_callers_context(run), "redislock-refresh")
    except RuntimeError:  # the system has no more threads
        pause_refresh(request)
        log.exception(FAILED, request.key)


def refresh_in_task(request: ValueRequest, old: bytes) -> None:
    """Start a task that refreshes the value, unless another caller refreshes it already."""
    if is_in_flight(request) or is_refresh_paused(request):
        return

    async def run() -> None:
        computing.set(())  # the task is no part of the computation that may have started it
        try:
            server = async_server_of(request.server)
            _log_failure(request, await server.run(refresh(request, Caller.task(server), old, -math.inf)))
        except Exception:
            log.exception(FAILED, request.key)

    task = asyncio.get_running_loop().create_task(run(), name="redislock-refresh")
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def in_callers_context(function: Callable[[], None]) -> Callable[[], None]:
    """Return the function for another thread: it runs in the caller's context, language and time zone.

    asgiref copies context variables, Django's among them, only to the threads that it starts. The caller's cache
    objects, its leases and the tasks that it waits for stay in its own thread.
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


def _log_failure(request: ValueRequest, outcome: Outcome) -> None:
    if outcome.error is not None:
        log.error(FAILED, request.key, exc_info=outcome.error)
