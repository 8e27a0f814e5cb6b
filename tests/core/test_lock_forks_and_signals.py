"""A process that forks while it holds or waits, and signal handlers that raise at whatever point."""

from __future__ import annotations

import ast
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import django_redislock
from django_redislock.core import AsyncLock, Lock
from django_redislock.core.driver import os_threads, process
from django_redislock.core.keys import lock_keys
from django_redislock.core.watchdog import WATCHER
from django_redislock.exceptions import NotAcquired
from tests.support import TimeLimit, begin_to_wait, in_a_fork, interruptions, lived, wait_until


@pytest.mark.processes
def test_a_forked_child_owns_nothing_of_its_parents(client):
    lock = Lock(client, "a", expire=1.5)
    lock.acquire()

    def child():
        with pytest.raises(NotAcquired):
            lock.release()
        lock.__exit__(None, None, None)
        assert not os_threads.running(WATCHER)
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


def test_a_cycle_asks_for_the_process_twice_at_most(client, monkeypatch):
    """A system call, beside two round trips; the other half of the promise is that each entry asks."""
    lock = Lock(client, "a")
    asks = counted(monkeypatch)
    for _ in range(2):  # the first one opens a connection, and redis-py asks, too
        asks.clear()
        with lock:
            lock_asks = len(asks)
    assert (lock_asks, len(asks)) == (1, 2)


async def test_a_cycle_of_a_task_asks_for_the_process_five_times_at_most(aclient, monkeypatch):
    lock = AsyncLock(aclient, "a")
    asks = counted(monkeypatch)
    for _ in range(2):
        asks.clear()
        async with lock:
            pass
    assert len(asks) <= 5


def counted(monkeypatch):
    """Return a list of what this thread asks; the threads of other tests may still end."""
    asks, getpid, this_thread = [], os.getpid, threading.get_ident()

    def ask():
        if threading.get_ident() == this_thread:
            asks.append(None)
        return getpid()

    monkeypatch.setattr(os, "getpid", ask)
    return asks


def test_a_fork_that_no_hook_told_is_noticed_once_also_by_threads_that_come_at_once(monkeypatch):
    resets, begun = [], threading.Barrier(8)

    def slow():
        resets.append(1)
        time.sleep(0.05)

    monkeypatch.setattr(process, "_resets", {process.ORDER[0]: slow})
    monkeypatch.setattr(process, "_reset_in", 0)

    def enter(_):
        begun.wait()
        process.notice_fork()
        return process._reset_in

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(enter, range(8))) == {os.getpid()}, "none went on before the resets had ended"
    assert resets == [1]


def test_resets_that_were_interrupted_run_again_at_the_next_entry(monkeypatch):
    ran = []

    def interrupted():
        ran.append(1)
        if len(ran) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(process, "_resets", {process.ORDER[0]: interrupted})
    monkeypatch.setattr(process, "_reset_in", 0)
    with pytest.raises(KeyboardInterrupt):
        process.notice_fork()
    process.notice_fork()
    process.notice_fork()
    assert ran == [1, 1]


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
