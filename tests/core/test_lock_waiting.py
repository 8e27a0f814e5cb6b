"""Waiting: woken at a release and at the holder's expiry, in order, within one deadline, over few connections."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_redislock.core import AsyncLock, Lock
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError
from tests.support import (
    BUSY,
    async_client_at,
    begin,
    begin_to_wait,
    client_at,
    enter,
    in_thread,
    listening,
    lived,
    monitoring,
    queued,
    wait_until,
)


def waiters(make_lock, client, name, count, order):
    """Begin waits for the lock one after another, each of which notes its number when it has the lock."""

    def wait(number):
        with make_lock(client, name, timeout=30):
            order.append(number)

    return [begin_to_wait(client, name, wait, number) for number in range(count)]


def served(calls):
    for call in calls:
        call.result(30)


@pytest.mark.parametrize("timeout", [0, 0.05, 0.2, 0.7])
def test_a_timeout_is_kept(make_lock, client, timeout):
    with make_lock(client, "a"):
        started = time.monotonic()
        assert in_thread(lambda: make_lock(client, "a").acquire(timeout=timeout)) is False
        assert time.monotonic() - started >= timeout
    assert not client.exists(lock_keys("redislock", "a").queue), "who gives up leaves the queue"


@pytest.mark.slow
def test_the_deadline_holds_when_every_race_is_lost(make_lock, client):
    """A barger frees and retakes the lock in one step, so that each wake-up comes too late."""
    keys, stop = lock_keys("redislock", "a"), threading.Event()

    def barge():
        while not stop.wait(0.05):
            client.set(keys.lock, "barger\n1\n1\n{}", px=5000)

    client.set(keys.lock, "barger\n1\n1\n{}", px=5000)
    barger = begin(barge)
    started = time.monotonic()
    assert make_lock(client, "a").acquire(timeout=1) is False
    assert 1 <= time.monotonic() - started < 1 + BUSY
    stop.set()
    barger.result()


def test_waiters_are_served_first_come_first_served(make_lock, client):
    order: list[int] = []
    with make_lock(client, "a"):
        calls = waiters(make_lock, client, "a", 12, order)
    served(calls)
    assert order == list(range(12))


def test_neither_a_newcomer_nor_the_releaser_overtakes_a_waiter(make_lock, client):
    lock, judged = make_lock(client, "a"), 0
    for _ in range(20):
        order: list[object] = []
        lock.acquire()
        calls = waiters(make_lock, client, "a", 1, order)
        started = time.monotonic()
        lock.release()
        newcomer = make_lock(client, "a")
        if newcomer.acquire(blocking=False):
            order.append("newcomer")
            newcomer.release()
        lock.acquire()  # the releaser, coming back
        order.append("releaser")
        lock.release()
        served(calls)
        if time.monotonic() - started < 0.5:  # on a machine that stood still, the waiter was given up for frozen
            judged += 1
            assert order in ([0, "releaser"], [0, "newcomer", "releaser"])
    assert judged


def test_waiters_of_one_given_id_are_told_apart(make_lock, client):
    """One id may wait for several locks at once: who leaves takes nobody along, and whoever stays is still told."""
    held = {name: make_lock(client, name) for name in "abc"}
    got: list[str] = []
    calls = {}

    def wait(name, id):
        with make_lock(client, name, id=id):
            got.append(name)

    for name, id in (("c", None), ("a", "worker"), ("b", "worker")):  # the first of them reads for all
        held[name].acquire()
        calls[name] = begin_to_wait(client, name, wait, name, id)
    for name in "bca":
        held[name].release()
        wait_until(lambda name=name: name in got, timeout=1 + BUSY)
        calls[name].result(30)


def test_a_waiter_wakes_at_the_holders_expiry(make_lock, client):
    """Even with nothing published, and whatever the waiter's own settings."""
    make_lock(client, "a", expire=0.4, auto_renewal=False).acquire()
    started = time.monotonic()
    assert make_lock(client, "a", expire=60).acquire(timeout=20)
    assert time.monotonic() - started < 0.4 + BUSY


@pytest.mark.slow
def test_waiting_threads_share_one_connection_and_never_starve_the_holder(make_lock, redis_url):
    with client_at(redis_url, max_connections=2) as client, client_at(redis_url) as observer:
        before = len(observer.client_list())
        results: list[int] = []
        holder = make_lock(client, "a", expire=1.2)
        with holder:
            fence = holder.fence
            calls = waiters(make_lock, observer, "a", 16, results)
            lived(1.5)
            assert holder.owner().fence == fence, "renewed beyond its life"
            connections = len(observer.client_list()) - before
        served(calls)
    assert results == list(range(16))
    # Commands of the holder and of the observer, one subscription, one watchdog each at most.
    assert connections <= 2 + 16 + 2


def test_a_thousand_waiting_threads_block_one_connection(own_server):
    names = [f"lock {i}" for i in range(10)]
    with own_server.client() as client:
        before = len(subscribed(client))
        holders = [Lock(client, name, expire=120) for name in names]
        for holder in holders:
            holder.acquire()
        calls = [begin(enter, Lock(client, names[i % 10], timeout=300)) for i in range(1000)]
        entries = lambda: sum(queued(client, name) for name in names)  # noqa: E731
        wait_until(lambda: entries() == 1000, timeout=120, message=lambda: f"{entries()} entries in the queues")
        subscriptions = len(subscribed(client)) - before
        blocked = int(client.info("clients")["blocked_clients"])
        for holder in holders:
            holder.release()
        assert all(call.result(300) for call in calls)
    assert subscriptions <= 1, "none when it was open already"
    assert blocked == 0


@pytest.mark.slow
def test_a_waiter_does_not_poll(make_lock, client):
    """While the lock is held, the waiters of a process look twice a second, however many they are."""
    results: list[int] = []
    with make_lock(client, "a", expire=60):
        calls = waiters(make_lock, client, "a", 10, results)
        began = time.monotonic()
        with monitoring(client) as sent:
            lived(2)
        seconds = time.monotonic() - began
        assert len([line for line in sent if line.startswith("EVALSHA")]) <= 2 * seconds + 1
    served(calls)


def subscribed(client):
    return [found for found in client.client_list() if int(found["sub"])]


def cut_subscriptions(client):
    for found in subscribed(client):
        client.client_kill(found["addr"])


def test_a_cut_subscription_is_mended_and_nobody_loses_his_place(make_lock, client):
    results: list[int] = []
    with make_lock(client, "a", expire=60):
        calls = waiters(make_lock, client, "a", 5, results)
        cut_subscriptions(client)
        wait_until(lambda: subscribed(client))
    served(calls)
    assert results == list(range(5))


def test_a_release_that_nobody_hears_keeps_nobody_waiting(make_lock, client):
    results: list[int] = []
    with make_lock(client, "a", expire=60):
        calls = waiters(make_lock, client, "a", 5, results)
        cut_subscriptions(client)
    freed = time.monotonic()
    served(calls)
    assert sorted(results) == list(range(5))
    assert time.monotonic() - freed < 1 + BUSY


def test_an_idle_subscription_that_the_server_closed_is_no_error(make_lock, client):
    results: list[int] = []
    with make_lock(client, "a"):
        calls = waiters(make_lock, client, "a", 1, results)
    served(calls)
    cut_subscriptions(client)
    with make_lock(client, "a"):
        call = begin_to_wait(client, "a", enter, make_lock(client, "a", timeout=10))
    assert call.result(5)


def test_a_reservation_that_nobody_claims_passes_on(make_lock, client):
    """The first in the queue listens but never comes, as a frozen process does."""
    keys = lock_keys("redislock", "a")
    lock = make_lock(client, "a", expire=60)
    lock.acquire()
    with listening(client, "ghost"):
        client.zadd(keys.queue, {"ghost\nghost-id": 1})
        call = begin_to_wait(client, "a", make_lock(client, "a").acquire, timeout=20)
        freed = time.monotonic()
        lock.release()
        assert client.get(keys.lock).startswith(b"ghost-id\n0\n"), "reserved for the first"
        assert call.result(10)
        assert time.monotonic() - freed < 1 + BUSY


def test_who_loses_the_subscription_before_it_is_used_subscribes_again(make_lock, proxy, monkeypatch):
    """The answer "subscribed" was right when it was given: its error reached the caller as one of redis-py."""
    for kind in (Lock, AsyncLock):
        monkeypatch.setattr(kind, "_is_subscribed", lambda self: True)
    proxy.drop_next_reply(containing=b"SUBSCRIBE")
    with client_at(proxy.url) as behind, make_lock(behind, "a") as lock:
        assert lock.fence
        assert proxy.dropped == 1


# New connections that hang


def outcome(lock, **how):
    """Return what acquiring gives: True, False or the kind of error."""
    try:
        return lock.acquire(**how)
    except LockBackendError:
        return LockBackendError


def connect(make_lock, behind, proxy, pool, count):
    """See to it that so many threads have their connections for calls."""
    proxy.delay_replies(0.3)
    list(pool.map(lambda _: make_lock(behind, "a").locked(), range(count)))
    proxy.delay_replies(0)


@pytest.mark.slow
def test_one_thread_subscribes_for_all_and_its_failure_is_the_answer_for_all(make_lock, client, proxy):
    """Each of 12 threads would else connect in vain when the one before it has given up."""
    with (
        client_at(proxy.url, socket_timeout=1) as behind,
        make_lock(client, "a"),
        ThreadPoolExecutor(12) as pool,
    ):
        connect(make_lock, behind, proxy, pool, 12)
        proxy.deafen()
        started = time.monotonic()
        results = list(pool.map(lambda _: outcome(make_lock(behind, "a"), timeout=0.2), range(12)))
        assert time.monotonic() - started < 0.2 + 1 + BUSY
        assert set(results) <= {False, LockBackendError}
        assert proxy.unheard <= 2, "one, and one for who came when that was over"


@pytest.mark.slow
@pytest.mark.usefixtures("without_janitor")
@pytest.mark.parametrize("named", [False, True])  # True: it has to say its name before it is open
def test_a_connection_that_cannot_be_had_is_the_answer_for_all_who_wait_for_it(make_lock, proxy, named):
    with (
        client_at(proxy.url, socket_timeout=1, max_connections=1, client_name="any" if named else None) as behind,
        ThreadPoolExecutor(12) as pool,
    ):
        proxy.deafen()
        together = threading.Barrier(13)

        def acquire(number):
            together.wait(60)
            return outcome(make_lock(behind, f"lock {number}"), blocking=False)

        calls = [pool.submit(acquire, number) for number in range(12)]
        together.wait(60)
        started = time.monotonic()
        results = [call.result() for call in calls]
        assert time.monotonic() - started < 1 + BUSY
        assert set(results) == {LockBackendError}
        assert proxy.unheard == 1


@pytest.mark.slow
def test_a_subscription_that_cannot_be_renewed_does_not_keep_waiters_from_looking(make_lock, client, proxy):
    """Even while one of them tries to connect."""

    with client_at(proxy.url, socket_timeout=3) as behind, ThreadPoolExecutor(4) as pool:
        connect(make_lock, behind, proxy, pool, 4)
        with make_lock(client, "a", expire=60):
            waiting = [pool.submit(enter, make_lock(behind, "a", timeout=30)) for _ in range(3)]
            wait_until(lambda: queued(client, "a") == 3)
            proxy.deafen()
            cut_subscriptions(client)
            wait_until(lambda: proxy.unheard)
        freed = time.monotonic()
        wait_until(lambda: any(each.done() for each in waiting))
        assert time.monotonic() - freed < 1 + BUSY
        assert proxy.unheard == 1


@pytest.mark.slow
async def test_a_task_waits_no_longer_for_others_that_connect_and_are_cancelled(proxy):
    proxy.deafen()
    client = async_client_at(proxy.url, client_name="any", socket_timeout=1)  # it has to say its name

    others = [asyncio.create_task(AsyncLock(client, f"lock {i}").acquire()) for i in range(5)]
    for number, other in enumerate(others):
        asyncio.get_running_loop().call_later(0.7 * (number + 1), other.cancel)
    started = time.monotonic()
    with pytest.raises(LockBackendError):
        await AsyncLock(client, "a").acquire(timeout=0.1)
    assert time.monotonic() - started < 1 + BUSY
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
