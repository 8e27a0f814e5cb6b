"""What a column of the matrix is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .cell import Cell
from .holders import LACKS


@dataclass(frozen=True)
class Disturbance:
    """One thing that may happen. `run` brings it about in a cell and asks the rules; `needs` names what a row must have
    for it, by the words of `LACKS`."""

    name: str
    run: Callable[[Cell], None]
    needs: frozenset[str] = frozenset()
    slow: bool = False
    clocked: bool = False
    """Whether the cell moves the clock of the server."""
    alone: bool = False
    """Whether the cell has a process of its own."""
    skip: str = ""
    """Why it cannot be brought about with this Python; nothing if it can."""


DISTURBANCES: list[Disturbance] = []


def column(
    name: str, *, needs: str = "", slow: bool = False, clocked: bool = False, alone: bool = False, skip: str = ""
) -> Callable[[Callable[[Cell], None]], Callable[[Cell], None]]:
    words = frozenset(needs.split())
    assert words <= LACKS.keys(), words

    def note(run: Callable[[Cell], None]) -> Callable[[Cell], None]:
        DISTURBANCES.append(Disturbance(name, run, words, slow, clocked, alone, skip))
        return run

    return note
