"""Signals whose handlers raise, at whatever point."""

from __future__ import annotations

import dis
import gc
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType, ModuleType
from typing import Any


class Interrupted(BaseException):
    """As Ctrl+C raises."""


class TimeLimit(Exception):
    """As a soft time limit raises."""


@contextmanager
def interruptions(error: type[BaseException]) -> Iterator[Callable[[float], None]]:
    """Yield what has the main thread interrupted after so many seconds; after 0 it is not.

    What destructors were interrupted in, or left open, is collected before the end: warnings of it belong to this test.
    """

    def interrupt(*args: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.collect()
        _release_handlers()


def interrupted_at_each_point(
    call: Callable[[int], object], *modules: ModuleType, within: str | None = None, as_signals: bool = False
) -> Iterator[int]:
    """Make the call again and again, each time interrupted by a TimeLimit one instruction of these modules later, until
    one comes to its end; yield the number of each. `within`: the name of the only function that is interrupted.
    `as_signals`: only where Python runs signal handlers, which is not between the value of a call and its return."""
    files = {module.__file__ for module in modules}
    left = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files or within not in (None, frame.f_code.co_name):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and (not as_signals or _runs_handlers(frame)):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise TimeLimit
        return trace

    # No collection meanwhile: it would call destructors of earlier tests' objects, and what is raised there is lost.
    gc.collect()
    gc.disable()
    try:
        for point in count(1):
            left, before = point, sys.gettrace()
            sys.settrace(trace)
            try:
                call(point)
            except TimeLimit:
                pass
            finally:
                sys.settrace(before)
            yield point
            if left > 0:
                return
    finally:
        gc.enable()


def _runs_handlers(frame: FrameType) -> bool:
    """Whether Python may run a signal handler here: at the start of a function, after a call, and at a jump back."""
    code, at = frame.f_code.co_code, frame.f_lasti
    if dis.opname[code[at]] == "RESUME" or "BACKWARD" in dis.opname[code[at]]:
        return True
    at -= 2
    while at > 0 and dis.opname[code[at]] == "CACHE":
        at -= 2
    return at > 0 and dis.opname[code[at]].startswith("CALL")


def _release_handlers() -> None:
    """Release the locks of logging and its handlers that this thread was interrupted with.

    Before Python 3.13, logging acquires them before its `try`. Every other thread that logged hung from then on.
    """
    handlers = filter(None, (reference() for reference in logging._handlerList))
    for lock in filter(None, (logging._lock, *(handler.lock for handler in handlers))):
        while lock._is_owned():
            lock.release()
