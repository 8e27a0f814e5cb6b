"""What the server loses, and who else may leave a block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from django_redislock.core import Lock
from django_redislock.core.keys import BUCKETS, keys_in, listed_name, lock_keys
from tests.support import BUSY, begin, lived, wait_until

from .. import rules
from ..cell import SOON, Cell
from ..columns import column


@column("SCRIPT FLUSH")
def script_flush(cell: Cell) -> None:
    holder = cell.holder()
    waiter = cell.waiter()
    cell.raw.script_flush()
    holder.leave()
    waiter.gets_in(SOON)
    cell.raw.script_flush()
    waiter.leave()
    rules.is_clean(cell)


@column("the lock is deleted", needs="belief renewal")
def lock_deleted(cell: Cell) -> None:
    holder = cell.actor(expire=0.9)
    holder.enter()
    cell.delete("lock")
    wait_until(lambda: holder.told, SOON + BUSY, "who lost is told")
    rules.end_tells(holder)
    rules.is_clean(cell, index=False)
    holder.round_trip()
    rules.is_clean(cell)


def _recall(cell: Cell) -> None:
    """Ask all holders, as the admin does."""
    for raw, key in cell.keys("lock"):
        tag, _, name = key.partition(b":lock:")
        listed = listed_name(name)
        of_bucket = int(tag.strip(b"{}").rpartition(b":")[2]) < BUCKETS  # else a value's, in cluster mode
        keys = lock_keys("redislock", listed) if of_bucket else keys_in(tag, listed)
        Lock(raw, cell.name)._copy(_keys=keys).recall(by="olga", reason="a deploy")


@column("it is asked to give it back", needs="renewal")
def recalled(cell: Cell) -> None:
    holder = cell.holder(expire=1.5)
    waiter = cell.waiter(expire=1.5)
    before, holders = set(cell.owners()), [actor for actor in cell.actors if actor is not waiter]
    _recall(cell)
    if "belief" in cell.row.lacks:
        for actor in holders:
            actor.leave()
    else:
        wait_until(lambda: all(actor.told for actor in holders), 0.5 + SOON + BUSY, "who was asked is told")
        still = {owner.removeprefix(b"recalled ") for owner in cell.owners()}
        gives_back = "quorum" in cell.row.traits or "here" in cell.row.lacks  # by itself, as soon as it is told
        assert before & still or gives_back, "it is not taken from who is told"
        for actor in holders:
            rules.end_tells(actor)
    waiter.gets_in(rules.one_by_one(cell, [waiter]) + 1.5)
    waiter.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder, waiter)


@column("the queue is deleted", needs="queue quick")
def queue_deleted(cell: Cell) -> None:
    holder = cell.holder()
    # Of the callers of one process who want one value, one stands in the queue.
    waiters = [cell.waiter() for _ in range(1 if "value" in cell.row.traits else 16)]
    cell.delete("queue")
    holder.leave()
    rules.each_gets_in(cell, *waiters, within=rules.one_by_one(cell, waiters))
    rules.is_clean(cell)


def _without(cell: Cell, kind: str) -> None:
    holder = cell.holder()
    waiter = cell.waiter()
    for raw in cell.arena.raws:
        for key in raw.keys(f"*:{kind}*"):
            raw.delete(key)
    holder.leave()
    waiter.gets_in(SOON)
    waiter.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder, waiter)


for _kind, _what in {"fence": "fence", "held": "index", "released": "receipts"}.items():
    column(f"the {_what} is deleted" if _what != "receipts" else "the receipts are deleted")(
        partial(_without, kind=_kind)
    )


@column("another thread leaves the block", needs="block thread")
def another_thread_leaves(cell: Cell) -> None:
    made = cell.actor().made
    block = cell.row.block(made)
    begin(lambda: next(block)).result(20)
    assert cell.owners()
    begin(lambda: next(block, None)).result(20)
    rules.is_clean(cell)


@column("another task leaves the block", needs="block task")
def another_task_leaves(cell: Cell) -> None:
    made = cell.actor().made

    async def block() -> AsyncIterator[None]:
        async with made:
            yield

    steps = block()

    async def step() -> None:
        await anext(steps, None)

    cell.arena.in_the_loop(step()).result(20)
    assert cell.owners()
    cell.arena.in_the_loop(step()).result(20)
    rules.is_clean(cell)


@column("it is held for longer than its expiry", needs="renewal", slow=True)
def held_for_long(cell: Cell) -> None:
    holder = cell.holder(expire=0.6)
    waiter = cell.waiter(expire=0.6)
    owners = sorted(cell.owners())  # a message that waits in its worker has a lock, too
    lived(1.3)
    assert sorted(cell.owners()) == owners, "it is renewed"
    holder.leave()
    waiter.gets_in(SOON)
    rules.is_clean(cell)
