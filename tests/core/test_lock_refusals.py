"""A server that refuses commands: each is a typed error, and nothing is half taken."""

from __future__ import annotations

import threading

import pytest
import redis

from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError
from tests.support import lived, wait_until, within

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (("config", "set", "maxmemory", "1"), "OutOfMemory"),
        (("replicaof", "127.0.0.1", "1"), "READONLY"),
        (("acl", "setuser", "default", "-evalsha", "-eval"), "permissions"),
        (("acl", "setuser", "default", "resetkeys", "~other:*"), "permissions"),
    ],
    ids=["OOM", "READONLY", "no EVAL", "no keys"],
)
def test_a_refusing_server_is_a_typed_error_and_nothing_is_half_taken(make_lock, own_server, fault, cause):
    with own_server.client() as client:
        if "permissions" in cause:
            client.acl_setuser(
                "admin", enabled=True, passwords=["+x"], categories=["+@all"], keys=["*"], channels=["*"]
            )
        client.config_set("replica-serve-stale-data", "yes")
        if fault[0] == "replicaof":
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
        else:
            client.execute_command(*fault)
        lock = make_lock(client, "a")
        with within(1), pytest.raises(LockBackendError, match=cause):
            lock.acquire(timeout=0.2)
        if "permissions" not in cause:
            client.config_set("maxmemory", "0")
            client.execute_command("REPLICAOF", "NO", "ONE")
            assert not client.exists(*lock_keys("redislock", "a")[:4])
            with lock:
                pass


def test_a_refused_renewal_is_unknown_until_it_works_again(make_lock, own_server, caplog):
    with own_server.client() as client:
        lock = make_lock(client, "a", expire=3)
        with lock:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            wait_until(lambda: "is tried again" in caplog.text)
            client.execute_command("REPLICAOF", "NO", "ONE")
            lived(3.5)
            assert lock.owned()


def test_a_busy_server_is_a_typed_error(make_lock, own_server):
    with own_server.client(socket_timeout=30) as client, own_server.client() as other:
        client.config_set("busy-reply-threshold", "50")

        def block():
            with pytest.raises(redis.RedisError):
                client.eval("while true do end", 0)

        blocker = threading.Thread(target=block)
        blocker.start()

        def busy():
            try:
                other.ping()
            except redis.ResponseError as error:
                return "BUSY" in str(error)
            return False

        wait_until(busy)
        with pytest.raises(LockBackendError, match="BUSY"):
            make_lock(other, "a").acquire(timeout=0.2)
        other.script_kill()
        blocker.join(timeout=10)
        with make_lock(other, "a", timeout=5):
            pass


def test_too_many_clients_is_a_typed_error(make_lock, own_server):
    with own_server.client() as client:
        client.ping()
        client.config_set("maxclients", "1")
        with within(3), pytest.raises(LockBackendError, match="max number of clients"):
            make_lock(client, "a").acquire(timeout=0.5)
        client.config_set("maxclients", "100")
        with make_lock(client, "a", timeout=5):
            pass
