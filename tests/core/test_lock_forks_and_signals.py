"""A process that forks while it holds or waits, and signal handlers that raise at whatever point."""

from __future__ import annotations

import threading
import time

import pytest

from django_redislock.core import Lock
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import NotAcquired
from tests.support import TimeLimit, in_a_fork, interruptions, lived, queued, wait_until

pytestmark = pytest.mark.processes


WATCHDOG = "redislock-watchdog"


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


def test_a_fork_while_threads_wait_harms_neither_side(client):
    got = []
    with Lock(client, "a", expire=60):
        thread = threading.Thread(target=lambda: got.append(Lock(client, "a").acquire(timeout=20)))
        thread.start()
        wait_until(lambda: queued(client, "a") == 1)

        def child():
            started = time.monotonic()
            assert not Lock(client, "a").acquire(timeout=0.3)
            assert time.monotonic() - started < 5

        in_a_fork(child)
    thread.join(timeout=20)
    assert got == [True]


# The alarm also hits destructors, and sockets that redis-py is about to open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.interrupts
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


def test_an_interrupted_waiter_leaves_the_queue(client):
    keys = lock_keys("redislock", "a")
    client.set(keys.lock, "x\n1\n1\n{}", px=30000)
    with interruptions(TimeLimit) as interrupted_after:
        for delay in (0.05, 0.1, 0.3, 0.7):
            interrupted_after(delay)
            with pytest.raises(TimeLimit):
                Lock(client, "a").acquire(timeout=20)
            assert not client.exists(keys.queue)
    client.delete(keys.lock)
    with Lock(client, "a", timeout=1):
        pass
