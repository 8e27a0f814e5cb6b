"""Replies and connections that are lost."""

from __future__ import annotations

import time

import pytest

from django_redislock.exceptions import LockError
from tests.support import wait_until

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


@column("all connections are cut while it waits")
def cut_while_it_waits(cell: Cell) -> None:
    holder = cell.holder()
    # Of the callers of one process who want one value, one stands in the queue.
    waiters = [cell.waiter() for _ in range(1 if "value" in cell.row.traits else 16)]
    cell.proxy.cut()
    holder.leave()
    rules.each_gets_in(cell, *waiters)
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
