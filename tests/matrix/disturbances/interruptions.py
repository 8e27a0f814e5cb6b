"""Handlers that raise, at whatever instruction."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dis import opname
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any

import django_redislock
from django_redislock.signals import lock_lost
from tests.support import BUSY, TimeLimit, wait_until

from .. import rules
from ..cell import SOON, Cell
from ..columns import column

SAMPLE = 60
"""So many points of a long round are tried at least."""
PACKAGE = str(Path(django_redislock.__file__).parent)


def _count(call: Callable[[], object]) -> int:
    """Make the call, and return the number of its points. The first count is too high, because it does not know yet
    which calls are of functions in Python."""
    return _traced(call, 0)


def _stop_at(point: int, call: Callable[[], object]) -> bool:
    """Make the call, and return whether it has this point, and so was interrupted there; Celery may go on after it."""
    try:
        return _traced(call, point) == point
    except TimeLimit:
        return True


@cache
def _instructions(code: CodeType) -> bytes:
    return code.co_code


_calls_of_python: set[tuple[CodeType, int]] = set()
"""The places of calls of functions in Python, as far as they were seen."""


def _traced(call: Callable[[], object], stop: int) -> int:
    """Make the call, and raise TimeLimit at this point of it (0: at none); return the number of points.

    The points are those at which CPython runs signal handlers: at the beginning of a function, at a jump backwards,
    and within and after a call of a function that is written in C.
    """
    steps = 0
    last: dict[int, tuple[str, int]] = {}  # by the id of the frame, because a frame that is kept keeps its locks

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal steps
        if event == "call" and frame.f_back is not None:
            # Of a function in Python: no handler runs between the call and its beginning, and none after it.
            _, at = last.pop(id(frame.f_back), ("", -1))
            _calls_of_python.add((frame.f_back.f_code, at))
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, _ = last.get(id(frame), ("", -1))
            now = opname[_instructions(frame.f_code)[frame.f_lasti]]
            last[id(frame)] = now, frame.f_lasti
            within = now.startswith("CALL") and (frame.f_code, frame.f_lasti) not in _calls_of_python
            if before in ("RESUME", "JUMP_BACKWARD") or before.startswith("CALL") or within:
                steps += 1
                if steps == stop:
                    sys.settrace(None)
                    raise TimeLimit
        elif event == "return":
            last.pop(id(frame), None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


def _points(cell: Cell, last: int, steps: int = 0) -> range:
    """Return the points to try: all of them, or some where each round is long, or has a sibling that runs its lines."""
    return range(1, last + 1, max(1, (steps or last) // SAMPLE) if "long" in cell.row.traits else 1)


@contextmanager
def _destructors() -> Iterator[list[str]]:
    """Give a list of what destructors raise; what interrupted one itself is not in it, because Python swallows that."""
    failed: list[str] = []

    def note(unraisable: Any) -> None:
        # A socket that nobody closed is closed with its object.
        if not isinstance(unraisable.exc_value, (TimeLimit, ResourceWarning)):
            failed.append(f"{unraisable.object}: {unraisable.exc_value!r}")

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield failed
    finally:
        gc.collect()
        sys.unraisablehook = before


@column("interrupted as it enters", needs="block thread")
def interrupted_entering(cell: Cell) -> None:
    others = [cell.actor() for _ in range(cell.row.limit - 1)]
    made = cell.actor().made
    cell.row.once(made, lambda held: None)
    entered = []

    def enter() -> None:
        entered.append(made.__enter__())

    def leave() -> None:
        while entered:
            made.__exit__(None, None, None)
            entered.pop()

    steps = 0
    for _ in range(2):
        for each in others:
            each.enter()
        steps = _count(enter)
        leave()
        cell.leave_all()
    lost = []
    lock_lost.connect(note := lambda name, **_: lost.append(name))
    for point in _points(cell, steps):
        for each in others:  # so that it gets the last place: what it has in the first one is given back by more ways
            each.enter()
        _stop_at(point, enter)
        leave()
        rules.is_clean(cell, f"interrupted at point {point} of {steps} as it entered")
        cell.row.once(made, lambda held: None)
    lock_lost.disconnect(note)
    assert not lost, "what is given back is no loss"


@column("interrupted as it leaves", needs="block thread", slow=True)
def interrupted_leaving(cell: Cell) -> None:
    """What is interrupted before its release may stay for its expiry: Python cannot prevent it."""
    made = cell.actor(expire=1.0).made
    cell.row.once(made, lambda held: None)

    def leave() -> None:
        made.__exit__(None, None, None)

    steps = 0
    for _ in range(2):
        made.__enter__()
        steps = _count(leave)
    with _destructors() as failed:
        for point in _points(cell, steps):
            made.__enter__()
            _stop_at(point, leave)
            cell.row.once(made, lambda held: None)
        assert not failed, failed
    rules.is_clean(cell, within=1.0 + SOON)


@column("interrupted anywhere", needs="thread here", slow=True)
def interrupted_anywhere(cell: Cell) -> None:
    """What is interrupted as it leaves may stay for its expiry: Python cannot prevent it."""
    actor = cell.actor(expire=1.0)

    def once() -> None:
        cell.row.once(actor.made, lambda held: None)

    def hold() -> None:
        cell.row.once(actor.made, lambda held: owners.append(cell.owners()))

    steps = [_count(once) for _ in range(2)][1]
    owners: list[list[bytes]] = []
    with _destructors() as failed:
        # Further than to the number of points: who has waited for what was given back has a subscription, and then it
        # has more of them. The last ones, as a function ends, were never reached. (A block's end has its own column.)
        for point in _points(cell, 2 * steps - 1 if "block" in cell.row.lacks else steps, steps):
            interrupted = _stop_at(point, once)
            hold()
            assert owners[-1], f"after an interruption at point {point} it runs, and holds nothing"
            if not interrupted:
                break
        assert not failed, failed
    rules.is_clean(cell, within=1.0 + SOON)


class _Steps(Coroutine[Any, Any, None]):
    """A coroutine whose task is cancelled when it waits for this time: not after so many turns of the loop, because
    hundreds of them may pass before Redis answers."""

    def __init__(self, steps: Coroutine[Any, Any, None], stop: int) -> None:
        self._steps, self._stop = steps, stop
        self.waits = 0
        self.task: asyncio.Task[None] | None = None

    def send(self, value: Any) -> Any:
        return self._waiting(self._steps.send(value))

    def throw(self, *error: Any) -> Any:
        return self._waiting(self._steps.throw(*error))

    def _waiting(self, future: Any) -> Any:
        self.waits += 1
        if self.waits == self._stop and self.task is not None:
            asyncio.get_running_loop().call_soon(self.task.cancel)
        return future

    def close(self) -> None:
        self._steps.close()

    def __await__(self) -> Any:
        return self._steps.__await__()


@column("cancelled anywhere", needs="task")
def cancelled_anywhere(cell: Cell) -> None:
    for _ in range(cell.row.limit - 1):  # as for interruptions, so that it gets the last place
        cell.actor().enter()
    actor = cell.actor()

    async def body(held: Any) -> None:
        await asyncio.sleep(0)

    async def cancel_at(wait: int) -> bool:
        """Cancel it as it waits for this time; return whether it has waited so often."""
        steps = _Steps(cell.row.aonce(actor.made, body), wait)
        steps.task = asyncio.get_running_loop().create_task(steps)
        with suppress(asyncio.CancelledError):
            await steps.task
        return steps.waits >= wait

    async def cancel_everywhere() -> None:
        await cell.row.aonce(actor.made, body)
        for wait in count(1):
            cancelled = await cancel_at(wait)
            await asyncio.wait_for(cell.row.aonce(actor.made, body), SOON + BUSY)
            if not cancelled:
                break

    asyncio.run(cancel_everywhere())
    rules.is_clean(cell)


@column("a waiter is cancelled", needs="task")
def waiter_cancelled(cell: Cell) -> None:
    holder = cell.holder()
    waiter = cell.waiter()
    waiter.round.cancel()
    wait_until(lambda: not cell.queued(), SOON + BUSY)
    holder.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder, waiter)
