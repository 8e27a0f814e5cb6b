"""Re-entrant locks: who may enter again, what each entry proves, and when the lock is released."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis
import redis.asyncio

from django_redislock.core.driver.kinds import place_of
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockLost, NotAcquired
from tests.support import begin_to_wait, client_at, in_a_fork, in_thread, queued
from tests.support.locks import AsyncRLock, RLock

KEYS = lock_keys("redislock", "a")


@pytest.fixture
def make_rlock(make_lock):
    return partial(make_lock, reentrant=True)


def test_only_the_last_exit_releases_and_all_entries_are_one_acquisition(make_rlock, client):
    first, second = make_rlock(client, "a"), make_rlock(client, "a")
    with first:
        held = first.id, first.fence
        with second, first:
            assert (second.id, second.fence) == held
        assert first.owned()
        assert (first.id, first.fence) == held
    assert not first.locked()
    assert second.lost is None
    for lock in (first, second):
        with pytest.raises(NotAcquired):
            lock.release()


def test_entries_may_be_left_in_any_order_through_any_object_and_are_forgotten_by_all(make_rlock, client):
    first, second = make_rlock(client, "a"), make_rlock(client, "a")
    first.acquire()
    second.acquire()
    make_rlock(client, "a").acquire()  # an object that goes while others are inside
    for lock in (second, first):
        lock.release()
        assert lock.owned()
    second.release()
    assert not first.locked()
    for lock in (first, second):
        assert lock.lost is None
        with pytest.raises(NotAcquired):
            lock.id  # noqa: B018
    assert first.acquire(blocking=False)
    first.release()


def test_another_thread_or_task_neither_enters_nor_releases_and_waits_for_the_last_exit(make_rlock, client):
    shared = make_rlock(client, "a")

    def refused():
        with pytest.raises(NotAcquired):
            shared.release()
        return [shared.acquire(blocking=False), make_rlock(client, "a").acquire(blocking=False)]

    def wait():
        with shared, shared:
            return shared.fence

    with shared, shared:
        fence = shared.fence
        assert in_thread(refused) == [False, False]
        waiter = begin_to_wait(client, "a", wait)
        shared.release()
        assert shared.owned()
        assert queued(client, "a") == 1
        assert not waiter.done()
        shared.acquire()
    assert waiter.result(5) > fence
    assert not shared.locked()


def test_each_entry_refreshes_the_life(make_rlock, client):
    lock = make_rlock(client, "a", expire=30, auto_renewal=False)
    with lock:
        client.pexpire(KEYS.lock, 1000)
        with make_rlock(client, "a"):
            assert lock.ttl() > 20


@pytest.mark.parametrize("taken_by_another", [False, True])
def test_a_lost_lock_is_not_entered_again(make_rlock, client, taken_by_another):
    first, second = make_rlock(client, "a", auto_renewal=False), make_rlock(client, "a")
    with pytest.raises(LockLost), first:
        client.delete(KEYS.lock)
        if taken_by_another:
            successor = make_rlock(client, "a", reentrant=False)
            successor.acquire()
        for lock in (second, first):
            with pytest.raises(LockLost):
                lock.acquire(blocking=False)
        assert first.lost is not None
    if taken_by_another:
        assert successor.owned()
        assert not first.acquire(blocking=False)
        successor.release()
    assert first.acquire(blocking=False), "left, it may be taken anew"
    first.release()


def test_a_lock_that_was_lost_inside_is_told_at_every_exit(make_rlock, client):
    lock = make_rlock(client, "a", auto_renewal=False)
    lock.acquire()
    lock.acquire()
    client.delete(KEYS.lock)
    with pytest.raises(LockLost):
        lock.extend()
    for _ in range(2):
        with pytest.raises(LockLost):
            lock.release()
    with pytest.raises(NotAcquired):
        lock.release()


def test_other_names_prefixes_and_databases_are_other_locks(client, server):
    with (
        redis.Redis.from_url(server.url_of_db(1)) as elsewhere,
        RLock(client, "a") as lock,
        RLock(client, "b") as other_name,
        RLock(client, "a", prefix="other") as other_prefix,
        RLock(elsewhere, "a") as other_database,
    ):
        assert len({held.id for held in (lock, other_name, other_prefix, other_database)}) == 4


@pytest.mark.parametrize(
    "options", [{}, {"socket_timeout": 7}, {"max_connections": 3}, {"client_name": "other"}], ids=repr
)
def test_clients_of_any_settings_lead_to_the_same_lock(client, redis_url, options):
    with client_at(redis_url, **options) as other:
        with RLock(client, "a") as first, RLock(other, "a", timeout=5) as second:
            assert first.id == second.id
            assert other.get(KEYS.lock).startswith(first.id.encode())
        assert not first.locked()
        with RLock(client, "a") as first:
            assert RLock(other, "a").acquire(timeout=5)
            RLock(other, "a").release()
            assert first.owned()


def test_who_leads_to_the_same_database_is_known_by_where_it_is(redis_url):
    def place(client):
        return server_of(client).place

    def sentinel(kind, service, timeout=5, **options):
        return kind([("one", 1), ("two", 2)], socket_timeout=timeout).master_for(service, **options)

    of_threads, of_asyncio = redis.sentinel.Sentinel, redis.asyncio.Sentinel
    same = [
        [redis.Redis(), redis.Redis("localhost", 6379, socket_timeout=9), redis.asyncio.Redis(db="0")],
        [client_at(redis_url), client_at(redis_url, username="me", password="secret")],
        [redis.Redis(db=1), redis.Redis.from_url("redis:///1")],
        [redis.Redis(port=1), redis.Redis.from_url("redis://localhost:1")],
        [redis.Redis(unix_socket_path="/a"), redis.Redis.from_url("unix:///a?db=0")],
        [sentinel(of_threads, "main"), sentinel(of_threads, "main", 1, socket_keepalive=True)],
        [sentinel(of_threads, "main", db=1)],
        [sentinel(of_threads, "other")],
    ]
    places = [{place(client) for client in clients} for clients in same]
    assert [len(each) for each in places] == [1] * len(same)
    assert len(set.union(*places)) == len(same)
    assert place_of(sentinel(of_asyncio, "main").connection_pool) == place(same[5][0])


def test_a_lock_that_is_not_reentrant_keeps_out_and_is_kept_out(make_lock, make_rlock, client):
    """Also in one thread."""
    plain, again = make_lock(client, "a"), make_rlock(client, "a")
    with plain:
        assert not again.acquire(blocking=False)
        assert not again.acquire(timeout=0.05)
    with again:
        assert not plain.acquire(blocking=False)
        with again:
            assert again.owned()


def test_who_left_never_sees_another_threads_acquisition_through_any_of_its_objects(client):
    first, second = RLock(client, "a"), RLock(client, "a")

    def come_and_go():
        with first, second:
            fences.append(second.fence)
        return look()

    def look():
        for lock in (first, second):
            for asked in (lambda lock=lock: lock.fence, lambda lock=lock: lock.id, lock.raise_if_lost):
                with pytest.raises(NotAcquired):
                    asked()
            assert lock.lost is None
        return True

    fences = []
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        assert one.submit(come_and_go).result(60)
        two.submit(second.acquire).result(60)
        two.submit(first.acquire).result(60)
        assert one.submit(look).result(60)
        assert first.fence > fences[0], "who never acquired may work for the only one that did"
        for lock in (second, first):
            two.submit(lock.release).result(60)


@pytest.mark.processes
@pytest.mark.parametrize("asks_first", [False, True])
def test_a_forked_child_is_not_inside_and_leaves_its_copy_of_each_block(client, asks_first):
    lock = RLock(client, "a")

    def child():
        if asks_first:
            assert not lock.acquire(blocking=False)
            assert not RLock(client, "a").acquire(blocking=False)
            with pytest.raises(NotAcquired):
                lock.release()
        for _ in range(2):
            lock.__exit__(None, None, None)

    with lock, lock:
        in_a_fork(child)
        assert lock.owned()
    assert not lock.locked()


def test_a_generator_that_another_thread_closes_releases(client):
    lock = RLock(client, "a")

    def held():
        with lock:
            yield

    generator = held()
    next(generator)
    in_thread(generator.close)
    assert not lock.locked()


async def test_a_generator_that_another_task_closes_releases(aclient):
    lock = AsyncRLock(aclient, "a")

    async def held():
        async with lock:
            yield

    async def close():
        await generator.aclose()

    generator = held()
    await anext(generator)
    await asyncio.create_task(close())
    assert not await lock.locked()
    async with lock:
        pass
