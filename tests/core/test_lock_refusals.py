"""A server that refuses commands: what passes in time is waited for, each is a typed error otherwise, and nothing is
half taken."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import pytest
import redis

from django_redislock.core import scripts
from django_redislock.core.clock import monotonic
from django_redislock.core.driver import effects
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
            lock.acquire(timeout=0.2)  # the caller's own time is over before that of RETRY_FOR
        if "permissions" not in cause:
            server.config_set("maxmemory", "0")
            if cause == "READONLY":
                server.execute_command("REPLICAOF", "NO", "ONE")
            assert not client.exists(*lock_keys("redislock", "a")[:4])
            with lock:
                pass


@contextmanager
def busy(server, client):
    client.config_set("busy-reply-threshold", "20")

    def is_busy():
        try:
            client.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)
        return False

    with server.client(socket_timeout=60) as other:
        script = begin(servers_of(other)[0].eval, "while true do end", 0)
        wait_until(is_busy)
        try:
            yield
        finally:
            client.script_kill()
            with suppress(redis.RedisError):
                script.result(10)


@contextmanager
def full(server, client):
    client.config_set("maxmemory", "1")
    yield
    client.config_set("maxmemory", "0")


@contextmanager
def unable_to_save(server, client):
    client.config_set("save", "3600 1")
    client.set("changed", "1")
    shutil.rmtree(server.directory)
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield
    client.config_set("stop-writes-on-bgsave-error", "no")


@contextmanager
def without_replicas(server, client):
    client.config_set("min-replicas-to-write", "1")
    yield
    client.config_set("min-replicas-to-write", "0")


@contextmanager
def silent(server, client):
    server.pause()
    yield
    server.resume()


REFUSING = {"BUSY": busy, "OOM": full, "MISCONF": unable_to_save, "NOREPLICAS": without_replicas}
SERVES_AGAIN = {"MISCONF": unable_to_save, "silent": silent}
"""The matrix has the others, and an answer in place of MISCONF."""


@pytest.mark.parametrize("fault", SERVES_AGAIN.values(), ids=SERVES_AGAIN)
def test_a_waiter_goes_on_when_the_server_serves_again(make_lock, own_server, refusals, monkeypatch, fault):
    monkeypatch.setattr(effects, "RETRY_FOR", 20.0)
    with own_server.client(socket_timeout=0.3) as client, own_server.client() as other:
        with make_lock(client, "a"):
            pass  # the server knows the scripts
        with fault(own_server, servers_of(other)[0]):
            waiter = begin(make_lock(client, "a").acquire, timeout=30)
            wait_until(lambda: len(refusals) >= 3 or waiter.done())
        assert waiter.result(30)


@pytest.mark.parametrize("fault", SERVES_AGAIN.values(), ids=SERVES_AGAIN)
def test_a_block_that_ends_while_the_server_refuses_raises_nothing_and_leaves_no_lock(
    make_lock, own_server, refusals, monkeypatch, fault
):
    monkeypatch.setattr(effects, "RETRY_FOR", 20.0)
    with own_server.client(socket_timeout=0.3) as client, own_server.client() as other:
        lock = make_lock(client, "a", expire=600)

        def hold():
            with lock:
                entered.set_result(None)
                ends.result(30)

        entered, ends = Future(), Future()
        holder = begin(hold)
        entered.result(10)
        with fault(own_server, servers_of(other)[0]):
            ends.set_result(None)
            wait_until(lambda: len(refusals) >= 3 or holder.done())
        holder.result(30)
        assert not lock.locked()


@pytest.mark.parametrize("fault", REFUSING.values(), ids=REFUSING)
def test_what_does_not_pass_within_retry_for_is_a_typed_error(make_lock, own_server, refusals, monkeypatch, fault):
    monkeypatch.setattr(effects, "RETRY_FOR", 0.5)
    with own_server.client() as client, own_server.client() as other:
        with make_lock(client, "a"):
            pass
        with fault(own_server, servers_of(other)[0]):
            with pytest.raises(LockBackendError) as failed:
                make_lock(client, "a").acquire(timeout=60)
            assert failed.value.refused or "NOREPLICAS" in str(failed.value)
            assert len(refusals) > 2


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
    calls = with_retries_each("a", [call, call], monotonic() + 60, [server, server])
    assert isinstance(next(calls), ScriptBatch)
    with pytest.raises(StopIteration) as result:
        calls.throw(redis.ConnectionError("certificate verify failed: CERTIFICATE_VERIFY_FAILED"))
    for failure in result.value.value:
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
