"""A process that forks while it holds or waits, and signal handlers that raise at whatever point."""

from __future__ import annotations

import ast
import threading
import time
from pathlib import Path

import pytest

import django_redislock
from django_redislock.core import Lock
from django_redislock.core.driver import process
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import NotAcquired
from tests.support import TimeLimit, begin_to_wait, in_a_fork, interruptions, lived, wait_until

WATCHDOG = "redislock-watchdog"


@pytest.mark.processes
def test_a_forked_child_owns_nothing_of_its_parents(client):
    lock = Lock(client, "a", expire=1.5)
    lock.acquire()

    def child():
        with pytest.raises(NotAcquired):
            lock.release()
        lock.__exit__(None, None, None)
        assert WATCHDOG not in [thread.name for thread in threading.enumerate()]
        with Lock(client, "b"):
            assert not Lock(client, "a").acquire(blocking=False)

    in_a_fork(child)
    lived(2)
    assert lock.owned(), "the parent keeps and renews its lock"
    lock.release()


@pytest.mark.processes
def test_a_fork_while_threads_wait_harms_neither_side(client):
    with Lock(client, "a", expire=60):
        waiter = begin_to_wait(client, "a", Lock(client, "a").acquire, timeout=20)

        def child():
            started = time.monotonic()
            assert not Lock(client, "a").acquire(timeout=0.3)
            assert time.monotonic() - started < 5

        in_a_fork(child)
    assert waiter.result(20)


# The alarm also hits destructors, and sockets that redis-py is about to open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.interrupts
@pytest.mark.processes
def test_a_signal_that_raises_anywhere_leaves_no_lock_and_no_broken_connection(client):
    with interruptions(TimeLimit) as interrupted_after:
        interrupted = 0
        for number in range(400):
            lock = Lock(client, "a", expire=1)
            try:
                interrupted_after(0.00001 + (number % 100) * 0.000002)
                assert lock.acquire(timeout=10), "a lock without an owner outlived its life"
                lock.release()
                interrupted_after(0)
            except TimeLimit:
                interrupted += 1
            finally:
                interrupted_after(0)
            del lock
            fresh = Lock(client, "b")
            assert fresh.acquire(timeout=10)
            fresh.release()
        assert interrupted > 50


@pytest.mark.processes
def test_an_interrupted_waiter_leaves_the_queue(client):
    keys = lock_keys("redislock", "a")
    client.set(keys.lock, "x\n1\n1\n{}", px=30000)
    with interruptions(TimeLimit) as interrupted_after:
        for delay in (0.05, 0.1, 0.3, 0.7):
            interrupted_after(delay)
            with pytest.raises(TimeLimit):
                Lock(client, "a").acquire(timeout=20)
            wait_until(lambda: not client.exists(keys.queue))
    client.delete(keys.lock)
    with Lock(client, "a", timeout=1):
        pass


# The resets in a forked child


def test_the_resets_run_in_their_order_whatever_the_order_of_the_imports(monkeypatch):
    ran = []
    monkeypatch.setattr(process, "_resets", {})
    for name in sorted(process.ORDER):
        process.after_in_child(name, lambda name=name: ran.append(name))
    process._reset_all()
    assert ran == list(process.ORDER)


def test_an_error_in_one_reset_is_raised_after_the_others(monkeypatch):
    ran = []
    monkeypatch.setattr(process, "_resets", {name: lambda name=name: ran.append(name) for name in process.ORDER})
    process.after_in_child(process.ORDER[1], lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        process._reset_all()
    assert ran == [process.ORDER[0], *process.ORDER[2:]]


def test_a_reset_without_a_place_in_the_order_is_refused():
    with pytest.raises(ValueError, match="'other' is not in the order"):
        process.after_in_child("other", lambda: None)


def test_the_order_names_the_resets_that_there_are():
    names = []
    for path in Path(django_redislock.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "after_in_child":
                names.append(ast.literal_eval(node.args[0]))
    assert sorted(names) == sorted(process.ORDER)
