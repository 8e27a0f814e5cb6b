"""Who holds is killed or frozen; the server is frozen or restarted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from django_redislock.exceptions import LockError, LockLost
from tests.support import BUSY, freeze, lived, wait_until

from .. import rules
from ..cell import SOON, Cell
from ..columns import column

EXPIRE = 1.0


def _holder_in_a_child(cell: Cell) -> tuple[int, Callable[[], tuple[str, str]]]:
    """Hold in a forked process, with all companions; return its number, and what waits for its last words."""
    read, write = os.pipe()
    actors = [cell.actor(expire=EXPIRE) for _ in range(cell.row.limit - 1)]
    theirs = cell.actor(expire=EXPIRE)

    def inside(held: object) -> None:
        os.write(write, b"inside\n")
        signal.sigwait({signal.SIGUSR1})
        # By the next step already, and not only when the watchdog has run again.
        os.write(write, b"knows\n" if "belief" not in cell.row.lacks and cell.row.lost(held) else b"\n")

    pid = os.fork()
    if pid == 0:
        word = "left"
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            os.close(read)
            theirs.once_here(inside)
        except LockLost:
            word = "told"
        except BaseException as error:
            word = repr(error)
        finally:
            os.write(write, f"{word}\n".encode())
            os._exit(0)
    os.close(write)
    lines = os.fdopen(read)

    def read_word(within: float) -> str:
        killer = threading.Timer(within, os.kill, (pid, signal.SIGKILL))
        killer.start()
        word = lines.readline().strip()
        killer.cancel()
        return word

    assert read_word(20) == "inside"
    for actor in actors:
        actor.enter()

    def last_words() -> tuple[str, str]:
        """Return whether it knew of a loss when it went on, and how its block ended."""
        with lines:
            words = read_word(10), read_word(10)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        return words

    return pid, last_words


@column("the holder is killed", needs="fork", slow=True)
def killed(cell: Cell) -> None:
    pid, last_words = _holder_in_a_child(cell)
    waiter = cell.waiter()
    os.kill(pid, signal.SIGKILL)
    waiter.gets_in(EXPIRE + SOON)
    waiter.leave()
    last_words()
    # Of several servers one may not have been asked by the successor: its index has the killed one until it is read.
    rules.is_clean(cell, index="quorum" not in cell.row.traits)


@column("the holder is frozen past its expiry", needs="fork", slow=True)
def frozen(cell: Cell) -> None:
    pid, last_words = _holder_in_a_child(cell)
    waiter = cell.waiter()
    try:
        freeze(pid)
        waiter.gets_in(EXPIRE + SOON)
        owners = cell.owners()
    finally:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    at_once, word = last_words()
    if not cell.row.traits & {"quorum", "stands"}:
        assert cell.owners() == owners, "its successor keeps what it has"
    assert "belief" in cell.row.lacks or not waiter.told
    assert "belief" in cell.row.lacks or at_once == "knows", "who lost is told before its next step"
    if "end" not in cell.row.lacks:
        assert word == "told"
    waiter.leave()
    rules.is_clean(cell, index=False)


@column("the server is frozen for a moment", slow=True)
def server_frozen(cell: Cell) -> None:
    holder = cell.holder(expire=3.0)
    waiter = cell.waiter()
    cell.server.pause()
    time.sleep(0.4)
    cell.server.resume()
    holder.leave()
    waiter.gets_in(SOON)
    waiter.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)


@column("the server is frozen past the expiry", needs="belief renewal", slow=True)
def server_frozen_long(cell: Cell) -> None:
    holder = cell.holder(expire=EXPIRE)
    cell.server.pause()
    try:
        wait_until(lambda: holder.told, EXPIRE + BUSY, "who lost is told, without an answer")
    finally:
        cell.server.resume()
    for each in cell.actors:
        with suppress(LockError):
            each.leave()
    rules.is_clean(cell, index=False)
    holder.round_trip()
    rules.is_clean(cell, index=False)


@column("the server restarts with its data", slow=True)
def restarts(cell: Cell) -> None:
    holder = cell.holder()
    waiter = cell.waiter()
    owners = sorted(cell.owners())
    cell.server.restart()
    cell.arena.settle()
    assert sorted(cell.owners()) == owners
    assert not waiter.ended
    holder.leave()
    waiter.gets_in(SOON)
    waiter.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)


@column("the server restarts without its data", needs="belief renewal", slow=True)
def restarts_empty(cell: Cell) -> None:
    holder = cell.holder(expire=EXPIRE)
    cell.server.restart(keep_data=False)
    cell.arena.settle()
    wait_until(lambda: holder.told, EXPIRE / 3 + SOON + BUSY, "who lost is told")
    rules.end_tells(holder)
    for each in cell.actors:
        with suppress(LockError):
            each.leave()
    rules.can_be_used_again(cell, holder)


def _clock_steps(cell: Cell, seconds: int) -> None:
    """Redis keeps the time of each key by its clock, so a step ahead ends all that is held."""
    cell.may_overlap = seconds > 0
    holder = cell.holder(expire=EXPIRE)
    waiter = cell.waiter(expire=EXPIRE)
    assert cell.arena.clock is not None
    cell.arena.clock.jump(seconds, cell.raw)
    if seconds > 0:
        if not cell.row.lacks & {"belief", "renewal"}:
            wait_until(lambda: holder.told, EXPIRE / 3 + SOON + BUSY, "who lost is told")
    else:
        lived(EXPIRE)
        assert not waiter.ended
        assert "belief" in cell.row.lacks or not holder.told, "a step back ends nothing"
    for each in cell.actors:
        if each is not waiter:
            with suppress(LockError):
                each.leave()
    waiter.gets_in(EXPIRE + SOON)
    with suppress(LockError):
        waiter.leave()
    for each in (holder, waiter):
        each.round_trip()
    rules.is_clean(cell, index=False)


column("the server's clock steps ahead", needs="clock", slow=True, clocked=True)(partial(_clock_steps, seconds=3600))
column("the server's clock steps back", slow=True, clocked=True)(partial(_clock_steps, seconds=-3600))
