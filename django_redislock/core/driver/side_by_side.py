"""Operations on several servers at the same time: in the event loop of the caller, or of a thread for all threads."""

from __future__ import annotations

import asyncio
import math
import sys
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from ...exceptions import LockBackendError
from ..clock import monotonic
from . import os_threads
from .async_server import async_server_of
from .effects import Operation, without_frames
from .os_threads import Slot
from .process import after_in_child
from .server import Server

GRACE = 0.01
"""Seconds for which the last servers are waited for, after the others have answered."""
LEFT_OUT = 2.0
"""Seconds for which a server that did not answer is left out where the others suffice."""

GREENLET_PAUSE = 0.002
"""Seconds between two checks of a greenlet whether the loop's thread has done its work."""
START_WITHIN = 10.0
"""Seconds for which the start of the thread is waited for."""

T = TypeVar("T")


class LeftOut(weakref.WeakKeyDictionary[Server, float]):
    """The servers that did not answer, each with the time until which it is left out."""

    def note(self, server: Server) -> None:
        self[server] = monotonic() + LEFT_OUT


left_out = LeftOut()
background: set[asyncio.Task[Any]] = set()
"""The tasks that no other task waits for, because an event loop refers to its tasks weakly only."""


def in_background(task: asyncio.Task[Any]) -> None:
    """Let the task end by itself; Redis's errors were logged when they occurred."""
    background.add(task)
    task.add_done_callback(_ended)


def _ended(task: asyncio.Task[Any]) -> None:
    background.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, LockBackendError):
        task.get_loop().call_exception_handler({"message": "A quorum lock failed.", "exception": error, "task": task})


async def on_servers(
    operations: dict[Server, Operation[T]], enough: Callable[[dict[Server, T], int], bool], grace: float = GRACE
) -> tuple[dict[Server, T], str]:
    """Run each operation on its server, and return the results by server, and the cause of a failure, "" without one.

    Once ``enough(results, number of servers without an answer)`` is true, the others get `grace` more seconds to
    answer. Their operations go on by themselves.
    """
    tasks = {asyncio.create_task(async_server_of(server).run(todo)): server for server, todo in operations.items()}
    results: dict[Server, T] = {}
    cause, pending = "", set(tasks)
    try:
        while pending:
            patience = grace if enough(results, len(pending)) else None
            done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                for task in pending:
                    left_out.note(tasks[task])
                return results, cause or f"no answer within {grace:g} s after the other servers"
            for task in done:
                try:
                    results[tasks[task]] = task.result()
                except LockBackendError as error:
                    cause = without_frames(error).cause
        return results, cause
    finally:
        for task in pending:
            in_background(task)


_loop: Slot[asyncio.AbstractEventLoop] = Slot()


def _run_loop(started: os_threads.OsEvent) -> None:
    loop = asyncio.new_event_loop()  # in its own thread, because gevent's selectors belong to the thread that made them
    loop.set_debug(False)  # also where Python runs in its development mode: it is no loop of the program
    mine = _loop.put_if_empty(loop) is loop
    started.set()
    if mine:
        loop.run_forever()
    else:  # another thread was faster
        loop.close()


def run_in_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the event loop of a thread of its own, one for all threads of this process.

    It goes on when an exception interrupts the caller, as a signal handler may.
    """
    loop = _loop.value
    if loop is None:
        started = os_threads.OsEvent()
        os_threads.start(partial(_run_loop, started), "redislock-quorum")
        started.wait(START_WITHIN)
        loop = _loop.value
        if loop is None:
            raise RuntimeError(f"the thread of the quorum locks did not start within {START_WITHIN:g} s")
    if asyncio._get_running_loop() is loop:
        raise RuntimeError("a listener that a quorum lock calls cannot wait for a quorum lock: use another thread")
    if sys.is_finalizing():  # the loop's thread does not run any more: a generator that held a lock waited for ever
        raise RuntimeError("the program ends, and a quorum lock can ask no server now: it ends by its expiry")
    outcome: list[tuple[T | None, BaseException | None]] = []
    done = os_threads.OsEvent()

    async def carry_out() -> None:
        try:
            outcome.append((await work(), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()

    loop.call_soon_threadsafe(lambda: in_background(loop.create_task(carry_out())))
    # An event of another thread would stop all greenlets of this one.
    if os_threads.greenlets() or os_threads.hub() is not None:
        while not outcome:
            os_threads.sleep(GREENLET_PAUSE)
    else:
        done.wait(math.inf)
    result, error = outcome.pop()
    try:
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
    finally:
        del error  # it refers to this frame


def _after_fork() -> None:
    global _loop
    _inherited.append(_loop.value)
    _loop = Slot()


_inherited: list[Any] = []
"""The parent's loop, kept because its destructor would close what the parent uses."""
after_in_child("quorum loop", _after_fork)
