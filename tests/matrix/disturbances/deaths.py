"""Who holds is killed or frozen; the server is frozen or restarted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from django_redislock.exceptions import LockError, LockLost
from tests.support import BUSY, freeze, wait_until

from .. import rules
from ..cell import SOON, Cell
from ..columns import column

EXPIRE = 1.0


def _holder_in_a_child(cell: Cell) -> tuple[int, Callable[[], str]]:
    """Hold in a forked process, with all companions; return its number, and what waits for its last word."""
    read, write = os.pipe()
    actors = [cell.actor(expire=EXPIRE) for _ in range(cell.row.limit - 1)]
    theirs = cell.actor(expire=EXPIRE)
    pid = os.fork()
    if pid == 0:
        word = "left"
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            os.close(read)
            theirs.once_here(lambda held: (os.write(write, b"inside\n"), signal.sigwait({signal.SIGUSR1})))
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

    def last_word() -> str:
        with lines:
            word = read_word(10)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        return word

    return pid, last_word


@column("the holder is killed", needs="fork", slow=True)
def killed(cell: Cell) -> None:
    pid, last_word = _holder_in_a_child(cell)
    waiter = cell.waiter()
    os.kill(pid, signal.SIGKILL)
    waiter.gets_in(EXPIRE + SOON)
    waiter.leave()
    last_word()
    # Of several servers one may not have been asked by the successor: its index has the killed one until it is read.
    rules.is_clean(cell, index="quorum" not in cell.row.traits)


@column("the holder is frozen past its expiry", needs="fork", slow=True)
def frozen(cell: Cell) -> None:
    pid, last_word = _holder_in_a_child(cell)
    waiter = cell.waiter()
    try:
        freeze(pid)
        waiter.gets_in(EXPIRE + SOON)
        owners = cell.owners()
    finally:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    word = last_word()
    if not cell.row.traits & {"quorum", "stands"}:
        assert cell.owners() == owners, "its successor keeps what it has"
    assert "belief" in cell.row.lacks or not waiter.told
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
    wait_until(lambda: holder.told, EXPIRE / 3 + SOON + BUSY, "who lost is told")
    rules.end_tells(holder)
    for each in cell.actors:
        with suppress(LockError):
            each.leave()
    rules.can_be_used_again(cell, holder)
