"""``until_commit=True``: a lock that is released after the transaction."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
from django.db import IntegrityError, OperationalError, ProgrammingError, connection, transaction
from django.test import override_settings

from django_redislock import LockLost, NotAcquired, lock, locked, rlock
from django_redislock.signals import lock_released
from tests.support import drop_connections, sqlite_file, using_databases, wait_until
from tests.support.bank.account import NAME, Mistake, balance, deposit, held
from tests.support.bank.models import Entry


def lose_before_the_commit(client, mine):
    with transaction.atomic():
        deposit()
        client.flushdb()
        with pytest.raises(LockLost):
            mine.extend()
    raise AssertionError("committed without the lock")


def by_block():
    with lock(NAME, until_commit=True):
        deposit()


def by_release():
    mine = lock(NAME, until_commit=True)
    mine.acquire()
    deposit()
    mine.release()


@locked(NAME, until_commit=True)
def by_decorator():
    deposit()


def by_an_id_from_elsewhere():
    holder = lock(NAME)
    holder.acquire()
    deposit()
    lock(NAME, id=holder.id, until_commit=True).release()


def by_the_rollback_of_a_savepoint():
    deposit()
    with pytest.raises(Mistake), transaction.atomic():
        by_block()
        raise Mistake


def by_the_rollback_of_a_block_without_savepoint():
    """It rolls back the whole transaction."""
    with pytest.raises(Mistake), transaction.atomic(savepoint=False), lock(NAME, until_commit=True):
        raise Mistake


def by_a_savepoint():
    with transaction.atomic():
        by_block()


def by_an_inner_block_without_savepoint():
    with transaction.atomic(savepoint=False):
        by_block()


def by_an_error_that_is_caught():
    with pytest.raises(Mistake), lock(NAME, until_commit=True):
        deposit()
        raise Mistake


def by_two_blocks_of_one_transaction():
    with lock(NAME, until_commit=True) as first:
        deposit()
    with lock(NAME, until_commit=True, timeout=0) as second, lock(NAME, until_commit=True, timeout=0):
        assert second.fence == first.fence


WAYS = [by_block, by_release, by_decorator, by_an_id_from_elsewhere, by_two_blocks_of_one_transaction]
WAYS += [
    by_an_error_that_is_caught,
    by_the_rollback_of_a_savepoint,
    by_the_rollback_of_a_block_without_savepoint,
]
WAYS += [by_a_savepoint, by_an_inner_block_without_savepoint]


@pytest.mark.usefixtures("database")
class TestUntilCommit:
    def test_outside_of_transactions_the_block_releases(self):
        with lock(NAME, until_commit=True):
            assert held()
        assert not held()
        with lock(NAME, until_commit=True), transaction.atomic():
            deposit()
        assert not held()

    @pytest.mark.parametrize("way", WAYS)
    def test_held_until_the_commit_and_released_after_it(self, way):
        with transaction.atomic():
            way()
            assert held()
        assert not held()
        assert balance() == (way is not by_the_rollback_of_a_block_without_savepoint)
        with lock(NAME), transaction.atomic():
            pass
        assert not held(), "the next transaction of the connection knows nothing of it"

    @pytest.mark.parametrize("error", [True, False])
    def test_held_until_the_rollback_and_released_after_it(self, error):
        with pytest.raises(Mistake) if error else nullcontext(), transaction.atomic():
            by_block()
            assert held()
            if error:
                raise Mistake
            transaction.set_rollback(True)
        assert not held()
        assert balance() == 0

    def test_released_before_the_callbacks_of_the_commit_which_may_take_it(self):
        taken = []
        with transaction.atomic(), lock(NAME, until_commit=True):
            transaction.on_commit(lambda: taken.append(lock(NAME).acquire(blocking=False)))
        assert taken == [True]

    def test_one_object_for_many_transactions_whose_connection_is_wrapped_once(self):
        mine, wrapped = lock(NAME, until_commit=True), set()
        for _ in range(3):
            with transaction.atomic():
                with mine:
                    deposit()
                assert held()
            assert not held()
            wrapped.add((connection.commit, connection.rollback, connection.close))
        assert len(wrapped) == 1

    @pytest.mark.parametrize("before", [None, "reconnects", "holds the lock already"])
    def test_a_loss_before_the_commit_rolls_back_a_transaction_inside_the_block(self, client, before):
        if before == "reconnects":
            connection.close()  # it is opened anew inside the block
        around = rlock(NAME) if before == "holds the lock already" else nullcontext()
        with pytest.raises(LockLost), around, lock(NAME, until_commit=True) as mine:
            lose_before_the_commit(client, mine)
        assert balance() == 0
        with transaction.atomic():
            deposit()
        assert balance() == 1

    @pytest.mark.parametrize("way", ["block", "release", "autocommit"])
    def test_a_loss_inside_the_block_rolls_back_although_its_error_is_caught(self, client, way):
        """A view that answers "busy" to LockError caught that of a loss, too, and its request was committed."""
        mine = lock(NAME, until_commit=True)

        def lose():
            deposit()
            client.flushdb()
            with suppress(LockLost):
                mine.extend()

        def transact():
            if way == "autocommit":
                transaction.set_autocommit(False)
            with nullcontext() if way == "autocommit" else transaction.atomic(), suppress(LockLost):
                if way == "release":
                    mine.acquire()
                    lose()
                    mine.release()
                else:
                    with mine:
                        lose()
            if way == "autocommit":
                transaction.set_autocommit(True)

        with pytest.raises(LockLost):
            transact()
        assert balance() == 0
        with transaction.atomic(), mine:
            deposit()
        assert balance() == 1

    def test_a_lost_lock_of_another_thread_rolls_nothing_back(self, client):
        lost, end = threading.Event(), threading.Event()

        def lose():
            with suppress(LockLost), lock(NAME, until_commit=True) as mine:
                client.flushdb()
                with suppress(LockLost):
                    mine.extend()
                lost.set()
                end.wait(20)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(lose)
            assert lost.wait(20)
            with lock("another", until_commit=True), transaction.atomic():
                deposit()
            assert balance() == 1
            end.set()

    def test_a_second_release_inside_a_transaction_raises_as_anywhere_else(self, caplog):
        mine = lock(NAME, until_commit=True)
        mine.acquire()
        with transaction.atomic():
            mine.release()
            with pytest.raises(NotAcquired):
                mine.release()
            with pytest.raises(Mistake), lock("another", until_commit=True) as other:
                other.release()
                raise Mistake
            assert held()
            with pytest.raises(NotAcquired):
                lock("never acquired", until_commit=True).release()
        assert not held()
        assert "stays held" not in caplog.text

    def test_released_when_the_commit_fails_or_the_connection_is_closed(self):
        with pytest.raises(IntegrityError), transaction.atomic(), lock(NAME, until_commit=True):
            Entry.objects.create(account_id=999)
        assert not held()
        with transaction.atomic():
            by_block()
            connection.close()
            assert not held()  # the database rolled back
            with lock(NAME, until_commit=True):
                pass
            assert not held()
        assert balance() == 0

    @pytest.mark.parametrize("database", ["postgresql"], indirect=True)
    def test_released_when_the_server_ends_the_connection(self):
        with pytest.raises(OperationalError), transaction.atomic():
            by_block()
            connection.cursor().execute("SELECT pg_terminate_backend(pg_backend_pid())")
        assert not held()
        assert balance() == 0

    @pytest.mark.parametrize("end", [transaction.commit, transaction.rollback])
    def test_with_autocommit_off(self, end):
        transaction.set_autocommit(False)
        try:
            with transaction.atomic():
                by_block()
                with pytest.raises(transaction.TransactionManagementError):
                    end()
                assert held()
            assert held()  # such a block does not commit
            end()
            assert not held()
            by_block()
            assert held()
            end()
            assert not held()
        finally:
            transaction.set_autocommit(True)

    def test_with_autocommit_switched_on_again(self):
        """SQLite commits then, and the lock was held until some later commit. PostgreSQL refuses, with a lock, too."""
        refuses = connection.vendor == "postgresql"
        transaction.set_autocommit(False)
        by_block()
        assert held()
        with pytest.raises(ProgrammingError) if refuses else nullcontext():
            transaction.set_autocommit(True)
        assert held() == refuses
        if refuses:
            transaction.rollback()
            transaction.set_autocommit(True)
        assert not held()
        assert balance() == (not refuses)

    @pytest.mark.parametrize("rolled_back", [False, True])
    def test_a_listener_that_asks_the_database_harms_no_end_of_a_transaction(self, rolled_back):
        """PostgreSQL refused to switch autocommit on: the commit looked like a failure, and no callback ran."""
        called = []

        def ask(**kwargs):
            called.append(balance())

        lock_released.connect(ask)
        try:
            with transaction.atomic():
                by_block()
                transaction.on_commit(lambda: called.append("callback"))
                transaction.set_rollback(rolled_back)
        finally:
            lock_released.disconnect(ask)
        assert called == ([0] if rolled_back else [1, "callback"])
        assert connection.get_autocommit()
        assert not held()

    def test_a_rollback_that_was_interrupted_becomes_no_commit(self, monkeypatch):
        """Django switches autocommit on then, and the lock's release committed what was to be rolled back."""

        def interrupted():
            monkeypatch.undo()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), transaction.atomic():
            by_block()
            monkeypatch.setattr(connection.rollback.__self__, "_rollback", interrupted)
            raise Mistake
        assert balance() == 0
        assert not held()
        assert connection.get_autocommit()

    def test_autocommit_that_is_switched_on_after_a_loss_commits_nothing_and_is_on(self, client):
        transaction.set_autocommit(False)
        with lock(NAME, until_commit=True) as mine:
            deposit()
        client.flushdb()
        with pytest.raises(LockLost):
            mine.extend()
        with pytest.raises(LockLost):
            transaction.set_autocommit(True)
        assert connection.get_autocommit()
        assert balance() == 0

    def test_an_interrupt_in_the_release_of_one_leaves_no_other_held(self):
        def interrupt(name, **kwargs):
            raise KeyboardInterrupt(name)

        lock_released.connect(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt), transaction.atomic():
                for name in "abc":
                    with lock(name, until_commit=True):
                        deposit()
                assert all(lock(name).locked() for name in "abc")
        finally:
            lock_released.disconnect(interrupt)
        assert not any(lock(name).locked() for name in "abc")
        assert balance() == 3
        assert connection.get_autocommit()

    def test_transactions_of_other_threads_are_their_own(self):
        in_transaction, done = threading.Event(), threading.Event()

        def other():
            with transaction.atomic():
                in_transaction.set()
                done.wait(30)
            drop_connections()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(other)
            try:
                assert in_transaction.wait(10)
                by_block()
                assert not held()
            finally:
                done.set()

    def test_released_after_the_transactions_of_all_databases(self, database, tmp_path):
        with using_databases(default=database, other=sqlite_file(tmp_path, "other")):
            with transaction.atomic():
                with transaction.atomic(using="other"), lock(NAME, until_commit=True):
                    pass
                assert held()
            assert not held()
            with transaction.atomic(using="other"):
                with transaction.atomic():
                    with lock(NAME, until_commit=True):
                        pass
                    transaction.set_rollback(True)
                assert held()
            assert not held()
            with transaction.atomic(using="other"), lock(NAME, until_commit=True):
                pass
            assert not held()

    @pytest.mark.slow
    def test_renewed_until_the_commit(self):
        with transaction.atomic():
            with lock(NAME, expire=1.2, until_commit=True) as mine:
                id = mine.id
            start = time.monotonic()
            wait_until(lambda: time.monotonic() > start + 1.6)
            assert lock(NAME).owner().id == id
        assert not held()

    def test_bad_values_are_refused_and_when_disabled_nobody_waits(self):
        for value in (1, "default"):
            with pytest.raises(TypeError, match="until_commit must be"):
                lock(NAME, until_commit=value)
        with override_settings(DJANGO_REDISLOCK={"ENABLED": False}), transaction.atomic():
            by_block()
            by_block()
        assert balance() == 2
