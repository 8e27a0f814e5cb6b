"""Who holds it wants it once more."""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest

from django_redislock.exceptions import AlreadyAcquired

from .. import rules
from ..cell import Cell
from ..columns import column


@column("it enters again, without a limit", needs="block")
def enters_again(cell: Cell) -> None:
    """Who has all places would wait for itself, and is told so; a re-entrant lock is entered."""
    row = cell.row
    # A transaction is not begun within itself, so its lock is not asked for.
    told = pytest.raises(RuntimeError if "transaction" in row.traits else AlreadyAcquired)
    others = [cell.actor(timeout=None).made for _ in range(row.limit)]

    def again(held: Any) -> None:
        with ExitStack() as inside:
            for made in others[1:]:
                inside.enter_context(made)
            if "reentrant" not in row.traits:
                inside.enter_context(told)
            inside.enter_context(others[0])

    async def again_in_a_task(held: Any) -> None:
        async with AsyncExitStack() as inside:
            for made in others[1:]:
                await inside.enter_async_context(made)
            if "reentrant" not in row.traits:
                inside.enter_context(told)
            await inside.enter_async_context(others[0])

    holder = cell.actor(timeout=None)
    holder.enter()
    try:
        holder.ask(again_in_a_task if row.is_async else again)
    except TimeoutError:
        cell.delete("lock")  # else it waits for ever
        raise
    holder.leave()
    rules.is_clean(cell)
    rules.can_be_used_again(cell, holder)
