"""`min_replicas`: replicas confirm that they have the lock, at the acquisition and at each renewal."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from django_redislock.core import AsyncLock, Lock, Semaphore
from django_redislock.core.driver.registry import close_unused, replicated, server_of
from django_redislock.core.driver.server import MAX_CONNECTIONS
from django_redislock.exceptions import LockBackendError, LockLost
from tests.support import RedisServer, acquire_and_release, begin, begin_to_wait, counting, enter, key_of, wait_until
from tests.support.locks import RLock

pytestmark = pytest.mark.processes
TOO_FEW = r"Redis did not confirm a command .*: 0 of 1 replicas \(min_replicas\) confirmed it within 0.5 s"


@pytest.fixture(scope="module")
def servers():
    with RedisServer() as primary, RedisServer(replicaof=f"127.0.0.1 {primary.port}") as replica:
        yield primary, replica


@pytest.fixture
def replica(servers):
    primary, replica = servers
    with primary.client() as client:
        wait_until(lambda: client.set("mark", "x") and client.wait(1, 100) == 1, message="the replica follows")
    yield replica
    replica.resume()


@pytest.fixture
def client(servers, replica):
    with servers[0].client() as client:
        client.flushall()
        yield client
        close_unused()  # an error that a test keeps leads to its server, and the collector closes it in any order


def test_a_lock_that_a_replica_has_is_acquired_by_one_script_and_one_wait(client, replica):
    with Lock(client, "a", min_replicas=1):
        pass
    with counting(client) as ran, Lock(client, "a", min_replicas=1) as held, replica.client() as other:
        assert other.get(key_of("a")).startswith(held.id.encode())
    assert (ran["evalsha"], ran["wait"]) == (2, 1)
    with counting(client) as ran, Lock(client, "a"):
        pass
    assert ran["wait"] == 0, "without the option it costs nothing"


async def test_many_tasks_have_it_confirmed(client):
    locks = [AsyncLock(client, f"n{number}", min_replicas=1) for number in range(40)]
    assert await asyncio.gather(*[lock.acquire() for lock in locks]) == [True] * 40
    await asyncio.gather(*[lock.release() for lock in locks])


def test_a_waiter_gets_a_confirmed_lock(make_lock, client):
    with make_lock(client, "a", min_replicas=1) as held:
        waiter = begin_to_wait(client, "a", enter, make_lock(client, "a", timeout=20, min_replicas=1))
        assert held.extend()
    assert waiter.result(30)
    assert not client.exists(key_of("a"))


@pytest.mark.parametrize("make", [Lock, partial(Semaphore, limit=2)], ids=["lock", "semaphore"])
@pytest.mark.parametrize("id", [None, "mine"])
def test_with_too_few_replicas_the_lock_is_given_back_and_the_error_says_how_many(client, replica, id, make):
    replica.pause()
    with pytest.raises(LockBackendError, match=TOO_FEW) as failure:
        make(client, "a", min_replicas=1, id=id).acquire()
    assert not failure.value.refused
    wait_until(lambda: not client.keys("*:lock:*"))
    with pytest.raises(LockBackendError, match="1 of 2 replicas"):
        replica.resume()
        make(client, "a", min_replicas=2, id=id).acquire()
    wait_until(lambda: not client.keys("*:lock:*"))
    assert make(client, "a", min_replicas=1).acquire(blocking=False)


async def test_tasks_give_it_back_too_and_do_not_stand_in_the_way_of_others(client, replica):
    replica.pause()
    acquiring = asyncio.create_task(AsyncLock(client, "a", min_replicas=1).acquire())
    await asyncio.to_thread(wait_until, lambda: client.exists(key_of("a")))
    assert (await AsyncLock(client, "a", min_replicas=1).owner()).id
    assert not acquiring.done()
    with pytest.raises(LockBackendError, match=TOO_FEW):
        await acquiring
    await asyncio.to_thread(wait_until, lambda: not client.exists(key_of("a")))


def test_a_grant_whose_confirmation_stayed_away_is_given_back(make_lock, servers, client, replica):
    primary = servers[0]
    with primary.client(socket_timeout=1) as hasty:
        replica.pause()
        acquiring = begin(make_lock(hasty, "a", min_replicas=1).acquire)
        wait_until(lambda: client.exists(key_of("a")), message="it is granted, and WAIT waits")
        primary.pause()
        with pytest.raises(LockBackendError, match="TimeoutError"):
            acquiring.result(30)
        primary.resume()
    wait_until(lambda: not client.exists(key_of("a")), timeout=10, message="nobody holds it")


def test_a_crowd_of_tasks_does_not_stand_in_line_for_a_silent_server(servers, replica):
    primary = servers[0]

    async def main(client):
        locks = [AsyncLock(client, f"n{number}", min_replicas=1, timeout=0.1) for number in range(100)]
        await acquire_and_release(AsyncLock(client, "n"))  # so that the script is known
        primary.pause()
        results = await asyncio.gather(*[lock.acquire() for lock in locks], return_exceptions=True)
        # A few get the connection that another one gave up.
        assert sum("no connection was free" in str(each) for each in results) >= len(locks) - 2 * MAX_CONNECTIONS

    with primary.client(socket_timeout=0.5) as hasty:
        try:
            asyncio.run(main(hasty))
        finally:
            primary.resume()


def test_that_a_lock_is_held_needs_no_confirmation(client, replica):
    with Lock(client, "a"):
        replica.pause()
        assert not Lock(client, "a", min_replicas=1).acquire(blocking=False)


def test_an_id_that_holds_the_lock_already_keeps_it(client, replica):
    held = Lock(client, "a", id="mine", min_replicas=1)
    held.acquire()
    replica.pause()
    with pytest.raises(LockBackendError, match=TOO_FEW):
        Lock(client, "a", id="mine", min_replicas=1).acquire()
    assert held.owned()
    with pytest.raises(LockBackendError, match=TOO_FEW):
        held.extend()
    replica.resume()
    held.release()


def test_a_renewal_that_no_replica_confirms_ends_at_the_deadline_although_the_primary_answers(client, replica):
    lost = []
    held = Lock(client, "a", expire=1.5, min_replicas=1, on_lost=lost.append)
    plain = Lock(client, "b", expire=1.5)
    held.acquire()
    plain.acquire()
    replica.pause()
    wait_until(lambda: lost, message="the loss is reported")
    assert held.lost.code == "no_answer"
    assert "confirmed no renewal" in held.lost.reason
    with pytest.raises(LockLost):
        held.release()
    assert plain.owned(), "without the option, the primary's word counts"
    plain.release()


def test_a_renewal_that_is_confirmed_late_keeps_the_lock(client, replica, caplog):
    held = Lock(client, "a", expire=6, min_replicas=1)
    held.acquire()
    replica.pause()
    wait_until(lambda: "0 of 1 replicas" in caplog.text, message="the renewal failed")
    replica.resume()
    (lease,) = held._leases.values()
    deadline = lease.deadline
    wait_until(lambda: lease.deadline > deadline, message="it was renewed")
    assert held.lost is None
    held.release()


def test_an_extension_that_no_replica_confirmed_ends_with_the_release(client, replica):
    held = Lock(client, "a", expire=2, auto_renewal=False, min_replicas=1)
    held.acquire()
    replica.pause()
    with pytest.raises(LockBackendError, match=TOO_FEW):
        held.extend(60)
    wait_until(lambda: held.lost, message="its holder may not rely on the primary alone")
    assert client.pttl(key_of("a")) > 10_000
    with pytest.raises(LockLost):
        held.release()
    assert not client.exists(key_of("a"))


async def test_a_script_that_the_server_does_not_know_is_sent_with_its_text(client):
    held = RLock(client, "a", expire=1.5, min_replicas=1)
    client.script_flush()
    with held, held:
        client.script_flush()
        (lease,) = held._leases.values()
        deadline = lease.deadline
        wait_until(lambda: lease.deadline > deadline, message="it was renewed")

    client.script_flush()
    async with AsyncLock(client, "a", min_replicas=1):
        pass


def test_locks_of_equal_clients_and_numbers_share_a_server_of_their_own(client, servers):
    with servers[0].client() as other:
        one, two = Lock(client, "a", min_replicas=1), Lock(other, "b", min_replicas=1)
        assert one._server is two._server
        assert one._server is not server_of(client)
        assert replicated(server_of(client), 2) is not one._server
        assert Lock(client, "a", min_replicas=0)._server is server_of(client)


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (101, ValueError), ("1", TypeError), (True, TypeError)])
def test_a_wrong_number_is_an_error_that_names_the_argument(client, value, error):
    with pytest.raises(error, match="min_replicas"):
        Lock(client, "a", min_replicas=value)
