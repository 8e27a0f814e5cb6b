"""Locks around transactions: losses before commit, ``locked_atomic``, the warning about a release that is too early."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
from django.db import connection, connections, transaction
from django.test import Client, TestCase, TransactionTestCase, override_settings

from django_redislock import AcquireTimeout, LockLost, lock, locked, locked_atomic
from tests.support import in_thread, sqlite_file, using_databases
from tests.support.bank import programs
from tests.support.bank.account import NAME, Mistake, balance, deposit, held
from tests.support.bank.models import Account

LOGGER = "django_redislock"


def test_a_block_until_the_commit_that_another_thread_leaves_is_released():
    def block():
        with lock(NAME, until_commit=True):
            yield

    held = block()
    in_thread(lambda: next(held))
    assert lock(NAME).locked()
    held.close()
    assert not lock(NAME).locked()


@pytest.mark.usefixtures("database")
class TestLostBeforeTheCommit:
    def lose(self, mine):
        lock(NAME).reset()
        with pytest.raises(LockLost):
            mine.extend()

    def test_in_the_block(self):
        with pytest.raises(LockLost), transaction.atomic():
            with lock(NAME, until_commit=True) as mine:
                deposit()
                self.lose(mine)
            pytest.fail("the block ended as if nothing had happened")
        assert balance() == 0

    def test_before_release(self):
        mine = lock(NAME, until_commit=True)
        mine.acquire()
        with pytest.raises(LockLost), transaction.atomic():
            self.lose(mine)
            with pytest.raises(LockLost):
                mine.release()
            deposit()
        assert balance() == 0

    @pytest.mark.parametrize("error", [LockLost, Mistake])
    def test_after_the_block(self, error):
        """An error of the transaction is not replaced."""
        with pytest.raises(error), transaction.atomic():
            with lock(NAME, until_commit=True) as mine:
                deposit()
            self.lose(mine)
            successor = lock(NAME)
            assert successor.acquire(blocking=False)
            if error is Mistake:
                raise Mistake
        assert successor.owned(), "the successor keeps its lock"
        assert balance() == 0
        assert connection.get_autocommit()
        deposit()
        assert balance() == 1

    def test_by_hand(self):
        transaction.set_autocommit(False)
        try:
            with lock(NAME, until_commit=True) as mine:
                deposit()
            self.lose(mine)
            with pytest.raises(LockLost):
                transaction.commit()
            transaction.commit()
        finally:
            transaction.set_autocommit(True)
        assert balance() == 0


@pytest.mark.processes
def test_without_redis_at_the_release_the_commit_stands(database, own_server, warnings):
    with override_settings(DJANGO_REDISLOCK={"URL": f"{own_server.url}?socket_timeout=0.5"}):
        with transaction.atomic():
            with lock(NAME, until_commit=True):
                deposit()
            own_server.pause()
        own_server.resume()
        assert balance() == 1
        assert any("could not be released after its transaction" in text for text in warnings())


@pytest.mark.usefixtures("database")
class TestLockedAtomic:
    def test_the_lock_is_around_the_transaction(self, warnings):
        seen = []
        with locked_atomic(NAME, timeout=5) as mine:
            deposit()
            transaction.on_commit(lambda: seen.append((held(), connection.in_atomic_block)))
            assert mine.owned()
            assert connection.in_atomic_block
        assert seen == [(True, False)]
        assert not held()
        assert balance() == 1
        assert warnings() == []

    @pytest.mark.parametrize("error", [Mistake, LockLost])
    def test_an_error_or_a_loss_rolls_back_and_releases(self, error):
        with pytest.raises(error), locked_atomic(NAME) as mine:
            deposit()
            if error is Mistake:
                raise Mistake
            lock(NAME).reset()
            with pytest.raises(LockLost):
                mine.extend()
        assert not held()
        assert balance() == 0

    def test_refused_inside_another_atomic_block_and_with_autocommit_off(self):
        """Its block commits nothing there, so it released the lock before the commit."""
        with transaction.atomic():
            with pytest.raises(RuntimeError, match="until_commit=True"), locked_atomic(NAME):
                pytest.fail("the body ran")
            assert not held()
        transaction.set_autocommit(False)
        try:
            with pytest.raises(RuntimeError, match="until_commit=True"), locked_atomic(NAME):
                pytest.fail("the body ran")
            assert not held()
        finally:
            transaction.set_autocommit(True)

    def test_who_waits_for_the_lock_has_no_database_connection(self):
        """Each waiter kept one open."""
        connection.close()
        with lock(NAME), pytest.raises(AcquireTimeout), locked_atomic(NAME, timeout=0):
            pytest.fail("the body ran")
        assert connection.connection is None

    def test_as_a_decorator(self):
        @locked_atomic(NAME)
        def work():
            deposit()
            return held(), connection.in_atomic_block

        assert [work(), work()] == [(True, True)] * 2
        assert not held()
        assert balance() == 2

    def test_of_another_database(self, database, tmp_path):
        with using_databases(default=database, other=sqlite_file(tmp_path, "other")), transaction.atomic():
            with locked_atomic(NAME, database="other"):
                assert connections["other"].in_atomic_block
            assert not held()

    def test_unknown_options_are_refused(self):
        with pytest.raises(TypeError, match="expires"), locked_atomic(NAME, expires=3):
            pytest.fail("the body ran")


@pytest.mark.usefixtures("database")
class TestWarning:
    """The release of a lock before the commit, which is almost always a mistake."""

    def test_once_for_each_place_which_is_the_callers_of_a_decorated_function(self, warnings):
        for number in range(3):
            with transaction.atomic(), lock(f"account:{number}"):
                pass
        assert len(warnings()) == 1
        assert "'account:0'" in warnings()[0]
        assert f"({__file__}, line " in warnings()[0]
        mine = lock(NAME)
        mine.acquire()
        with transaction.atomic():
            mine.release()
        assert len(warnings()) == 2
        with transaction.atomic():
            locked(NAME)(deposit)()
        assert f"({__file__}, line " in warnings()[2]

    def test_not_where_it_is_right(self, warnings):
        with lock(NAME), transaction.atomic():
            pass
        with lock(NAME):
            pass
        with transaction.atomic(), lock(NAME, until_commit=True):
            pass
        with transaction.atomic(), lock("a printer", until_commit=False):
            pass
        assert warnings() == []


@pytest.mark.usefixtures("database")
class TestAtomicRequests:
    @pytest.fixture(autouse=True)
    def _site(self, database, settings):
        settings.ROOT_URLCONF = "tests.support.bank.urls"
        with using_databases(default=database | {"ATOMIC_REQUESTS": True}):
            yield

    def test_held_until_the_response_is_made_and_a_failing_view_rolls_back_and_releases(self):
        assert Client().post("/deposit/").content == b"True"
        assert not held()
        assert balance() == 1
        assert Client(raise_request_exception=False).post("/deposit/?fail").status_code == 500
        assert not held()
        assert balance() == 1


@pytest.mark.processes
def test_a_forked_child_leaves_the_lock_to_its_parent(run_python, tmp_path):
    lines = run_python(programs.fork_in_a_transaction, sqlite_file(tmp_path)).finish()
    assert lines == [{"who": "child", "held": True}, {"who": "parent", "held": True}, {"who": "parent", "held": False}]


@pytest.mark.processes
class TestProcesses:
    def test_released_before_the_commit_an_update_is_lost(self, database, run_python):
        process = run_python(programs.deposit_in_a_transaction, database, False)
        process.wait_for(event="left")
        with lock(NAME, timeout=10):
            account = Account.objects.get(pk=1)  # before the commit
            process.send()
            process.wait_for(event="committed")
            account.balance += 1
            account.save()
        assert balance() == 1

    def test_until_commit_no_update_is_lost(self, database, run_python):
        process = run_python(programs.deposit_in_a_transaction, database, True)
        process.wait_for(event="left")
        assert not lock(NAME).acquire(blocking=False)
        process.send()
        with lock(NAME, timeout=10):
            deposit()
        process.finish()
        assert balance() == 2

    def test_killed_before_the_commit_the_lock_ends_by_its_expiry(self, database, run_python):
        process = run_python(programs.deposit_in_a_transaction, database, True)
        process.wait_for(event="left")
        process.kill()
        with lock(NAME, timeout=1.5):  # its life and half a second
            assert balance() == 0

    def test_concurrent_requests_lose_nothing(self, database, run_python):
        processes = [run_python(programs.deposit_by_requests, database, 25, new=True) for _ in range(3)]
        for process in processes:
            process.wait_for(event="ready")
        for process in processes:
            process.send()
        lines = [line for process in processes for line in process.finish() if line["event"] == "done"]
        assert [line["held"] for line in lines] == ["True"] * 75
        assert balance() == 75


def work():
    """What an application does, in its own transaction, with a lock that is held until the commit."""
    with transaction.atomic(), lock(NAME, until_commit=True, timeout=0):
        Account.objects.create()


class TestInTestCase(TestCase):
    """Nothing is committed here: the lock is released at its block's end, and the next call does not wait for it."""

    def test_released_with_its_block(self):
        for around in (nullcontext(), transaction.atomic()):
            with around:
                with lock(NAME, until_commit=True):
                    assert held()
                assert not held()
        with locked_atomic(NAME):
            assert held()
        assert not held()

    def test_the_code_under_test_may_run_twice(self):
        work()
        work()
        assert Account.objects.count() == 2
        assert not held()

    def test_callbacks_of_the_commit_may_take_it(self):
        taken = []
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic(), lock(NAME, until_commit=True):
            transaction.on_commit(lambda: taken.append(lock(NAME).acquire(blocking=False)))
        assert taken == [True]

    def test_the_atomic_block_of_the_test_itself_is_no_mistake_and_that_of_the_code_is(self):
        with self.assertNoLogs(LOGGER, logging.WARNING), lock(NAME):
            pass
        with self.assertLogs(LOGGER, logging.WARNING), transaction.atomic(), lock(NAME):
            pass


class TestInTransactionTestCase(TransactionTestCase):
    """Everything is as in production."""

    def test_released_after_the_commit(self):
        with transaction.atomic():
            with lock(NAME, until_commit=True):
                pass
            assert held()
        assert not held()
