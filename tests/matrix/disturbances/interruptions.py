"""Handlers that raise, at whatever instruction."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import django_redislock
from tests.support import TimeLimit

from .. import rules
from ..cell import Cell
from ..columns import column

PACKAGE = str(Path(django_redislock.__file__).parent)


def _count(call: Callable[[], object]) -> int:
    return _traced(call, 0)


def _stop_at(point: int, call: Callable[[], object]) -> None:
    with suppress(TimeLimit):
        _traced(call, point)


def _traced(call: Callable[[], object], stop: int) -> int:
    steps = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal steps
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == stop:
                sys.settrace(None)
                raise TimeLimit
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


@column("interrupted as it enters", needs="block thread")
def interrupted_entering(cell: Cell) -> None:
    made = cell.actor().made
    cell.row.once(made, lambda held: None)
    entered = []

    def enter() -> None:
        entered.append(made.__enter__())

    def leave() -> None:
        while entered:
            made.__exit__(None, None, None)
            entered.pop()

    def both() -> None:
        enter()

    steps = _count(enter)
    leave()
    for point in sorted({*range(1, steps, max(1, steps // POINTS)), *range(steps - POINTS, steps + 1)}):
        _stop_at(point, both)
        leave()
        rules.is_clean(cell, f"interrupted at step {point} of {steps} as it entered")
        cell.row.once(made, lambda held: None)


POINTS = 60
