"""Refreshes in the background: a thread or a task computes, and all callers get the stale value meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import asgiref.sync
from asgiref.sync import AsyncToSync, async_to_sync
from django.core.cache import caches
from django.db import connections

from ..core.driver.async_server import async_server_of
from ..core.driver.fork import after_in_child
from ..core.driver.os_threads import start_here
from ..core.events import log
from .async_calls import ends_with_its_call
from .lease.request import Outcome, ValueRequest, computing
from .lease.single_flight import Caller, is_in_flight, is_refresh_paused, pause_refresh, refresh

FAILED = "The refresh of the value of %r failed; callers get the stale value until it expires."
WORKERS = 4
"""Threads of a process that refresh values: each may need a connection to the database. The other values wait."""
MAX_WAITING = 1000
"""Values that may wait for such a thread; a later caller asks again for the others."""

_tasks: set[asyncio.Task[Any]] = set()
"""The refreshing tasks, because an event loop keeps only weak references to its tasks."""


def refresh_in_thread(request: ValueRequest, old: bytes) -> None:
    """Have a thread refresh the value in the caller's context, unless another caller refreshes it already."""
    if is_in_flight(request) or is_refresh_paused(request):
        return

    def run() -> None:
        try:
            _log_failure(request, request.server.run(refresh(request, Caller.thread(request.server), old, -math.inf)))
        except BaseException:  # also SystemExit of the computation: the thread has other values to refresh
            log.exception(FAILED, request.key)
        finally:
            connections.close_all()  # of this thread

    try:
        _workers.do((request.server, request.key), in_callers_context(run))
    except RuntimeError:  # the system has no more threads
        pause_refresh(request)
        log.exception(FAILED, request.key)


def refresh_in_task(request: ValueRequest, old: bytes) -> None:
    """Start a task that refreshes the value, unless another caller refreshes it already.

    A thread refreshes where the loop ends with the caller, and where it ended before the task.
    """
    if is_in_flight(request) or is_refresh_paused(request):
        return

    async def compute() -> Any:
        return await request.default()

    by_thread = partial(refresh_in_thread, replace(request, default=async_to_sync(compute)), old)

    async def run() -> None:
        computing.set(())  # the task is no part of the computation that may have started it
        try:
            server = async_server_of(request.server)
            _log_failure(request, await server.run(refresh(request, Caller.task(server), old, -math.inf)))
        except Exception:
            log.exception(FAILED, request.key)

    def ended(task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        if task.cancelled():  # as asyncio.run() does with what is left
            by_thread()

    loop = asyncio.get_running_loop()
    if ends_with_its_call(loop):
        by_thread()
        return
    task = loop.create_task(run(), name="redislock-refresh")
    _tasks.add(task)
    task.add_done_callback(ended)


class Workers:
    """A few threads that end when there is nothing left to do.

    No lock guards what waits for them, because a signal handler may come while its own thread holds that lock.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Hashable, Callable[[], None]]] = SimpleQueue()
        self._known: dict[Hashable, Callable[[], None]] = {}
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(WORKERS):
            self._free.put(None)

    def do(self, key: Hashable, job: Callable[[], None]) -> None:
        """Have a thread do the job, unless one for this key waits or is being done, or too many wait.

        Raises RuntimeError when no thread can be started.
        """
        if len(self._known) >= MAX_WAITING or self._known.setdefault(key, job) is not job:
            return
        self._jobs.put((key, job))
        if self._take():
            try:
                start_here(self._work, "redislock-refresh")
            except BaseException:
                self._known.pop(key, None)
                self._free.put(None)
                raise

    def _take(self) -> bool:
        """Return whether there may be one more thread; if not, those that run find the job."""
        try:
            self._free.get_nowait()
        except Empty:
            return False
        return True

    def _work(self) -> None:
        while True:
            try:
                key, job = self._jobs.get_nowait()
            except Empty:
                self._free.put(None)
                if self._jobs.empty() or not self._take():
                    return
                continue  # a job came after the look and before the place was free: it started no thread
            if self._known.get(key) is job:
                try:
                    job()
                finally:
                    self._known.pop(key, None)


_workers = Workers()


def _after_fork() -> None:
    _workers.__init__()  # type: ignore[misc]  # its threads are those of the parent


after_in_child("refreshes", _after_fork)


def in_callers_context(function: Callable[[], None]) -> Callable[[], None]:
    """Return the function for another thread: it runs in the caller's context, language and time zone.

    The caller's cache objects, its leases and the tasks that it waits for stay in its own thread.
    """
    context = copy_context()

    def run() -> None:
        if _restore is not None:
            _restore(context)
        with suppress(AttributeError):
            AsyncToSync.executors.current = None
        for alias in caches:
            with suppress(AttributeError):
                del caches[alias]
        computing.set(())
        function()

    return partial((context if _restore is None else Context()).run, run)


_restore: Callable[[Context], None] | None = getattr(asgiref.sync, "_restore_context", None)
"""Moves the variables of a context to the running thread. Without it (before asgiref 3.8 Django's `Local` needs no more
than the context) the function runs in a copy of the caller's context."""


def _log_failure(request: ValueRequest, outcome: Outcome) -> None:
    if outcome.error is not None:
        log.error(FAILED, request.key, exc_info=outcome.error)
