"""The rules of every cell, judged by raw commands and by what is seen from outside."""

from __future__ import annotations

import time
from concurrent.futures import Future

import psutil
import pytest

from django_redislock.exceptions import LockLost, TaskAlreadyRunning
from tests.support import BUSY, wait_until

from .arenas import Arena
from .cell import SOON, Actor, Cell

REFUSED = TimeoutError, TaskAlreadyRunning
"""What those get whose time is over while somebody else holds it."""


def is_clean(cell: Cell, why: str = "", within: float = SOON, index: bool = True) -> None:
    """When all have left: what ended, raised or was given up leaves no lock, no reservation, no place in the queue, and
    no entry of the index. (Of a lock that somebody deleted, the entry stays until a list is made.)"""
    cell.leave_all()

    def left() -> list[bytes]:
        keys = [key for kind in ("lock", "queue") for _, key in cell.keys(kind)]
        # What ends by its expiry leaves its entry: that of a lock that was kept after its run.
        for raw in cell.arena.raws if index and "kept" not in cell.row.traits else []:
            for key in raw.keys("*:held"):
                keys += [key + b" " + name for name in raw.zrange(key, 0, -1) if cell.name.encode() in name]
        return keys

    wait_until(lambda: not left(), within + BUSY, lambda: f"{why}: nothing may be left, but there is {left()}")


def can_be_used_again(cell: Cell, *actors: Actor) -> None:
    """The object, its thread and its process hold again at once."""
    for actor in actors:
        actor.round_trip()
    is_clean(cell)


def hands_over(cell: Cell) -> None:
    """One holds, another one waits and has it when the first one leaves; both hold again."""
    holder = cell.holder()
    waiter = cell.waiter()
    holder.leave()
    waiter.gets_in(SOON)
    waiter.leave()
    is_clean(cell)
    can_be_used_again(cell, holder, waiter)


def each_gets_in(cell: Cell, *waiting: Actor, within: float = SOON) -> None:
    """Nobody waits beside a free lock: those who wait are inside one after the other, all of them in this time."""
    left, deadline = list(waiting), time.monotonic() + within + BUSY
    leaving: list[Future[None]] = []
    while left:
        came = wait_until(
            lambda: [each for each in left if each.inside.is_set() or each.ended],
            max(0.0, deadline - time.monotonic()),
            lambda: f"of {len(waiting)} who wait, {len(left)} still do, and these hold it: {cell.owners()}",
        )
        for each in came:
            leaving.append(each.begin_to_leave())  # its worker may have another message, which waits for the others
            left.remove(each)
    for end in leaving:
        end.result(20.0 + BUSY)  # as `Actor.leave` allows


def one_by_one(cell: Cell, waiting: list[Actor]) -> float:
    """Return the time in which all of them have been inside.

    Nobody is woken by the end of a lock that is kept, or waits in the queue with a message that is published again:
    each tries by himself.
    """
    each_by_himself = "kept" in cell.row.traits or "worker" in cell.row.lacks
    return len(waiting) * SOON if each_by_himself else SOON


def end_tells(actor: Actor) -> None:
    """Who lost is told at his end, too, unless the row's end raises nothing."""
    if "end" in actor.row.lacks:
        actor.leave()
        return
    with pytest.raises(LockLost):
        actor.leave()


def used_by(arena: Arena) -> tuple[int, int]:
    """Return the number of threads of this process, and of connections of the server."""
    return psutil.Process().num_threads(), len(arena.raw.client_list())


def returns_what_it_used(cell: Cell, before: tuple[int, int]) -> None:
    """Threads and connections do not grow with the calls: some of each caller are kept for the next one."""
    kept = 40 + 4 * len(cell.actors)  # a cell that tries each point makes hundreds of calls
    wait_until(
        lambda: all(now <= then + kept for now, then in zip(used_by(cell.arena), before, strict=True)),
        SOON + BUSY,
        lambda: f"{used_by(cell.arena)} threads and connections, before it {before}",
    )
