"""One lock, and many, on a Cluster of three primaries, for threads and for tasks."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref

import pytest
import redis
import redis.asyncio

from django_redislock.core import AsyncLock, Lock, held_locks, reset_all
from django_redislock.core.driver import wakeups_tasks, wakeups_threads
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.core.listing import contention, read_queue
from django_redislock.core.operations import count, names as names_of
from django_redislock.exceptions import LockLost
from tests.support import (
    BUSY,
    Cluster,
    begin,
    begin_to_wait,
    enter,
    in_a_fork,
    queued,
    renew_now,
    until,
    wait_until,
)
from tests.support.locks import wait_in_a_thread

NAMES = [f"lock-{number}" for number in range(40)]


def owners_of(cluster: Cluster, names: list[str]) -> set[int | None]:
    return {cluster.owner_of(lock_keys("redislock", name).lock).port for name in names[:12]}


def test_locks_of_all_nodes_are_acquired_extended_and_released(make_lock, cluster, client):
    assert len(owners_of(cluster, NAMES)) == 3
    fences = set()
    for name in NAMES:
        lock = make_lock(client, name, expire=20)
        with lock:
            assert lock.owner().id == lock.id
            assert not make_lock(client, name).acquire(blocking=False)
            lock.extend(60)
            assert lock.ttl() > 50
            fences.add(lock.fence)
        assert not lock.locked()
    assert len(fences) == len(NAMES)


@pytest.mark.parametrize("name", NAMES[:6])
def test_a_waiter_is_woken_by_the_release(make_lock, client, name, monkeypatch):
    for room in (wakeups_threads, wakeups_tasks):
        monkeypatch.setattr(room, "POLL_INTERVAL", 60)  # so that nothing else wakes it
    held = make_lock(client, name, expire=120)
    held.acquire()
    waiter = begin(enter, make_lock(client, name))
    wait_until(lambda: read_queue(client, name, "redislock"))
    held.release()
    assert waiter.result(20)


def test_many_locks_of_all_nodes_are_renewed(make_lock, client):
    locks = [make_lock(client, name, expire=30) for name in NAMES]
    for lock in locks:
        lock.acquire()
    ends = [lock._visible_lease().deadline for lock in locks]
    for lock in locks:
        renew_now(lock)
    wait_until(lambda: all(lock._visible_lease().deadline > end for lock, end in zip(locks, ends, strict=True)))
    assert all(lock.locked() and lock.lost is None for lock in locks)
    for lock in locks:
        lock.release()


def test_a_reset_lock_is_reported_as_lost_with_its_reason(make_lock, client):
    lock = make_lock(client, "a", expire=1.5)
    lock.acquire()
    assert Lock(client, "a").reset(reason="it was stuck")
    wait_until(lambda: lock.lost)
    assert "it was stuck" in lock.lost.reason
    with pytest.raises(LockLost):
        lock.release()


def test_the_locks_of_all_nodes_are_listed_in_order_counted_and_reset(client):
    locks = [Lock(client, name, expire=20) for name in NAMES]
    for lock in locks:
        lock.acquire()
    assert [info.name for info in held_locks(client)] == sorted(NAMES)
    server = server_of(client)
    assert server.run(count(server, "redislock")).locks == len(NAMES)
    assert reset_all(client) == len(NAMES)
    assert list(held_locks(client)) == []


def test_more_locks_of_one_bucket_than_one_page_holds_are_listed(client):
    held = lock_keys("redislock", "x").held
    names = {f"n{number}": 4_000_000_000_000 for number in range(3000)}
    client.zadd(held, names)
    server = server_of(client)
    assert server.run(count(server, "redislock")).locks == 3000
    assert set(server.run(names_of(server, "redislock"))) == set(names)


def test_the_waits_of_all_nodes_are_counted(client):
    for name in NAMES[:6]:
        wait_in_a_thread(client, name)
    found = contention(client)
    assert set(found.names) == set(NAMES[:6])
    assert sum(minute.waits for minute in found.minutes) == 6


def test_waiters_whose_process_is_gone_are_skipped(client, run_python, cluster):
    held = Lock(client, "a", expire=20)
    held.acquire()
    process = run_python(
        "import redis\nfrom django_redislock.core import Lock\n"
        "Lock(redis.RedisCluster.from_url(args[0]), 'a').acquire()",
        cluster.url,
    )
    wait_until(lambda: queued(client, "a") == 1)
    process.kill()
    waiter = begin_to_wait(client, "a", enter, Lock(client, "a", timeout=20))
    held.release()
    assert waiter.result(BUSY)


def test_clients_of_the_same_nodes_and_settings_share_a_cluster(cluster):
    with cluster.client() as one, cluster.client() as two, cluster.client(socket_timeout=3) as other:
        assert server_of(one) is server_of(two) is server_of(one)
        assert server_of(other) is not server_of(one)


def test_the_connections_to_all_nodes_are_closed_with_the_last_lock(cluster):
    nodes = redis.asyncio.RedisCluster.from_url(cluster.url, socket_timeout=4.25)  # settings of no other test
    lock = Lock(nodes, "a", expire=20)
    with lock:
        gone = [weakref.ref(node) for node in server_of(nodes).table.nodes.values()]
    del nodes, lock
    gc.collect()  # redis-py's client has cycles
    # More than the three, where another test knew the Cluster by a further address: the clients share these.
    assert len(gone) >= 3
    assert [found() for found in gone] == [None] * len(gone)


def test_a_forked_child_opens_its_own_connections(client):
    def child() -> None:
        with Lock(client, "b", expire=20):
            assert Lock(client, "a").locked()

    with Lock(client, "a", expire=20):
        in_a_fork(child)


async def test_a_cancelled_release_is_sent_also_when_the_slots_are_to_be_read_anew(client):
    lock = AsyncLock(client, "a", expire=60)
    await lock.acquire()
    release = asyncio.create_task(lock.release())
    await asyncio.sleep(0)
    table = server_of(client).table
    table.outdated, table._next_reading = True, -math.inf
    release.cancel()
    await asyncio.wait([release])
    await until(lambda: not client.exists(lock_keys("redislock", "a").lock), timeout=1 + BUSY)
