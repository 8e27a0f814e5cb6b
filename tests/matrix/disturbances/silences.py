"""Answers that stay away for longer than the client waits, calls that arrive late, and who gives up meanwhile."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import redis

from django_redislock.exceptions import LockError
from tests.support import BUSY, TimeLimit, interruptions, lived, wait_until

from .. import rules
from ..cell import SOON, Actor, Cell
from ..columns import column

ANSWERED_WITHIN = 0.8
"""Seconds after which the clients of these cells take the server for silent."""


@column("a silence longer than its timeout while it waits", needs="queue patience", slow=True)
def silent_while_it_waits(cell: Cell) -> None:
    # Twice that, because the end of the silence comes late on a busy machine, and its second question is answered then.
    answered_within = 2 * ANSWERED_WITHIN
    cell.url += f"?socket_timeout={answered_within}"
    with cell.configured(RETRY_FOR=answered_within / 2):
        holder = cell.holder()
        waiter = cell.waiter()
        asked = _scripts(cell)
        wait_until(lambda: _scripts(cell) > asked, 2 + BUSY, "it has the reply that it waits, and looks")
        cell.proxy.stall()
        # It looks within half a second, and its first question is over before the end of the silence.
        time.sleep(0.5 + answered_within + 0.05)
        cell.proxy.heal()
        assert not waiter.ended, f"it asks a silent server again: {waiter.round.exception()!r}"
        holder.leave()
        waiter.gets_in(SOON)
        waiter.leave()
        rules.is_clean(cell)


def _scripts(cell: Cell) -> int:
    """Return how many scripts the server has run."""
    return sum(
        int(each["calls"]) for name, each in cell.raw.info("commandstats").items() if name.startswith("cmdstat_eval")
    )


@column("a silence longer than its timeout as it leaves", needs="queue", slow=True)
def silent_as_it_leaves(cell: Cell) -> None:
    cell.url += f"?socket_timeout={ANSWERED_WITHIN / 4}"
    with cell.configured(RETRY_FOR=ANSWERED_WITHIN / 4):
        holder = cell.holder()
        cell.proxy.stall()
        left = holder.begin_to_leave()
        with suppress(LockError, redis.RedisError):  # of a value it is raised as the base class does
            left.result(10 * ANSWERED_WITHIN + BUSY)
        cell.proxy.heal()
        holder.round_trip()
        rules.is_clean(cell, within=2 + SOON)


@column("a call arrives when it has given up", needs="queue timeout", slow=True)
def arrives_late(cell: Cell) -> None:
    holder = cell.holder()
    short = cell.actor(timeout=0.3)
    late = cell.proxy.deliver_late(b"EVAL")
    with pytest.raises(rules.REFUSED):
        short.enter()
    assert late.held.is_set()
    cell.leave_all()
    rules.is_clean(cell, "before the call arrives")
    late.deliver.set()
    assert late.delivered.wait(10)
    rules.is_clean(cell, "after the call has arrived")
    rules.can_be_used_again(cell, holder, short)


@column("a waiter is interrupted", needs="thread here worker")
def waiter_interrupted(cell: Cell) -> None:
    holder = cell.holder()
    waiter = cell.actor()
    with interruptions(TimeLimit) as raise_after:
        raise_after(0.3)
        with pytest.raises(TimeLimit):
            waiter.once_here()
    wait_until(lambda: not cell.queued(), SOON + BUSY, "who was interrupted leaves the queue")
    cell.leave_all()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder, waiter)


@column("its grant is answered after its expiry", needs="renewal", slow=True)
def granted_too_late(cell: Cell) -> None:
    cell.actor(cell.name + "-before").round_trip()
    holder = cell.actor(expire=0.6)
    reply = cell.proxy.hold_next_reply(b"EVAL")
    holder.start()
    reply.let_go_after(lambda: lived(0.8))
    holder.gets_in(SOON)
    assert cell.owners(), "who is inside holds it"
    holder.leave()
    rules.is_clean(cell, index=False)


@column("a router forgets its connections", needs="queue patience", slow=True)
def forgotten(cell: Cell) -> None:
    cell.url += f"?socket_timeout={ANSWERED_WITHIN / 2}"
    with cell.configured():
        actor = cell.actor()
        actor.round_trip()
        cell.proxy.forget_connections()
        try:
            _use_again(cell, actor)
        finally:
            cell.proxy.cut()  # else the next cells use what was forgotten
        rules.is_clean(cell)


def _use_again(cell: Cell, actor: Actor) -> None:
    # Tasks that give up before the timeout must not use a dead connection for ever. A thread ends with its call.
    for _ in range(20 if cell.row.is_async else 0):
        actor.start()
        time.sleep(ANSWERED_WITHIN / 4)
        if actor.inside.is_set():
            actor.leave()
            break
        actor.round.cancel()
    else:
        assert not cell.row.is_async, "each of them was sent into a connection that is dead"
    actor.round_trip()
