"""Forks, of which Python knows or not."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.support import fork_in_c, lived, wait_until

from .. import rules
from ..cell import SOON, Cell
from ..columns import column


def _child(fork: Callable[[], int], run: Callable[[], object], beside: Callable[[], object] = int) -> None:
    """Run the function in a forked child, and fail with what it raises there; `beside` runs in the parent meanwhile."""
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            run()
            os.write(write, b"ended")
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        killer = threading.Timer(30, os.kill, (pid, 9))
        killer.start()
        try:
            beside()
        finally:
            words = said.read()
            killer.cancel()
            os.waitpid(pid, 0)
    assert words == "ended", f"in the child: {words or 'it hangs'}"


def _pids(cell: Cell) -> set[int]:
    """Hold in this process, and return whose locks these are by what stands in Redis."""
    found: set[int] = set()
    other = cell.actor(cell.name + "-other")
    other.once_here(lambda held: found.update(cell.pids(other.place.name)))
    return found


def _fork_while_it_holds(cell: Cell, fork: Callable[[], int]) -> None:
    # The child is refused after that time. A message is published and begins within it, also on a busy machine; so does
    # who asks for a stale value.
    holder = cell.holder(timeout=2.0 if cell.row.traits & {"asked", "stands"} else 0.2)
    owners = sorted(cell.owners())

    def in_the_child() -> None:
        with pytest.raises(rules.REFUSED):
            holder.once_here()
        assert _pids(cell) == {os.getpid()}, "what it holds is its own"
        if not cell.row.is_async and "block" not in cell.row.lacks and "transaction" not in cell.row.traits:
            holder.made.__exit__(None, None, None)  # its parent's block: without an error, and without effect

    def fork_here(held: Any = None) -> None:
        _child(fork, in_the_child)

    # A child cannot use its parent's loop, nor end its transaction, its task or its computation.
    fork_here() if cell.row.is_async or cell.row.traits & {"transaction", "asked", "value"} else holder.ask(fork_here)
    if cell.row.traits & {"quorum", "kept"}:
        # What a server of several granted the child late is there until its expiry, because the child ends at once; so
        # is what is kept.
        wait_until(lambda: sorted(cell.owners()) == owners, 10, lambda: f"{cell.owners()} are to be {owners}")
    assert sorted(cell.owners()) == owners
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)


def _fork_while_it_is_idle(cell: Cell, fork: Callable[[], int]) -> None:
    used = cell.actor()
    used.round_trip()
    theirs, ours = cell.actor(cell.name + "-child", expire=1.2), cell.actor(cell.name + "-parent")
    ours.round_trip()

    def in_the_child() -> None:
        assert _pids(cell) == {os.getpid()}, "what it holds is its own"
        for each in (used, theirs):
            for _ in range(10):
                each.once_here()
        theirs.once_here(lambda held: (lived(1.5), cell.owners(theirs.place.name) or 1 / 0))

    def in_the_parent() -> None:
        for _ in range(20):
            ours.once_here()

    _child(fork, in_the_child, in_the_parent)
    rules.is_clean(cell)
    rules.can_be_used_again(cell, used)


def _is_its_own(cell: Cell) -> Callable[[], None]:
    def in_the_child() -> None:
        assert _pids(cell) == {os.getpid()}, "what it holds is its own"

    return in_the_child


def _fork_while_it_waits(cell: Cell, fork: Callable[[], int]) -> None:
    holder = cell.holder()
    waiter = cell.waiter()
    _child(fork, _is_its_own(cell))
    assert not waiter.inside.is_set()
    assert not waiter.ended
    holder.leave()
    waiter.gets_in(SOON)
    waiter.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder, waiter)


def _fork_while_it_enters(cell: Cell, fork: Callable[[], int]) -> None:
    cell.actor(cell.name + "-before").round_trip()
    actor = cell.actor()
    reply = cell.proxy.hold_next_reply(b"EVAL")
    actor.start()
    assert reply.held.wait(10)
    try:
        _child(fork, _is_its_own(cell))
    finally:
        reply.let_go.set()
    actor.gets_in(SOON)
    actor.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, actor)


# Since Python 3.13 a thread that waits in a SimpleQueue, as an idle one of an executor does, stands on a list that all
# threads share, with an entry on its stack. The child gives that stack to another thread, and crashes when Python reads
# the list. The process of the cells has many such threads.
_CRASHES = "Python itself crashes in the child; tests/core/test_forks_in_c.py forks a process of few threads"
_SKIP = _CRASHES if sys.version_info >= (3, 13) else ""
for _how, _fork in {"a fork": os.fork, "a fork that Python does not see": fork_in_c}.items():
    _needs, _options = ("fork", {}) if _fork is os.fork else ("fork alone", {"alone": True, "skip": _SKIP})
    column(f"{_how} while it holds", needs=f"timeout {_needs}", **_options)(partial(_fork_while_it_holds, fork=_fork))
    column(f"{_how} while it is idle", needs=_needs, **_options)(partial(_fork_while_it_is_idle, fork=_fork))
column("a fork while it waits", needs="fork worker")(partial(_fork_while_it_waits, fork=os.fork))
column("a fork while it enters", needs="fork worker")(partial(_fork_while_it_enters, fork=os.fork))
