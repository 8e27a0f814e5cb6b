"""Values computed anew while everybody goes on with the old ones."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

from django.db import connections

from ..core.driver.async_server import async_server_of
from ..core.driver.os_threads import start_here
from ..core.events import log
from .calling import as_here, current_task
from .lease.request import Outcome, ValueRequest, computing
from .single_flight import Caller, hush, is_flying, is_quiet, refresh

_tasks: set[asyncio.Task[Any]] = set()
"""The loop itself keeps only weak references."""


def in_thread(want: ValueRequest, old: bytes) -> None:
    """Compute a new value in a thread, in the caller's context, unless somebody does so already."""
    if is_flying(want) or is_quiet(want):
        return

    def run() -> None:
        try:
            caller = Caller(threading.current_thread(), want.server.room)
            _report(want, want.server.run(refresh(want, caller, old, -math.inf)))
        except Exception:
            log.exception("The value of %r could not be computed anew.", want.key)
        finally:
            connections.close_all()  # of this thread

    try:
        start_here(as_here(run), "redislock-refresh")
    except RuntimeError:  # no more threads are to be had; the old value is there
        hush(want)
        log.exception("The value of %r could not be computed anew.", want.key)


def in_task(want: ValueRequest, old: bytes) -> None:
    """Compute a new value in a task of the running loop, unless somebody does so already."""
    if is_flying(want) or is_quiet(want):
        return

    async def run() -> None:
        computing.set(())  # it outlives the computation that it may have been asked for in
        try:
            server = async_server_of(want.server)
            _report(want, await server.run(refresh(want, Caller(current_task(), server.room), old, -math.inf)))
        except Exception:
            log.exception("The value of %r could not be computed anew.", want.key)

    task = asyncio.get_running_loop().create_task(run(), name="redislock-refresh")
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _report(want: ValueRequest, landing: Outcome) -> None:
    if landing.error is not None:
        log.error("The value of %r could not be computed anew.", want.key, exc_info=landing.error)
