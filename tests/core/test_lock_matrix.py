"""The lock through clients of every configuration: its own connections make them all alike."""

from __future__ import annotations

import pytest
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from django_redislock.core import Lock, held_locks
from django_redislock.core.keys import lock_keys
from django_redislock.core.lease import Lease
from django_redislock.exceptions import LockBackendError, LockLost
from tests.support import Proxy, RedisServer, begin, begin_to_wait, client_at, wait_until

KEYS = lock_keys("redislock", "a")

CONFIGURATIONS = [
    {"socket_timeout": timeout, "retry": retries, "protocol": protocol, "decode_responses": decoded}
    for timeout, retries, protocol, decoded in (
        (None, 0, 2, False),
        (None, 10, 3, True),
        (1, 0, 3, True),
        (1, 10, 2, False),
        (5, 0, 3, False),
        (5, 10, 2, True),
    )
]
"""Each pair of values once: the lock has connections of its own, and takes these settings for them one by one."""


@pytest.fixture(scope="module")
def shared():
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def shared_proxy(shared):
    with Proxy(shared.url) as proxy:
        yield proxy


@pytest.fixture
def direct(shared):
    """A plain client, to look at the server by and to do harm with."""
    with shared.client() as client:
        client.flushall()
        yield client


def connect(url, configuration):
    retry = Retry(ExponentialBackoff(), configuration["retry"])
    return client_at(url, **configuration | {"retry": retry})


@pytest.fixture(params=CONFIGURATIONS, ids=lambda configuration: "-".join(map(str, configuration.values())))
def configuration(request):
    return request.param


@pytest.fixture(params=["tcp", "unix"])
def client(request, configuration, shared, direct):
    with connect(shared.url if request.param == "tcp" else shared.unix_url, configuration) as client:
        yield client


@pytest.fixture
def behind(configuration, shared_proxy, direct):
    """A client behind the proxy."""
    with connect(shared_proxy.url, configuration) as client:
        yield client


def cut_all(direct):
    direct.client_kill_filter(_type="normal", skipme=True)
    direct.client_kill_filter(_type="pubsub")


def test_every_operation(client, direct):
    lock = Lock(client, "a", label="é")
    with lock:
        assert not Lock(client, "a").acquire(timeout=0.01)
        lock.extend(60)
        assert 55 < lock.ttl() <= 60
        assert lock.owned()
        assert lock.owner().label == "é"
        assert [info.name for info in held_locks(client)] == ["a"]
    assert lock.owner() is None
    with lock:
        assert Lock(client, "a").reset()
        with pytest.raises(LockLost):
            lock.extend()
        lock.acquire()
    assert not direct.exists(KEYS.lock, KEYS.queue)


def test_a_waiter_is_woken(client, direct):
    with Lock(client, "a", expire=60):
        waiter = begin_to_wait(direct, "a", Lock(client, "a").acquire, timeout=30)
    assert waiter.result(30)


def test_connections_and_scripts_that_go_away_are_not_noticed(client, direct):
    lock = Lock(client, "a", expire=60)
    lock.acquire()
    cut_all(direct)
    lock.extend()
    direct.script_flush()
    assert lock.owned()
    cut_all(direct)
    direct.script_flush()
    lock.release()
    assert lock.acquire(timeout=0)
    lock.release()
    assert not direct.exists(KEYS.lock)


def test_lost_replies_are_not_noticed(behind, shared_proxy, direct):
    lock = Lock(behind, "a", expire=60)

    def lose():
        shared_proxy.drop_next_reply(containing=b"EVAL")
        return shared_proxy.dropped + 1

    with lock:
        pass  # so that a connection is there, and one fault comes at a time
    for timeout in (0, 5):
        expected = lose()
        assert lock.acquire(timeout=timeout)
        assert shared_proxy.dropped == expected
        expected = lose()
        lock.extend()
        assert shared_proxy.dropped == expected
        assert lock.owned()
        expected = lose()
        lock.release()
        assert shared_proxy.dropped == expected
        assert not direct.exists(KEYS.lock)


@pytest.mark.processes
def test_a_server_that_loads_its_data_is_waited_for_or_a_typed_error(monkeypatch):
    monkeypatch.setattr(Lease, "retry_for", 60)  # a busy machine may load for longer than the usual 5 s
    slow = {"key_load_delay": "200", "loading_process_events_interval_bytes": "1024"}
    with RedisServer(enable_debug_command="yes") as server, server.client() as client:
        lock = Lock(client, "a", expire=600)
        lock.acquire()
        client.execute_command("DEBUG", "POPULATE", "6000", "cache")
        server.options |= slow
        client.save()
        server.kill()
        starting = begin(server.start)
        try:
            errors = []

            def loading():
                try:
                    Lock(client, "b").acquire(timeout=0)
                except LockBackendError as error:
                    errors.append(error.cause)
                return errors and "loading" in errors[-1]

            wait_until(loading)
            assert lock.owned(), "it waits until the data is there"
            lock.release()
        finally:
            starting.result(60)
