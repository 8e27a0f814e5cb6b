"""One address whose server becomes a replica while its connections stay open: a managed failover, a moving IP, DNS."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import redis

from django_redislock.core import Lock
from django_redislock.core.driver.async_server import async_server_of
from django_redislock.core.driver.effects import Pipeline, ScriptBatch, ScriptCall
from django_redislock.core.driver.registry import server_of
from django_redislock.core.driver.resp import NotPrimary, Replies
from django_redislock.core.lease import Lease
from django_redislock.core.operations import release_call, renew_call
from django_redislock.exceptions import LockBackendError, LockLost
from tests.support import (
    Proxy,
    RedisServer,
    begin,
    command_counts,
    counting,
    enter,
    lived,
    queued,
    wait_until,
    wait_until_renewed,
)

pytestmark = pytest.mark.processes


class Address(Proxy):
    """An address of two servers, of which one is the primary."""

    def __init__(self, primary, replica):
        super().__init__(primary.url)
        self.primary, self.replica = primary, replica

    def demote(self):
        """Let the other server be the primary and this one its replica; the address leads to this one still."""
        self.primary, self.replica = self.replica, self.primary
        with self.primary.client() as promoted, self.replica.client() as demoted:
            wait_until(lambda: offset(promoted) == offset(demoted), message="the replica has all that was written")
            promoted.replicaof("no", "one")
            demoted.replicaof("127.0.0.1", self.primary.port)
            wait_until(lambda: demoted.info("replication")["master_link_status"] == "up")

    def move(self):
        """Lead new connections to the primary."""
        self.lead_new_to(self.primary.url)


def offset(client):
    """Return how much of the stream of writes the server has."""
    found = client.info("replication")
    return found["master_repl_offset" if found["role"] == "master" else "slave_repl_offset"]


@pytest.fixture(scope="module")
def servers():
    with RedisServer() as one, RedisServer(replicaof=f"127.0.0.1 {one.port}") as other:
        yield one, other


@pytest.fixture
def address(servers):
    primary, replica = servers
    with primary.client() as on_primary, replica.client() as on_replica:
        on_primary.replicaof("no", "one")
        on_primary.flushdb()
        on_replica.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: on_replica.info("replication")["master_link_status"] == "up")
    with Address(primary, replica) as address:
        yield address


@pytest.fixture
def client(address):
    with redis.Redis.from_url(address.url, socket_timeout=2) as client:
        yield client


def subscribers(server):
    with server.client() as client:
        return len(client.pubsub_channels("redislock:wake:*"))


def subscriptions(server):
    """How often somebody subscribed there."""
    with server.client() as client:
        return command_counts(client)["subscribe"]


def test_locks_are_acquired_and_released_and_kept_when_the_address_has_moved(make_lock, address, client):
    lost = []
    held, other = (make_lock(client, name, expire=30, on_lost=lost.append) for name in ("held", "other"))
    held.acquire()
    other.acquire()
    wait_until_renewed(held)  # over the connection that leads to the other server later
    address.demote()
    address.move()
    other.release()
    for number in range(5):
        with make_lock(client, f"a{number}", timeout=2):
            pass
    assert make_lock(client, "b").acquire(blocking=False)
    wait_until_renewed(held)
    assert held.owned()
    held.release()
    assert not lost


class Script:
    """Writes, as all that take or free a lock do."""

    text = b"return redis.call('SET', KEYS[1], '1', 'PX', '1000')"
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()


WRITE = ScriptCall(Script, (b"{redislock:0}:x",), ()).with_text()
READ = (b"GET", b"{redislock:0}:x")


CALLS = {
    "a script": lambda server: server.call(WRITE),
    "many scripts": lambda server: server.call(ScriptBatch((WRITE, WRITE))),
    "commands": lambda server: server.call(Pipeline(((b"SET", b"{redislock:0}:x", b"1"), READ))),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_kind_of_call_gives_up_the_connection_and_works_the_next_time(address, client, call):
    server = server_of(client)
    call(server)
    address.demote()
    address.move()
    with pytest.raises(NotPrimary):
        call(server)
    call(server)


def test_a_connection_that_was_in_use_meanwhile_is_not_used_again(address, client):
    server = server_of(client)
    server.call(WRITE)
    in_use = server.pool.take()
    (other := server.pool.wait()).execute(WRITE)
    server.pool.give_back(other)
    address.demote()
    address.move()
    with pytest.raises(NotPrimary):
        server.call(WRITE)
    server.pool.give_back(in_use)
    server.call(WRITE)


def test_waiters_listen_at_the_new_primary(make_lock, address, client):
    with address.primary.client() as before:
        for name in "ab":
            Lock(before, name, id=f"holder-{name}", expire=60).acquire()
    waiters = [begin(enter, make_lock(client, name, timeout=30)) for name in "aab"]
    with address.primary.client() as at_primary:
        wait_until(lambda: (queued(at_primary, "a"), queued(at_primary, "b")) == (2, 1))
    address.demote()
    before = subscriptions(address.replica)
    lived(1.2)  # they have seen it, and find no primary
    address.move()
    wait_until(lambda: subscribers(address.primary) == 1)
    assert subscribers(address.replica) == 0
    assert subscriptions(address.replica) == before
    with address.primary.client() as after:
        wait_until(lambda: (queued(after, "a"), queued(after, "b")) == (2, 1))
        for name in "ab":
            Lock(after, name, id=f"holder-{name}").release()
    assert all(waiter.result(20) for waiter in waiters)


def test_an_address_that_leads_to_a_replica_for_good_is_a_clear_error_after_the_retry_time(
    make_lock, address, client, monkeypatch
):
    monkeypatch.setattr(Lease, "retry_for", 0.5)
    address.demote()
    reason = "NotPrimary: READONLY You can't write against a read only replica"
    with address.replica.client() as there:
        with counting(there) as counts, pytest.raises(LockBackendError, match=reason):
            make_lock(client, "a").acquire()
        assert counts["evalsha"] + counts["eval"] >= 3, "it was tried again"


def test_a_primary_without_enough_replicas_is_asked_for_anew(address, client):
    with address.primary.client() as cut_off:
        lock = Lock(client, "a")
        lock.acquire()
        cut_off.config_set("min-replicas-to-write", 3)
        try:
            with pytest.raises(LockBackendError, match="NOREPLICAS"):
                Lock(client, "b").acquire(blocking=False)
            address.demote()
            address.move()
            lock.release()
            assert Lock(client, "b").acquire(blocking=False)
        finally:
            cut_off.config_set("min-replicas-to-write", 0)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("READONLY You can't write against a read only replica.", True),
        ("READONLY You can't write against a read only replica. script: 67ed14c1, on @user_script:1.", True),
        ("ERR Error running script (call to f_67ed): @user_script:5: @user_script: 5: -READONLY You can't.", True),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", True),
        ("NOREPLICAS Not enough good replicas to write. script: 67ed14c1, on @user_script:1.", True),
        ("LOADING Redis is loading the dataset in memory", True),
        ("ERR READONLY You can't", False),
        ("WRONGTYPE Operation -READONLY ", False),
        ("READONLYX a", False),
    ],
)
def test_what_servers_say_that_are_no_primary_is_known(line, told):
    replies = Replies()
    replies.add(b"-%b\r\n" % line.encode())
    reply = replies.next()
    assert isinstance(reply, redis.RedisError)
    assert isinstance(reply, NotPrimary) is told
    assert str(reply) == (line if told else line.removeprefix("ERR "))


# asyncio


async def test_of_the_requests_of_a_loop_only_those_that_write_are_refused(address, client):
    server = async_server_of(server_of(client))
    await server.call(WRITE)
    line = server._commands.connection
    await asyncio.to_thread(address.demote)
    address.move()
    read, refused, also_read = await asyncio.gather(
        server.call(Pipeline((READ,))), server.call(WRITE), server.call(Pipeline((READ,))), return_exceptions=True
    )
    assert (read, also_read) == ([b"1"], [b"1"])
    assert isinstance(refused, NotPrimary)
    assert server._commands.connection is None
    await line.lost
    with pytest.raises(NotPrimary):  # several commands are one request
        await server.call(WRITE)
        await asyncio.to_thread(address.demote)
        address.move()
        await server.call(Pipeline((READ, (b"SET", b"{redislock:0}:x", b"1"))))
    assert await server.call(WRITE) == b"OK"


def test_a_replica_that_lacks_the_lock_is_not_believed():
    """Its answer would be a loss that never happened: the primary has the lock."""
    with RedisServer() as server, server.client() as client:
        lock = Lock(client, "a", expire=30)
        assert lock.acquire()
        lease = lock._lease_of(lock._acquirer())
        client.delete(lock._keys.lock)  # as if the write had not arrived here
        client.replicaof("127.0.0.1", 1)
        driver = server_of(client)
        for call in (release_call(lease), renew_call([lease])):
            with pytest.raises(NotPrimary):
                driver.call(call.with_text())
        client.replicaof("no", "one")
        for call, reply in ((release_call(lease), 0), (renew_call([lease]), [0])):
            assert driver.call(call.with_text()) == reply
        with pytest.raises(LockLost):
            lock.release()
