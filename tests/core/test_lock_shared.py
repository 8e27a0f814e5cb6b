"""One lock object in many hands: what it tells each thread of its own acquisition, and never of another's."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_redislock.core import AsyncLock, Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.keys import lock_keys
from django_redislock.core.watchdog import watchdog
from django_redislock.exceptions import AlreadyAcquired, LockLost, NotAcquired
from tests.support import in_a_fork, in_thread, queued, wait_until

KEYS = lock_keys("redislock", "a")


@pytest.fixture
def one():
    with ThreadPoolExecutor(1, "one") as thread:
        yield lambda function, *args: thread.submit(function, *args).result(timeout=60)


@pytest.fixture
def two():
    with ThreadPoolExecutor(1, "two") as thread:
        yield lambda function, *args: thread.submit(function, *args).result(timeout=60)


def lose(client, shared, thread):
    """Have the thread acquire through the object, lose the lock, and be told so; return its fence and the error."""
    thread(shared.acquire)
    fence = thread(lambda: shared.fence)
    client.delete(KEYS.lock)
    with pytest.raises(LockLost) as told:
        thread(shared.release)
    return fence, told.value


@pytest.mark.parametrize("id", [None, "mine"])
def test_who_was_told_of_its_loss_never_sees_its_successors_acquisition(make_lock, client, one, two, id):
    shared = make_lock(client, "a", id=id, auto_renewal=False)
    fence, told = lose(client, shared, one)
    for succeeded in (False, True):
        if succeeded:
            assert two(shared.acquire, False)
        for look in (lambda: shared.fence, lambda: shared.id, shared.raise_if_lost)[:: 1 if id is None else 2]:
            with pytest.raises(LockLost) as refused:
                one(look)
            assert refused.value.record == told.record
        assert one(lambda: shared.lost) == told.record
        assert told.record.fence == fence
    assert two(lambda: shared.fence) > fence
    assert two(lambda: shared.lost) is None
    two(shared.release)
    with pytest.raises(NotAcquired):
        two(shared.raise_if_lost)
    assert one(shared.acquire, False), "after a loss an acquisition is one's own again"
    assert one(lambda: shared.fence) > fence
    assert one(lambda: shared.lost) is None
    one(shared.raise_if_lost)
    one(shared.release)
    with pytest.raises(NotAcquired):
        one(lambda: shared.fence)
    assert one(lambda: shared.lost) is None


def test_who_has_released_never_sees_the_next_ones_acquisition(make_lock, client, one, two):
    shared = make_lock(client, "a")
    one(shared.acquire)
    one(shared.release)
    two(shared.acquire)
    for look in (lambda: shared.fence, lambda: shared.id, shared.raise_if_lost):
        with pytest.raises(NotAcquired):
            one(look)
    client.delete(KEYS.lock)
    with pytest.raises(LockLost):
        two(shared.extend)
    assert one(lambda: shared.lost) is None
    with pytest.raises(LockLost):
        two(shared.release)


def test_who_never_acquired_sees_the_only_acquisition_and_none_of_several(make_lock, client, one, two):
    shared = make_lock(client, "a", auto_renewal=False)
    one(shared.acquire)
    fence, id = one(lambda: (shared.fence, shared.id))
    assert (shared.fence, shared.id, shared.lost) == (fence, id, None)
    shared.raise_if_lost()
    client.delete(KEYS.lock)
    two(shared.acquire, False)  # and the first one does not know yet
    with pytest.raises(NotAcquired):
        shared.fence  # noqa: B018
    with pytest.raises(NotAcquired):
        shared.raise_if_lost()
    assert (shared.id, shared.lost) == (None, None)
    with pytest.raises(LockLost):
        one(shared.release)
    assert shared.fence == two(lambda: shared.fence)
    two(shared.release)
    with pytest.raises(NotAcquired):
        shared.fence  # noqa: B018


def test_on_lost_is_told_of_the_lost_acquisition_though_another_one_holds_the_lock_by_then(make_lock, client, one, two):
    seen = []

    def on_lost(lock):
        seen.append((threading.current_thread(), lock.fence, lock.id, lock.lost))
        with pytest.raises(LockLost):
            lock.raise_if_lost()
        seen.append("told")

    shared = make_lock(client, "a", on_lost=on_lost)
    one(shared.acquire)
    lease = one(shared._visible_lease)
    client.delete(KEYS.lock)
    two(shared.acquire, False)
    lease.next_renewal = monotonic()
    watchdog.reschedule(lease)
    wait_until(lambda: len(seen) == 2)
    told = seen[0][1:]
    assert told == (lease.fence, lease.id, one(lambda: shared.lost))
    assert seen[0][0] is not lease.acquirer
    two(shared.release)
    with pytest.raises(LockLost):
        one(shared.release)


def test_what_is_kept_of_threads_that_ended_is_little_and_keeps_none_of_them(client):
    shared = Lock(client, "a", auto_renewal=False)
    threads = weakref.WeakSet()

    def lose(operation):
        threads.add(threading.current_thread())
        shared.acquire()
        client.delete(KEYS.lock)
        with pytest.raises(LockLost):
            getattr(shared, operation)()

    for number in range(300):
        in_thread(lose, ("release", "extend")[number % 2])
    shared.acquire()
    gc.collect()
    assert len(threads) <= 1
    assert len(shared._leases) <= 2
    assert len(shared._leases._ended) < 100
    shared.release()


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Lock, AsyncLock], ids=lambda kind: kind.__name__)
def test_a_forked_child_may_acquire_through_an_object_that_a_thread_of_its_parent_acquires_through(client, kind):
    """With an id of its own, for which the threads of one process wait in turn."""
    shared = kind(client, "a", id="mine")

    def acquire(*args):
        return shared.acquire(*args) if kind is Lock else asyncio.run(shared.acquire(*args))

    def child():
        assert acquire(False) is False

    held = Lock(client, "a")
    held.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acquire)
        try:
            wait_until(lambda: queued(client, "a") == 1)
            with pytest.raises(AlreadyAcquired):
                acquire(False)
            in_a_fork(child)
        finally:
            held.release()
        assert waiting.result(60)
