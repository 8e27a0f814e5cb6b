"""Who waits for itself: the same thread, or task, that asks for a lock that it holds through another object."""

from __future__ import annotations

import asyncio
import logging

import pytest
import redis
import redis.asyncio
from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction

from django_redislock import AcquireTimeout, AlreadyAcquired, LockBackendError, lock
from django_redislock.core import AsyncLock, Lock
from django_redislock.core.keys import lock_keys
from tests.support import async_client_at, begin_to_wait, client_at, counting, enter, queued

KEYS = lock_keys("redislock", "a")
HELP = r"lock\(name, reentrant=True\) or rlock\(name\)"


def warnings(caplog):
    return [record for record in caplog.records if "through another object" in record.message]


@pytest.mark.parametrize(("outer", "inner"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("others_wait", [False, True])
def test_without_a_timeout_the_same_thread_is_told_that_it_would_wait_for_itself(
    make_lock, client, outer, inner, others_wait
):
    held, again = make_lock(client, "a", reentrant=outer), make_lock(client, "a", reentrant=inner)
    with held:
        # Then this process listens, and a first call would join the queue.
        others = [begin_to_wait(client, "a", enter, make_lock(client, "a")) for _ in range(3 * others_wait)]
        with pytest.raises(AlreadyAcquired, match=HELP):
            again.acquire()
        with pytest.raises(AlreadyAcquired, match=HELP), again:
            pytest.fail("the body ran")
        assert held.owned()
        assert queued(client, "a") == len(others), "it has not left a place in the queue"
    assert all(other.result(60) for other in others)
    assert again.acquire()
    again.release()


def test_with_a_timeout_it_waits_and_says_why_once(make_lock, client, caplog):
    with make_lock(client, "a") as held:
        assert make_lock(client, "a").acquire(timeout=0.3) is False
        (record,) = warnings(caplog)
        assert (record.levelno, record.args) == (logging.WARNING, ("a", held.fence))
        assert "reentrant=True" in record.message
        with pytest.raises(AcquireTimeout), make_lock(client, "a", timeout=0.1):
            pytest.fail("the body ran")
        assert len(warnings(caplog)) == 2
        caplog.clear()
        for once in ({"blocking": False}, {"timeout": 0}):
            assert make_lock(client, "a").acquire(**once) is False
        assert not warnings(caplog), "who does not wait is not told"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"auto_renewal": False}, {"max_hold": 0.1}], ids=repr)
def test_for_a_lock_that_ends_by_itself_it_waits_without_a_timeout(client, caplog, options):
    held = Lock(client, "a", expire=1, **options)
    held.acquire()
    with Lock(client, "a") as again:
        assert again.fence > held.fence
    assert len(warnings(caplog)) == 1


def test_what_was_lost_unnoticed_or_left_or_dropped_keeps_nobody_out(client, caplog):
    held = Lock(client, "a")
    held.acquire()
    client.delete(KEYS.lock)
    with Lock(client, "a"):
        pass
    held = Lock(client, "a")
    held.acquire()
    held.release()
    with Lock(client, "a"):
        pass
    held.acquire()
    client.pexpire(KEYS.lock, 300)  # dropped, it is renewed no more
    del held
    with Lock(client, "a"):
        pass
    assert not warnings(caplog)


def test_only_the_same_name_and_prefix_on_the_same_server_is_waited_for(client, server, own_server):
    with (
        own_server.client() as elsewhere,
        Lock(client, "a"),
        Lock(client, "b"),
        Lock(client, "a", prefix="other"),
        Lock(elsewhere, "a"),
        server.client(socket_timeout=9) as same,
        pytest.raises(AlreadyAcquired),
    ):
        Lock(same, "a").acquire()


def test_a_lock_in_another_database_is_not_waited_for(client, server):
    with redis.Redis.from_url(server.url_of_db(1)) as database, Lock(client, "a"), Lock(database, "a"):
        pass


def test_another_thread_or_task_waits_for_its_turn(make_lock, client, caplog):
    with make_lock(client, "a"):
        other = begin_to_wait(client, "a", enter, make_lock(client, "a"))
    assert other.result(60)
    assert not warnings(caplog)


def test_the_same_id_does_not_wait_for_itself(client):
    with Lock(client, "a") as held:
        other = Lock(client, "a", id=held.id)
        assert other.acquire()
        assert other.fence == held.fence


@pytest.mark.slow
def test_after_a_failed_release_it_waits_for_the_expiry(proxy):
    with client_at(proxy.url, socket_timeout=0.5) as through:
        held = Lock(through, "a", expire=2)
        held.acquire()
        proxy.black_hole()
        with pytest.raises(LockBackendError):
            held.release()
        proxy.heal()
        with Lock(through, "a", timeout=None):
            pass


def test_a_trial_costs_one_command_more_where_the_lock_is_held_by_the_same_thread_only(client):
    with Lock(client, "a"), Lock(client, "b"):
        pass
    with counting(client) as counts, Lock(client, "a"), Lock(client, "b"):
        pass
    assert counts["evalsha"] == 4


@pytest.mark.usefixtures("locks_by_url")
@pytest.mark.django_db(transaction=True)
def test_a_lock_that_waits_for_its_commit_may_be_taken_again_and_keeps_a_plain_one_out():
    with transaction.atomic():
        with lock("a", until_commit=True):
            pass
        with lock("a", until_commit=True):
            pass
        with pytest.raises(AlreadyAcquired, match=HELP):
            lock("a", until_commit=False).acquire()
    with lock("a"):
        pass


@pytest.mark.slow
def test_when_the_connection_breaks_who_waits_for_itself_tries_again_as_long_as_it_has_time(make_lock, proxy):
    with client_at(proxy.url) as through:
        held = make_lock(through, "a")
        held.acquire()
        proxy.drop_next_reply(4, containing=KEYS.lock)
        assert make_lock(through, "a").acquire(timeout=3) is False
        assert proxy.dropped == 4
        proxy.drop_next_reply(4, containing=KEYS.lock)
        with pytest.raises(AlreadyAcquired):
            make_lock(through, "a").acquire()
        held.release()


# Through asgiref's bridges between threads and tasks


def test_a_thread_that_holds_the_lock_and_waits_for_a_task_that_wants_it_is_told(redis_url, client):
    async def take(**options):
        return await AsyncLock(async_client_at(redis_url), "a").acquire(**options)

    with Lock(client, "a") as held:
        with pytest.raises(AlreadyAcquired, match=HELP):
            async_to_sync(take)()
        assert async_to_sync(take)(timeout=0.1) is False
        assert held.owned()


async def test_a_task_that_holds_the_lock_and_waits_for_a_thread_that_wants_it_is_told(redis_url, client):
    async with AsyncLock(async_client_at(redis_url), "a") as held:
        for sensitive in (True, False):
            with pytest.raises(AlreadyAcquired, match=HELP):
                await sync_to_async(Lock(client, "a").acquire, thread_sensitive=sensitive)()
        assert await held.owned()


async def test_a_task_that_waits_for_a_thread_that_waits_for_a_task_that_wants_its_lock_is_told(redis_url):
    async def take():
        await AsyncLock(async_client_at(redis_url), "a").acquire()

    async with AsyncLock(async_client_at(redis_url), "a"):
        with pytest.raises(AlreadyAcquired, match=HELP):
            await sync_to_async(async_to_sync(take))()


async def test_a_thread_or_task_for_which_the_holder_does_not_wait_gets_the_lock_in_its_turn(redis_url, client):
    async def take():
        async with AsyncLock(async_client_at(redis_url), "a"):
            return "task"

    def take_in_a_thread():
        with Lock(client, "a"):
            return "thread"

    async with AsyncLock(async_client_at(redis_url), "a"):
        begun = [asyncio.create_task(take()), asyncio.create_task(sync_to_async(take_in_a_thread)())]
        begun.append(asyncio.create_task(asyncio.to_thread(take_in_a_thread)))
        begun.append(asyncio.create_task(sync_to_async(async_to_sync(take), thread_sensitive=False)()))
        while queued(client, "a") < 4:
            assert not any(task.done() for task in begun)
            await asyncio.sleep(0.01)
        await sync_to_async(int, thread_sensitive=False)()
    assert await asyncio.gather(*begun) == ["task", "thread", "thread", "task"]
