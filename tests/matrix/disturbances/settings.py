"""Settings, servers and users that allow less."""

from __future__ import annotations

import io

from django.core.management import call_command

from tests.support.declared_keys import checking_keys

from .. import rules
from ..cell import SOON, Cell
from ..columns import column


@column("ENABLED: False", needs="settings off here")
def not_enabled(cell: Cell) -> None:
    with cell.configured(ENABLED=False):
        first, second = cell.actor(), cell.actor()
        third = cell.actor()
        cell.may_overlap = True
        for each in (first, second, third):
            each.enter()
            if hasattr(each.held, "owned"):
                assert each.ask(lambda held: held.owned()), "each holds what it has entered, by its own word"
        # The cache keeps pages, and the janitor may yet write what the cell before this one gave up.
        of_locks = [key for key in cell.raw.keys("*") if not key.startswith(b":1:") and b":undone:" not in key]
        assert not of_locks
        for each in (first, second, third):
            each.leave()


@column("a server that refuses keys outside KEYS", needs="here")
def named_keys_only(cell: Cell) -> None:
    with checking_keys():
        rules.hands_over(cell)


@column("a client with decode_responses looks at all keys")
def decoded(cell: Cell) -> None:
    with cell.server.client(decode_responses=True) as client:
        holder = cell.holder()
        waiter = cell.waiter()
        assert list(client.scan_iter())
        holder.leave()
        waiter.gets_in(SOON)
        rules.is_clean(cell)
        assert list(client.scan_iter(cell.name)) == []


@column("its own client decodes replies", needs="queue text")
def decoding(cell: Cell) -> None:
    cell.url += "?decode_responses=True"
    with cell.configured():
        rules.hands_over(cell)


@column("the user has the least rights", slow=True)
def least_rights(cell: Cell) -> None:
    said = io.StringIO()
    with cell.configured():
        call_command("redislock", "doctor", "--acl", stdout=said)
    cell.raw.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret")
    for line in said.getvalue().splitlines():
        _, _, _, *rights = line.split()
        cell.raw.execute_command("ACL", "SETUSER", "app", *rights)
    cell.url = cell.url.replace("//", "//app:secret@")
    with cell.configured():
        rules.hands_over(cell)
