"""``bulk_update`` and ``bulk_create`` of fenced rows."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.bank.models import Account

pytestmark = pytest.mark.usefixtures("database")


def stored(pk):
    return Account.objects.values_list("balance", "fence").get(pk=pk)


def test_the_methods_for_many_rows_do_not_write_the_fence():
    Account.objects.get(pk=1).save_fenced(7)
    late = Account(pk=1, balance=1, fence=6)
    with pytest.raises(ValueError, match=r"bulk_update\(\) cannot update 'fence', because it may lower"):
        Account.objects.bulk_update([late], (name for name in ("balance", "fence")))
    for run in (Account.objects.bulk_create, lambda *args, **options: asyncio.run(bulk_create(*args, **options))):
        with pytest.raises(ValueError, match=r"bulk_create\(\) cannot update 'fence'"):
            run([late], update_conflicts=True, unique_fields=["pk"], update_fields=["fence", "balance"])
    assert stored(1) == (0, 7)
    assert Account.objects.bulk_update([late], ["balance"]) == 1
    Account.objects.bulk_create(
        [Account(pk=2), late], update_conflicts=True, unique_fields=["pk"], update_fields=["balance"]
    )
    assert (stored(1), stored(2)) == ((1, 7), (0, 0))


async def bulk_create(*args, **options):
    await Account.objects.abulk_create(*args, **options)
