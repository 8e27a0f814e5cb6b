"""``until_commit=True``: a lock that is released after the transaction."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
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


@pytest.mark.usefixtures("database")
class TestUntilCommit:
    def test_outside_of_transactions_the_block_releases(self):
        with lock(NAME, until_commit=True):
            assert held()
        assert not held()
        with lock(NAME, until_commit=True), transaction.atomic():
            deposit()
        assert not held()

    def test_released_after_the_commit(self):
        with transaction.atomic():
            with lock(NAME, until_commit=True):
                deposit()
            assert held()
        assert not held()
        assert balance() == 1

    def test_released_before_the_callbacks_of_the_commit_which_may_take_it(self):
        taken = []
        with transaction.atomic(), lock(NAME, until_commit=True):
            transaction.on_commit(lambda: taken.append(lock(NAME).acquire(blocking=False)))
        assert taken == [True]

    @pytest.mark.parametrize("reconnect", [False, True])
    def test_a_loss_before_the_commit_rolls_back_a_transaction_inside_the_block(self, client, reconnect):
        if reconnect:
            connection.close()  # it is opened anew inside the block
        with pytest.raises(LockLost), lock(NAME, until_commit=True) as mine:
            lose_before_the_commit(client, mine)
        assert balance() == 0
        with transaction.atomic():
            deposit()
        assert balance() == 1

    def test_a_loss_rolls_back_also_where_the_block_entered_a_lock_that_was_held_already(self, client):
        with pytest.raises(LockLost), rlock(NAME), lock(NAME, until_commit=True) as mine:
            lose_before_the_commit(client, mine)
        assert balance() == 0

    def test_a_lost_lock_of_another_thread_rolls_nothing_back(self, client):
        lost, end = threading.Event(), threading.Event()

        def lose():
            with suppress(LockLost), lock(NAME, until_commit=True) as mine:
                client.flushdb()
                with suppress(LockLost):
                    mine.extend()
                lost.set()
                end.wait(20)

        thread = threading.Thread(target=lose)
        thread.start()
        assert lost.wait(20)
        with lock("another", until_commit=True), transaction.atomic():
            deposit()
        assert balance() == 1
        end.set()
        thread.join()

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
        assert not held()
        assert "stays held" not in caplog.text

    def test_released_by_release(self):
        mine = lock(NAME, until_commit=True)
        mine.acquire()
        with transaction.atomic():
            mine.release()
            assert held()
        assert not held()

    def test_released_after_the_rollback_of_an_error(self):
        with pytest.raises(Mistake), transaction.atomic():
            with lock(NAME, until_commit=True):
                deposit()
            assert held()
            raise Mistake
        assert not held()
        assert balance() == 0

    def test_an_error_in_the_block_that_is_caught_before_the_commit(self):
        with transaction.atomic():
            with pytest.raises(Mistake), lock(NAME, until_commit=True):
                deposit()
                raise Mistake
            assert held()
        assert not held()
        assert balance() == 1

    def test_released_after_a_rollback_without_an_error(self):
        with transaction.atomic():
            with lock(NAME, until_commit=True):
                deposit()
            transaction.set_rollback(True)
        assert not held()
        assert balance() == 0

    @pytest.mark.parametrize("savepoint", [True, False])
    def test_inner_blocks_that_commit_do_not_release(self, savepoint):
        with transaction.atomic():
            with transaction.atomic(savepoint=savepoint), lock(NAME, until_commit=True):
                deposit()
            assert held()
        assert not held()

    def test_savepoints_that_are_rolled_back_do_not_release(self):
        with transaction.atomic():
            with pytest.raises(Mistake), transaction.atomic():
                with lock(NAME, until_commit=True):
                    deposit()
                raise Mistake
            assert held()
        assert not held()

    def test_rolled_back_without_a_savepoint(self):
        with transaction.atomic():
            with pytest.raises(Mistake), transaction.atomic(savepoint=False), lock(NAME, until_commit=True):
                raise Mistake
            assert held()
        assert not held()

    def test_released_when_the_commit_fails(self):
        with pytest.raises(IntegrityError), transaction.atomic(), lock(NAME, until_commit=True):
            Entry.objects.create(account_id=999)
        assert not held()

    def test_released_when_the_connection_is_closed(self):
        with transaction.atomic():
            with lock(NAME, until_commit=True):
                deposit()
            connection.close()
            assert not held()  # the database rolled back
            with lock(NAME, until_commit=True):
                pass
            assert not held()
        assert balance() == 0

    @pytest.mark.parametrize("database", ["postgresql"], indirect=True)
    def test_released_when_the_server_ends_the_connection(self):
        with pytest.raises(OperationalError), transaction.atomic():
            with lock(NAME, until_commit=True):
                deposit()
            connection.cursor().execute("SELECT pg_terminate_backend(pg_backend_pid())")
        assert not held()
        assert balance() == 0

    @pytest.mark.parametrize("end", [transaction.commit, transaction.rollback])
    def test_with_autocommit_off(self, end):
        transaction.set_autocommit(False)
        try:
            with transaction.atomic():
                with lock(NAME, until_commit=True):
                    deposit()
                with pytest.raises(transaction.TransactionManagementError):
                    end()
                assert held()
            assert held()  # such a block does not commit
            end()
            assert not held()
            with lock(NAME, until_commit=True):
                deposit()
            assert held()
            end()
            assert not held()
        finally:
            transaction.set_autocommit(True)

    def test_the_same_transaction_may_take_it_again(self):
        with transaction.atomic():
            with lock(NAME, until_commit=True) as first:
                deposit()
            with lock(NAME, until_commit=True, timeout=0) as second, lock(NAME, until_commit=True, timeout=0):
                deposit()
                assert second.fence == first.fence
            assert held()
        assert not held()
        assert balance() == 2

    def test_one_object_for_many_transactions(self):
        mine = lock(NAME, until_commit=True)
        for _ in range(3):
            with transaction.atomic():
                with mine:
                    deposit()
                assert held()
            assert not held()

    def test_several_locks(self):
        with transaction.atomic():
            for name in "abc":
                with lock(name, until_commit=True):
                    pass
            assert all(lock(name).locked() for name in "abc")
        assert not any(lock(name).locked() for name in "abc")

    def test_the_next_transaction_of_the_connection_knows_nothing_of_it(self):
        with transaction.atomic(), lock(NAME, until_commit=True):
            pass
        with lock(NAME), transaction.atomic():
            pass
        assert not held()

    def test_the_connection_is_wrapped_once(self):
        wrapped = []
        for _ in range(2):
            with transaction.atomic(), lock(NAME, until_commit=True):
                pass
            wrapped.append((connection.commit, connection.rollback, connection.close))
        assert wrapped[0] == wrapped[1]

    def test_an_interrupt_in_the_release_of_one_leaves_no_other_held(self):
        def interrupt(name, **kwargs):
            raise KeyboardInterrupt(name)

        lock_released.connect(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt), transaction.atomic():
                for name in "abc":
                    with lock(name, until_commit=True):
                        deposit()
        finally:
            lock_released.disconnect(interrupt)
        assert not any(lock(name).locked() for name in "abc")
        assert balance() == 3
        assert connection.get_autocommit()

    def test_transactions_of_other_threads_are_their_own(self):
        done = threading.Event()
        in_transaction = threading.Event()

        def other():
            with transaction.atomic():
                in_transaction.set()
                done.wait(30)
            drop_connections()

        thread = threading.Thread(target=other)
        thread.start()
        try:
            assert in_transaction.wait(10)
            with lock(NAME, until_commit=True):
                pass
            assert not held()
        finally:
            done.set()
            thread.join()

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

    def test_not_held(self):
        with transaction.atomic(), pytest.raises(NotAcquired):
            lock(NAME, until_commit=True).release()

    def test_an_id_from_elsewhere_is_released_after_the_commit(self):
        holder = lock(NAME)
        holder.acquire()
        with transaction.atomic():
            lock(NAME, id=holder.id, until_commit=True).release()
            assert held()
        assert not held()

    def test_by_decorator(self):
        @locked("account:{pk}", until_commit=True)
        def work(pk):
            deposit()

        with transaction.atomic():
            work(1)
            assert held()
        assert not held()

    def test_unlocked_when_disabled(self):
        with override_settings(DJANGO_REDISLOCK={"ENABLED": False}), transaction.atomic():
            for _ in range(2):
                with lock(NAME, until_commit=True):
                    deposit()
        assert balance() == 2

    @pytest.mark.parametrize("value", [1, "default"])
    def test_bad_values(self, value):
        with pytest.raises(TypeError, match="until_commit must be"):
            lock(NAME, until_commit=value)
