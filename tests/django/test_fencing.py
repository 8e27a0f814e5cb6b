"""Fenced writes on SQLite and PostgreSQL: nothing of an earlier holder overwrites its successor's work."""

from __future__ import annotations

import asyncio
import io
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import redis.asyncio
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import IntegrityError, connection, models, transaction
from django.db.models.signals import post_save
from django.test.utils import CaptureQueriesContext, isolate_apps

from django_redislock import LockLost, NotAcquired, StaleFence, lock
from django_redislock.core import AsyncLock
from django_redislock.fencing import FencedModel
from tests.support import drop_connections, wait_until
from tests.support.bank import programs
from tests.support.bank.models import Account, Entry, SavingsAccount

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def account():
    return Account.objects.get(pk=1)


def stored(pk=1):
    return Account.objects.values_list("balance", "fence").get(pk=pk)


def test_save_keeps_the_locks_fence(account):
    with lock("account:1") as held:
        for account.balance in 1, 2:  # as often as it likes
            account.save_fenced(held)
            assert stored() == (account.balance, held.fence)
            assert account.fence == held.fence
    with lock("account:1") as successor:
        account.balance = 3
        account.save_fenced(successor)
        assert stored() == (3, successor.fence)


def test_an_older_fence_is_refused(account):
    account.save_fenced(7)
    late = Account.objects.get(pk=1)
    late.balance = 1
    with pytest.raises(StaleFence) as refused:
        late.save_fenced(6)
    assert (refused.value.name, refused.value.fence) == ("bank.Account 1", 6)
    with pytest.raises(StaleFence), transaction.atomic():
        Entry.objects.create(account=account)
        late.claim(6)
    assert not Entry.objects.exists(), "all of the transaction is fenced"
    assert stored() == (0, 7)
    with lock("account:1") as held:
        account.save_fenced(held.fence + 7)
        with pytest.raises(StaleFence) as refused:
            account.save_fenced(held)
        assert (refused.value.name, refused.value.fence) == ("account:1", held.fence)


def test_a_refused_write_leaves_the_surrounding_transaction_usable(account):
    account.save_fenced(7)
    with transaction.atomic():
        with pytest.raises(StaleFence):
            account.save_fenced(6)
        Entry.objects.create(account=account)
    assert Entry.objects.count() == 1


def test_a_lost_lock_does_not_ask_the_database(account):
    held = lock("account:1", expire=0.05, auto_renewal=False)
    held.acquire()
    wait_until(lambda: held.lost)
    with CaptureQueriesContext(connection) as queries:
        with pytest.raises(LockLost):
            account.save_fenced(held)
        with pytest.raises(LockLost):
            account.claim(held)
    assert len(queries) == 0


def test_another_thread_of_the_holder_may_write(account):
    account.balance = 5
    with lock("account:1") as held, ThreadPoolExecutor(1) as pool:
        pool.submit(in_thread(account.save_fenced), held).result()
        assert stored() == (5, held.fence)


def test_a_stale_holder_of_a_shared_lock_does_not_write_with_its_successors_fence(account):
    shared = lock("account:1", auto_renewal=False)
    late = Account.objects.get(pk=1)
    late.balance = 1
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        one.submit(shared.acquire).result()
        lock("account:1").reset()
        with pytest.raises(LockLost):
            one.submit(shared.release).result()
        assert two.submit(in_thread(shared.acquire), False).result()
        account.balance = 2
        two.submit(in_thread(account.save_fenced), shared).result()
        for write in (late.save_fenced, late.claim):
            with pytest.raises(LockLost):
                one.submit(in_thread(write), shared).result()
        two.submit(in_thread(shared.release)).result()
    assert stored()[0] == 2


def test_what_is_neither_a_held_lock_nor_an_int_is_refused(account):
    for held in (None, True, "7", 7.0):
        with pytest.raises(TypeError, match="held must be a lock or its fence"):
            account.save_fenced(held)
    with pytest.raises(NotAcquired):
        account.save_fenced(lock("account:1"))
    account.balance = "no number"
    with pytest.raises(ValueError, match="balance"):
        account.save_fenced(7)
    assert stored() == (0, 0), "a save that fails leaves the fence"


@pytest.mark.parametrize("method", ["claim", "save_fenced"])
def test_a_row_that_is_gone(account, method):
    Account.objects.all().delete()
    with pytest.raises(Account.DoesNotExist):
        getattr(account, method)(7)
    assert not Account.objects.exists()


def test_a_new_row_begins_with_the_fence():
    Account(pk=2, balance=1).save_fenced(7)
    assert stored(2) == (1, 7)
    with pytest.raises(IntegrityError):
        Account(pk=2, balance=2).save_fenced(8)
    assert stored(2) == (1, 7)


def test_save_is_the_models_own(account):
    saved = []
    Account.objects.update(owner="another's change")
    account.balance, account.owner = 5, "not to be saved"

    def note(update_fields, **kwargs):
        saved.append(set(update_fields))

    post_save.connect(note, sender=Account)
    try:
        account.save_fenced(7, update_fields=["balance"])
    finally:
        post_save.disconnect(note, sender=Account)
    assert saved == [{"balance"}]
    assert (*stored(), Account.objects.get().owner) == (5, 7, "another's change")


def test_inheritance_over_several_tables():
    SavingsAccount(pk=2).save_fenced(7)
    savings = SavingsAccount.objects.get()
    savings.balance, savings.rate = 5, 3
    savings.save_fenced(8)
    assert SavingsAccount.objects.values_list("balance", "rate", "fence").get() == (5, 3, 8)
    with pytest.raises(StaleFence):
        savings.save_fenced(7)
    savings.delete()
    with pytest.raises(SavingsAccount.DoesNotExist):
        savings.save_fenced(9)


@isolate_apps("tests.support.bank")
def test_any_primary_key():
    class Branch(FencedModel):
        pk = models.CompositePrimaryKey("town", "number")
        town = models.CharField(max_length=9)
        number = models.IntegerField()
        safe = models.IntegerField(default=0)

        class Meta:
            app_label = "bank"

    with connection.schema_editor() as editor:
        editor.create_model(Branch)
    Branch.objects.create(town="Ghent", number=1)
    branch = Branch.objects.create(town="Ghent", number=2)
    branch.safe = 5
    branch.save_fenced(7)
    with pytest.raises(StaleFence):
        branch.save_fenced(6)
    assert list(Branch.objects.order_by("number").values_list("safe", "fence")) == [(0, 0), (5, 7)]


def test_an_ordinary_save_never_lowers_the_fence(account):
    Account.objects.get(pk=1).save_fenced(7)
    account.balance = 3
    account.save()  # read before, with fence 0
    assert stored() == (3, 7)
    account.save(update_fields=["fence"])
    assert stored() == (3, 7)


def test_migrations_see_a_plain_field():
    output = io.StringIO()
    call_command("makemigrations", "bank", dry_run=True, verbosity=3, stdout=output)
    assert "('fence', models.BigIntegerField(default=0, editable=False))" in output.getvalue()
    assert "redislock" not in output.getvalue()


def test_claim_reloads_the_row_and_refuses_an_earlier_holder_although_nothing_was_written(account):
    Account.objects.update(balance=5)
    account.claim(7)
    assert (account.balance, account.fence) == stored() == (5, 7)
    with pytest.raises(StaleFence):
        account.save_fenced(6)


def test_the_methods_for_tasks_take_locks_of_both_kinds(account, redis_url):
    async def main():
        with lock("account:1") as held:
            await account.aclaim(held)
            await account.asave_fenced(held)
        async with redis.asyncio.from_url(redis_url) as client, AsyncLock(client, "account:1") as held:
            account.balance = 5
            await account.asave_fenced(held)
            with pytest.raises(StaleFence):
                await account.asave_fenced(held_before)
            await sync_to_async(drop_connections)()
            return held.fence

    with lock("account:1") as before:
        held_before = before.fence
    fence = asyncio.run(main())
    assert stored() == (5, fence)


def in_thread(function):
    """Return a function for a thread, which closes its connections at its end."""

    def run(*args):
        try:
            return function(*args)
        finally:
            drop_connections()

    return run


class TestAtTheSameTime:
    """While a transaction holds the row, the other waits in the database, and then must look again."""

    @pytest.fixture
    def write_waiting(self):
        """Start a fenced write in another thread; comes back when it waits for this one's transaction."""

        def start(fence, model=Account):
            def write():
                account = model.objects.get(pk=1)
                account.balance = -1
                with connection.execute_wrapper(note):
                    account.save_fenced(fence)

            def note(execute, sql, *args):
                if sql.startswith("UPDATE"):
                    sent.set()
                return execute(sql, *args)

            sent = threading.Event()
            future = pool.submit(in_thread(write))
            assert sent.wait(10)
            if connection.vendor == "postgresql":
                wait_until(self.somebody_waits)
            assert not future.done()
            return future

        with ThreadPoolExecutor(1) as pool:
            yield start

    def somebody_waits(self):
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return cursor.fetchone()[0]

    @pytest.mark.parametrize("model", [Account, SavingsAccount])
    def test_the_older_is_refused_after_the_newer_commits(self, account, model, write_waiting):
        SavingsAccount(account_ptr=account).save_base(raw=True)  # the second table's row
        with transaction.atomic():
            account.save_fenced(7)
            write = write_waiting(6, model)
        with pytest.raises(StaleFence):
            write.result(timeout=30)
        assert stored() == (0, 7)

    @pytest.mark.parametrize("rolled_back", [7, None])
    def test_who_is_not_older_than_what_was_committed_writes(self, account, write_waiting, rolled_back):
        with transaction.atomic():
            account.save_fenced(rolled_back or 5)
            write = write_waiting(6)
            transaction.set_rollback(bool(rolled_back))
        write.result(timeout=30)
        assert stored() == (-1, 6)

    def test_the_journal_of_many_writers_never_goes_back(self):
        fences = range(1, 26)

        def write(seed):
            for fence in random.Random(seed).sample(fences, len(fences)):
                with suppress(StaleFence), transaction.atomic():
                    account = Account(pk=1)
                    account.claim(fence)
                    Entry.objects.create(account=account, fence=fence)
                    account.balance = fence
                    account.save()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(in_thread(write), range(4)))
        journal = list(Entry.objects.order_by("pk").values_list("fence", flat=True))
        assert journal == sorted(journal)
        assert journal.count(25) == 4
        assert stored() == (25, 25)


def test_the_methods_for_many_rows_do_not_write_the_fence():
    Account.objects.get(pk=1).save_fenced(7)
    late = Account(pk=1, balance=1, fence=6)
    with pytest.raises(ValueError, match=r"bulk_update\(\) cannot update 'fence', because it may lower"):
        Account.objects.bulk_update([late], (name for name in ("balance", "fence")))
    for run in (Account.objects.bulk_create, lambda *args, **options: asyncio.run(bulk_create(*args, **options))):
        with pytest.raises(ValueError, match=r"bulk_create\(\) cannot update 'fence'"):
            run([late], update_conflicts=True, unique_fields=["pk"], update_fields=["fence", "balance"])
    assert stored() == (0, 7)
    assert Account.objects.bulk_update([late], ["balance"]) == 1
    Account.objects.bulk_create(
        [Account(pk=2), late], update_conflicts=True, unique_fields=["pk"], update_fields=["balance"]
    )
    assert (stored(), stored(2)) == ((1, 7), (0, 0))


async def bulk_create(*args, **options):
    await Account.objects.abulk_create(*args, **options)


@pytest.mark.processes
class TestPaused:
    """A holder is stopped for longer than its lock lives; meanwhile another takes the lock and writes."""

    @pytest.fixture
    def overtake(self, account):
        def overtake(process):
            process.pause()
            with lock("account:1", timeout=10) as held:
                account.claim(held)
                account.balance += 100
                account.save_fenced(held)
            process.resume()
            process.send()

        return overtake

    def test_just_before_its_write_reaches_the_database(self, database, run_python, overtake):
        process = run_python(programs.deposit_paused_before_the_write, database, True)
        process.wait_for(event="writing")
        overtake(process)
        assert process.wait_for(event="refused")["error"] == "StaleFence"
        assert stored()[0] == 100

    def test_without_a_fence_it_overwrites(self, database, run_python, overtake):
        process = run_python(programs.deposit_paused_before_the_write, database, False)
        process.wait_for(event="writing")
        overtake(process)
        process.wait_for(event="written")
        assert stored()[0] == 1

    def test_before_its_write_begins_it_is_told_of_the_loss(self, database, run_python, overtake):
        process = run_python(programs.write_when_told, database)
        process.wait_for(event="held")
        overtake(process)
        assert process.wait_for(event="refused")["error"] == "LockLost"
        assert stored()[0] == 100
