"""Nothing at all, and errors of the server that pass."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import redis

from tests.support import BUSY, begin, wait_until

from .. import rules
from ..cell import SOON, Cell
from ..columns import column


@column("nothing")
def nothing(cell: Cell) -> None:
    holder = cell.holder()
    assert cell.owners()
    waiter = cell.waiter()
    holder.leave()
    waiter.gets_in(SOON)
    waiter.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder, waiter)


BRIEFLY = 0.15


def _in_place(reply: str) -> Callable[[Cell], AbstractContextManager[None]]:
    return lambda cell: cell.proxy.refusing(reply, b"EVAL")


def _set(*on: str, off: tuple[str, ...]) -> Callable[[Cell], AbstractContextManager[None]]:
    @contextmanager
    def state(cell: Cell) -> Iterator[None]:
        cell.raw.execute_command(*on)
        try:
            yield
        finally:
            cell.raw.execute_command(*off)

    return state


@contextmanager
def _busy(cell: Cell) -> Iterator[None]:
    cell.raw.config_set("busy-reply-threshold", "20")
    with cell.server.client(socket_timeout=20) as blocking:
        blocker = begin(blocking.eval, "while true do end", 0)

        def is_busy() -> bool:
            try:
                return not cell.raw.ping()
            except redis.ResponseError as error:
                return "BUSY" in str(error)

        wait_until(is_busy)
        try:
            yield
        finally:
            cell.raw.script_kill()
            with suppress(redis.RedisError):
                blocker.result(10)


@contextmanager
def _no_descriptor(cell: Cell) -> Iterator[None]:
    """All connections are gone, and the process may open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        fill = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, fill)
        while (lowest := os.dup(fill)) < 64:
            stack.callback(os.close, lowest)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            cell.proxy.cut()
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


ERRORS: dict[str, Callable[[Cell], AbstractContextManager[None]]] = {
    "BUSY": _busy,
    "MISCONF": _in_place(
        "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist on disk."
    ),
    "LOADING": _in_place("LOADING Valkey is loading the dataset in memory"),
    "READONLY": _set("REPLICAOF", "127.0.0.1", "1", off=("REPLICAOF", "NO", "ONE")),
    "MASTERDOWN": _in_place("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
    "NOREPLICAS": _set(
        "CONFIG", "SET", "min-replicas-to-write", "1", off=("CONFIG", "SET", "min-replicas-to-write", "0")
    ),
    "OOM": _set("CONFIG", "SET", "maxmemory", "1", off=("CONFIG", "SET", "maxmemory", "0")),
    "CLUSTERDOWN": _in_place("CLUSTERDOWN The cluster is down"),
    "TRYAGAIN": _in_place("TRYAGAIN Multiple keys request during rehashing of slot"),
    "a closed connection": _in_place(""),
    "no file descriptor": _no_descriptor,
}


def _while_it_waits(cell: Cell, error: Callable[[Cell], AbstractContextManager[None]]) -> None:
    holder = cell.holder()
    waiter = cell.waiter()
    with error(cell):
        time.sleep(BRIEFLY)
        late = cell.actor()
        late.start()
        time.sleep(BRIEFLY)
    for each in (waiter, late):
        assert not each.ended, (
            f"{'one who waited' if each is waiter else 'one who entered'}: {each.round.exception()!r}"
        )
    holder.leave()
    rules.each_gets_in(cell, waiter, late)
    rules.is_clean(cell)


def _as_it_leaves(cell: Cell, error: Callable[[Cell], AbstractContextManager[None]]) -> None:
    holder = cell.holder()
    with error(cell):
        left = holder.begin_to_leave()
        time.sleep(BRIEFLY)
    left.result(SOON + BUSY)
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)


for _name, _error in ERRORS.items():
    _needs = "patience" if _name in ("BUSY", "OOM") else "patience quick"
    _needs += " worker" if _name == "no file descriptor" else ""
    # Also what would end the deployment: a node of a Cluster is no replica, and a replica has none.
    _needs += " alone" if _name in ("MISCONF", "LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN") else ""
    column(f"{_name} while it waits", needs=_needs)(partial(_while_it_waits, error=_error))
    column(f"{_name} as it leaves", needs=_needs)(partial(_as_it_leaves, error=_error))


@column("OOM as it is extended", needs="belief block")
def extended_on_a_full_server(cell: Cell) -> None:
    def locks_of(held: Any) -> list[Any]:
        return list(held.values()) if hasattr(held, "values") else [held]

    def extend(held: Any) -> None:
        for each in locks_of(held):
            each.extend(60)

    async def extend_in_a_task(held: Any) -> None:
        for each in locks_of(held):
            await each.extend(60)

    holder = cell.holder()
    with ERRORS["OOM"](cell):
        holder.ask(extend_in_a_task if cell.row.is_async else extend)
    left = [raw.pttl(key) / 1000 for raw, key in cell.keys("lock")]
    assert any(seconds > 31 for seconds in left), f"its expiry was 30 s, and is 60 s now, not {left}"
    holder.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)
