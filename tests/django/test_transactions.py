"""Locks in transactions: with until_commit and locked_atomic nobody sees the state from before the commit."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.test import Client, TestCase, TransactionTestCase, override_settings

from django_redislock import LockLost, NotAcquired, lock, locked, locked_atomic, transactions
from django_redislock.signals import lock_released
from tests.support import drop_connections, sqlite_file, using_databases, wait_until
from tests.support.bank import programs
from tests.support.bank.models import Account, Entry

NAME = "account:1"
LOGGER = "django_redislock"


def held():
    return lock(NAME).locked()


def balance():
    return Account.objects.get(pk=1).balance


def deposit():
    account = Account.objects.get(pk=1)
    account.balance += 1
    account.save()


class Mistake(Exception):
    """What the tests raise."""


@pytest.fixture
def warnings(caplog, monkeypatch):
    """The texts of what was logged as a warning or worse."""
    monkeypatch.setattr(transactions, "_told", set())
    caplog.set_level(logging.WARNING, LOGGER)
    return lambda: [record.getMessage() for record in caplog.records]


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

    def test_renewed_until_the_commit(self):
        with transaction.atomic():
            with lock(NAME, expire=1.5, until_commit=True) as mine:
                id = mine.id
            start = time.monotonic()
            wait_until(lambda: time.monotonic() > start + 2.5)
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
        with transaction.atomic():
            self.lose(mine)
            with pytest.raises(LockLost):
                mine.release()
            deposit()  # without the lock, as the program decided
        assert balance() == 1

    def test_after_the_block(self):
        with pytest.raises(LockLost), transaction.atomic():
            with lock(NAME, until_commit=True) as mine:
                deposit()
            self.lose(mine)
        assert balance() == 0
        assert connection.get_autocommit()
        deposit()
        assert balance() == 1

    def test_an_error_of_the_transaction_is_not_replaced(self):
        with pytest.raises(Mistake), transaction.atomic():
            with lock(NAME, until_commit=True) as mine:
                deposit()
            self.lose(mine)
            raise Mistake
        assert balance() == 0

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

    def test_the_successor_keeps_its_lock(self):
        with pytest.raises(LockLost), transaction.atomic():
            with lock(NAME, until_commit=True) as mine:
                pass
            self.lose(mine)
            successor = lock(NAME)
            assert successor.acquire(blocking=False)
        assert successor.owned()


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
    def test_the_lock_is_around_the_transaction(self):
        seen = []
        with locked_atomic(NAME, timeout=5) as mine:
            deposit()
            transaction.on_commit(lambda: seen.append((held(), connection.in_atomic_block)))
            assert mine.owned()
            assert connection.in_atomic_block
        assert seen == [(True, False)]
        assert not held()
        assert balance() == 1

    def test_an_error_rolls_back_and_releases(self):
        with pytest.raises(Mistake), locked_atomic(NAME):
            deposit()
            raise Mistake
        assert not held()
        assert balance() == 0

    def test_a_lock_that_was_lost_rolls_back(self):
        with pytest.raises(LockLost), locked_atomic(NAME) as mine:
            deposit()
            lock(NAME).reset()
            with pytest.raises(LockLost):
                mine.extend()
        assert balance() == 0

    def test_refused_inside_another_atomic_block(self):
        with transaction.atomic():
            with pytest.raises(RuntimeError, match="until_commit=True"), locked_atomic(NAME):
                pytest.fail("the body ran")
            assert not held()

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

    def test_says_nothing_of_a_mistake(self, warnings):
        with locked_atomic(NAME):
            pass
        assert warnings() == []


@pytest.mark.usefixtures("database")
class TestWarning:
    """The release of a lock before the commit, which is almost always a mistake."""

    def test_once_for_each_place(self, warnings):
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

    def test_the_place_is_the_callers_of_a_decorated_function(self, warnings):
        @locked(NAME)
        def work():
            deposit()

        with transaction.atomic():
            work()
        assert f"({__file__}, line " in warnings()[0]

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

    def test_held_until_the_response_is_made(self):
        assert Client().post("/deposit/").content == b"True"
        assert not held()
        assert balance() == 1

    def test_a_failing_view_rolls_back_and_releases(self):
        assert Client(raise_request_exception=False).post("/deposit/?fail").status_code == 500
        assert not held()
        assert balance() == 0


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
        processes = [run_python(programs.deposit_by_requests, database, 25) for _ in range(3)]
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
    """Nothing is committed here: the lock is released at the end of its block, and the next call does not wait for it."""

    def test_released_with_its_block(self):
        with lock(NAME, until_commit=True):
            assert held()
        assert not held()
        with transaction.atomic():
            with lock(NAME, until_commit=True):
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

    def test_locked_atomic(self):
        with locked_atomic(NAME):
            assert held()
        assert not held()

    def test_the_atomic_block_of_the_test_itself_is_no_mistake(self):
        with self.assertNoLogs(LOGGER, logging.WARNING), lock(NAME):
            pass

    def test_that_of_the_code_is(self):
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
