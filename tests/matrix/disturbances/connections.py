"""Replies and connections that are lost."""

from __future__ import annotations

import time

import pytest

from django_redislock.exceptions import LockError
from tests.support import BUSY, wait_until

from .. import rules
from ..cell import SOON, Cell
from ..columns import column


@column("a reply is lost as it enters")
def reply_lost_entering(cell: Cell) -> None:
    cell.actor(cell.name + "-before").round_trip()
    holder = cell.actor()
    before = cell.proxy.dropped
    cell.proxy.drop_next_reply(containing=b"EVAL")
    holder.enter()
    assert cell.proxy.dropped == before + 1
    holder.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)


@column("a reply is lost as it leaves")
def reply_lost_leaving(cell: Cell) -> None:
    holder = cell.holder()
    cell.proxy.drop_next_reply(containing=b"EVAL")
    holder.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)


IMPATIENT = 0.4
"""Seconds after which those of the next two columns give up a call, and make it again."""


@column("a reply is late as it enters", needs="patience here", slow=True)
def reply_late_entering(cell: Cell) -> None:
    with cell.own_connections(socket_timeout=IMPATIENT):
        holder = cell.actor()
        holder.round_trip()
        late = cell.proxy.hold_next_reply(b"EVAL")
        holder.start()
        assert late.held.wait(10)
        try:
            holder.gets_in(IMPATIENT + SOON)
        finally:
            late.let_go.set()
        owners = cell.owners()
        holder.leave()
        assert owners
        rules.is_clean(cell)
        rules.can_be_used_again(cell, holder)


@column("a reply is late as it leaves", needs="patience here", slow=True)
def reply_late_leaving(cell: Cell) -> None:
    with cell.own_connections(socket_timeout=IMPATIENT):
        holder = cell.holder()
        late = cell.proxy.hold_next_reply(b"EVAL")
        left = holder.begin_to_leave()
        assert late.held.wait(10)
        try:
            left.result(IMPATIENT + SOON + BUSY)
        finally:
            late.let_go.set()
        rules.is_clean(cell)
        rules.can_be_used_again(cell, holder)


@column("a request arrives late, while it holds")
def request_late_while_held(cell: Cell) -> None:
    """The connection was closed, so the call was made again."""
    cell.actor(cell.name + "-before").round_trip()
    holder = cell.actor()
    late = cell.proxy.deliver_late(b"EVAL")
    holder.enter()
    owners = sorted(cell.owners())
    late.deliver.set()
    assert late.delivered.wait(10)
    assert "kept" in cell.row.traits or sorted(cell.owners()) == owners
    holder.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)


@column("a request arrives late, when it has left")
def request_late_afterwards(cell: Cell) -> None:
    cell.actor(cell.name + "-before").round_trip()
    holder = cell.actor()
    late = cell.proxy.deliver_late(b"EVAL")
    holder.round_trip()
    late.deliver.set()
    assert late.delivered.wait(10)
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)


@column("all connections are cut while it waits", needs="quick worker")
def cut_while_it_waits(cell: Cell) -> None:
    holder = cell.holder()
    # Of the callers of one process who want one value, one stands in the queue.
    waiters = [cell.waiter() for _ in range(1 if "value" in cell.row.traits else 16)]
    cell.proxy.cut()
    holder.leave()
    rules.each_gets_in(cell, *waiters, within=rules.one_by_one(cell, waiters))
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder, waiters[0])


def _without_channels(cell: Cell, reply: str) -> None:
    with cell.own_connections(), cell.proxy.refusing(reply, b"\nSUBSCRIBE"):
        holder = cell.holder()
        waiter = cell.actor()
        waiter.start()
        wait_until(lambda: cell.proxy.refused > 0)
        time.sleep(0.1)
        holder.leave()
        waiter.gets_in(SOON)
        waiter.leave()
        short = cell.actor(timeout=0.3)
        holder.enter()
        with pytest.raises((TimeoutError, LockError)) as failure:
            short.enter()
        assert isinstance(failure.value, rules.REFUSED), "that it is held is no error of the server"
        rules.is_clean(cell)


@column("SUBSCRIBE is refused", needs="queue timeout")
def subscribe_refused(cell: Cell) -> None:
    _without_channels(cell, "ERR unknown command 'SUBSCRIBE'")


@column("the connection is closed at SUBSCRIBE", needs="queue timeout")
def closed_at_subscribe(cell: Cell) -> None:
    _without_channels(cell, "")
