"""Re-entrant locks: who may enter again, what each entry proves, and when the lock is released."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio

from django_redislock.core import Lock
from django_redislock.core.driver.kinds import place_of
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockLost, NotAcquired
from tests.support import async_client_at, client_at, in_a_fork, wait_until
from tests.support.locks import AsyncRLock, RLock

KEYS = lock_keys("redislock", "a")


def in_thread(function):
    """Call the function in a thread of its own, and return what it returned."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(timeout=20)
    assert results, "the thread did not finish"
    return results[0]


def waiting(client):
    return client.zcard(KEYS.queue)


# Threads


def test_only_the_last_exit_releases_and_all_entries_are_one_acquisition(client):
    first, second = RLock(client, "a"), RLock(client, "a")
    with first:
        held = first.id, first.fence
        with second, first:
            assert (second.id, second.fence) == held
        assert first.owned()
        assert (first.id, first.fence) == held
    assert not first.locked()
    for lock in (first, second):
        with pytest.raises(NotAcquired):
            lock.release()


def test_entries_may_be_left_in_any_order_through_any_object(client):
    first, second = RLock(client, "a"), RLock(client, "a")
    first.acquire()
    second.acquire()
    first.acquire()
    for lock in (second, second):
        lock.release()
        assert lock.owned()
    second.release()
    assert not first.locked()
    assert first.acquire(blocking=False)
    first.release()


def test_another_thread_neither_enters_nor_releases(client):
    shared = RLock(client, "a")

    def refused():
        with pytest.raises(NotAcquired):
            shared.release()
        return [shared.acquire(blocking=False), RLock(client, "a").acquire(blocking=False)]

    with shared, shared:
        assert in_thread(refused) == [False, False]
        assert shared.owned()


def test_another_thread_waits_for_the_last_exit(client):
    shared, taken = RLock(client, "a"), threading.Event()

    def wait():
        with shared, shared:
            taken.set()

    shared.acquire()
    shared.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: waiting(client) == 1)
    shared.release()
    assert waiting(client) == 1
    assert not taken.is_set()
    shared.release()
    assert taken.wait(5)
    thread.join(timeout=5)
    assert not shared.locked()


def test_each_entry_refreshes_the_life(client):
    lock = RLock(client, "a", expire=30, auto_renewal=False)
    with lock:
        client.pexpire(KEYS.lock, 1000)
        with RLock(client, "a"):
            assert lock.ttl() > 20


@pytest.mark.parametrize("taken_by_another", [False, True])
def test_a_lost_lock_is_not_entered_again(client, taken_by_another):
    first, second = RLock(client, "a", auto_renewal=False), RLock(client, "a")
    with pytest.raises(LockLost), first:
        client.delete(KEYS.lock)
        if taken_by_another:
            successor = Lock(client, "a")
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


def test_a_lock_that_was_lost_inside_is_told_at_every_exit(client):
    lock = RLock(client, "a", auto_renewal=False)
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


def test_clients_of_the_same_settings_are_one_server(client, redis_url):
    with client_at(redis_url) as one, client_at(redis_url) as two:
        with RLock(one, "a") as first, RLock(two, "a") as second:
            assert first.id == second.id
        assert not first.locked()


@pytest.mark.parametrize("options", [{"socket_timeout": 7}, {"max_connections": 3}, {"client_name": "other"}], ids=repr)
def test_clients_of_other_settings_lead_to_the_same_lock(client, redis_url, options):
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


def test_a_lock_that_is_not_reentrant_keeps_out_and_is_kept_out(client):
    """Lock and RLock of one name exclude each other, also in one thread."""
    plain, again = Lock(client, "a"), RLock(client, "a")
    with plain:
        assert not again.acquire(blocking=False)
        assert not again.acquire(timeout=0.05)
    with again:
        assert not plain.acquire(blocking=False)
        with again:
            assert again.owned()


def test_the_entered_objects_may_go_while_another_is_inside(client):
    outer = RLock(client, "a")
    outer.acquire()
    RLock(client, "a").acquire()
    outer.release()
    assert outer.owned(), "entered twice, left once"
    outer.release()
    assert not outer.locked()


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


def test_a_generator_left_in_another_thread_frees_nothing(client, caplog):
    lock = RLock(client, "a")

    def held():
        with lock:
            yield

    generator = held()
    next(generator)
    in_thread(generator.close)
    assert "is not held by this thread" in caplog.text
    assert lock.owned(), "the thread that entered is inside still"
    lock.release()
    assert not lock.locked()


# Tasks


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def aclient(redis_url):
    return async_client_at(redis_url)  # the locks connect by themselves, so there is nothing to close


def test_a_task_enters_through_any_object_and_the_last_exit_releases(aclient):
    async def main():
        first, second = AsyncRLock(aclient, "a"), AsyncRLock(aclient, "a")
        await first.acquire()
        await second.acquire()
        await second.release()
        assert await first.owned()
        await second.release()
        assert not await first.locked()
        with pytest.raises(NotAcquired):
            await first.release()

    asyncio.run(main())


def test_another_task_of_the_same_thread_waits(aclient, client):
    async def main():
        shared = AsyncRLock(aclient, "a")

        async def enter():
            async with shared, shared:
                return shared.fence

        async with shared, shared:
            fence = shared.fence
            task = asyncio.create_task(enter())
            await until(lambda: waiting(client) == 1)
            assert not task.done()
        assert await task > fence
        assert not await shared.locked()

    asyncio.run(main())


def test_each_entry_of_a_task_refreshes_the_life(aclient, client):
    async def main():
        lock = AsyncRLock(aclient, "a", expire=30, auto_renewal=False)
        async with lock:
            client.pexpire(KEYS.lock, 1000)
            async with AsyncRLock(aclient, "a"):
                assert await lock.ttl() > 20

    asyncio.run(main())


def test_a_task_does_not_enter_its_lost_lock_again(aclient, client):
    async def main():
        lock = AsyncRLock(aclient, "a", auto_renewal=False)
        await lock.acquire()
        with Lock(client, "other"):
            assert Lock(client, "a").reset()
        with Lock(client, "a") as successor:
            for again in (lock, AsyncRLock(aclient, "a")):
                with pytest.raises(LockLost):
                    await again.acquire(blocking=False)
            with pytest.raises(LockLost):
                await lock.release()
            assert not await lock.acquire(blocking=False)
            assert successor.owned()

    asyncio.run(main())


def test_tasks_and_threads_exclude_each_other(aclient, client):
    async def main():
        async with AsyncRLock(aclient, "a"):
            assert not RLock(client, "a").acquire(blocking=False)
        with RLock(client, "a"):
            assert not await AsyncRLock(aclient, "a").acquire(blocking=False)

    asyncio.run(main())


def test_a_generator_that_another_task_closes_releases(aclient):
    async def main():
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

    asyncio.run(main())
