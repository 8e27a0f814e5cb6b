"""A server that refuses commands: each is a typed error, and nothing is half taken."""

from __future__ import annotations

import pytest
import redis

from django_redislock.core import scripts
from django_redislock.core.clock import monotonic
from django_redislock.core.driver.effects import ScriptBatch, ScriptCall, with_retries_each
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError
from tests.support import ON_A_CLUSTER, begin, lived, servers_of, wait_until, within

pytestmark = pytest.mark.processes


FAULTS = {
    "OOM": (("config", "set", "maxmemory", "1"), "OutOfMemory"),
    "no EVAL": (("acl", "setuser", "default", "-evalsha", "-eval"), "permissions"),
    "no keys": (("acl", "setuser", "default", "resetkeys", "~other:*"), "permissions"),
}
if not ON_A_CLUSTER:  # a replica there sends its clients to the primary
    FAULTS["READONLY"] = (("replicaof", "127.0.0.1", "1"), "READONLY")


@pytest.mark.parametrize(("fault", "cause"), FAULTS.values(), ids=FAULTS)
def test_a_refusing_server_is_a_typed_error_and_nothing_is_half_taken(make_lock, own_server, fault, cause):
    with own_server.client() as client:
        [server] = servers_of(client)
        server.config_set("replica-serve-stale-data", "yes")
        server.execute_command(*fault)
        lock = make_lock(client, "a")
        with within(1), pytest.raises(LockBackendError, match=cause):
            lock.acquire(timeout=0.2)
        if "permissions" not in cause:
            server.config_set("maxmemory", "0")
            if cause == "READONLY":
                server.execute_command("REPLICAOF", "NO", "ONE")
            assert not client.exists(*lock_keys("redislock", "a")[:4])
            with lock:
                pass


def test_a_refused_renewal_is_unknown_until_it_works_again(make_lock, own_server, caplog):
    refuse, serve = ("acl setuser default -evalsha", "acl setuser default +evalsha")
    if not ON_A_CLUSTER:
        refuse, serve = ("replicaof 127.0.0.1 1", "replicaof no one")
    with own_server.client() as client:
        [server] = servers_of(client)
        lock = make_lock(client, "a", expire=1.5)
        with lock:
            server.execute_command(*refuse.split())
            wait_until(lambda: "is tried again" in caplog.text)
            server.execute_command(*serve.split())
            lived(1.8)
            assert lock.owned()


def test_many_calls_are_not_repeated_after_an_error_that_only_other_settings_cure(client):
    server = server_of(client)
    call = ScriptCall(scripts.READ, (b"{a}:lock", b"{a}:queue"), ())
    calls = with_retries_each("a", [call], monotonic() + 60, server)
    assert isinstance(next(calls), ScriptBatch)
    with pytest.raises(StopIteration) as result:
        calls.throw(redis.ConnectionError("certificate verify failed: CERTIFICATE_VERIFY_FAILED"))
    [failure] = result.value.value
    assert "ssl_ca_certs" in failure.cause


def test_a_busy_server_is_a_typed_error(make_lock, own_server):
    with own_server.client(socket_timeout=30) as client, own_server.client() as other:
        servers_of(client)[0].config_set("busy-reply-threshold", "50")

        blocker = begin(client.eval, "while true do end", 0)

        def busy():
            try:
                servers_of(other)[0].ping()
            except redis.ResponseError as error:
                return "BUSY" in str(error)
            return False

        wait_until(busy)
        with pytest.raises(LockBackendError, match="BUSY"):
            make_lock(other, "a").acquire(timeout=0.2)
        servers_of(other)[0].script_kill()
        with pytest.raises(redis.RedisError):
            blocker.result(10)
        with make_lock(other, "a", timeout=5):
            pass


def test_too_many_clients_is_a_typed_error(make_lock, own_server):
    with own_server.client() as client:
        [server] = servers_of(client)
        server.config_set("maxclients", "1")
        with within(3), pytest.raises(LockBackendError, match="max number of clients"):
            make_lock(client, "a").acquire(timeout=0.5)
        server.config_set("maxclients", "100")
        with make_lock(client, "a", timeout=5):
            pass
