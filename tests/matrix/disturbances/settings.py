"""Settings of the site or of the server that change how a lock works."""

from __future__ import annotations

from tests.support.declared_keys import checking_keys

from .. import rules
from ..cell import SOON, Cell
from ..columns import column


@column("ENABLED: False", needs="settings")
def not_enabled(cell: Cell) -> None:
    with cell.configured(ENABLED=False):
        first, second = cell.actor(), cell.actor()
        third = cell.actor()
        cell.may_overlap = True
        for each in (first, second, third):
            each.enter()
        assert not cell.raw.keys("*")
        for each in (first, second, third):
            each.leave()


@column("a server that refuses keys outside KEYS")
def named_keys_only(cell: Cell) -> None:
    with checking_keys():
        holder = cell.holder()
        waiter = cell.waiter()
        holder.leave()
        waiter.gets_in(SOON)
        waiter.leave()
        rules.is_clean(cell)
        rules.can_be_used_again(cell, holder, waiter)
