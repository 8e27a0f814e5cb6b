"""AsyncLock with every client, server and connection: what it needs of them, and what it costs them."""

from __future__ import annotations

import asyncio
import subprocess
import time

import pytest
import redis
import redis.asyncio

from django_redislock import LockBackendError
from django_redislock.core import AsyncLock, Lock
from django_redislock.core.driver import async_connection, effects
from django_redislock.core.driver.async_server import async_server_of
from django_redislock.core.driver.registry import server_of
from django_redislock.core.driver.resp import encode_command
from django_redislock.core.keys import lock_keys
from django_redislock.doctor import inspect
from tests.support import (
    BUSY,
    RedisServer,
    acquire_and_release,
    async_client_at,
    find_program,
    free_port,
    key_of,
    until,
)


def certificate_of(directory):
    """Return a new key and a certificate of its own making for this machine."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = [find_program("openssl", package="openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*make, "-keyout", key, "-out", certificate, *names], check=True, capture_output=True)
    return key, certificate


def tls_server(tmp_path, tls_auth_clients="no"):
    """Return a server with a certificate, its port and the certificate."""
    program, port = find_program("redis-server", package="redis-server"), free_port()
    key, certificate = certificate_of(tmp_path)
    options = {"tls_cert_file": certificate, "tls_key_file": key, "tls_ca_cert_file": certificate}
    return RedisServer(program, tls_port=str(port), tls_auth_clients=tls_auth_clients, **options), port, certificate


def test_a_certificate_of_an_unknown_ca_is_an_error_at_once_that_says_what_to_do(tmp_path):
    server, port, _ = tls_server(tmp_path)
    with server, redis.Redis(host="127.0.0.1", port=port, ssl=True) as client:
        for acquire in (Lock(client, "a").acquire, lambda: asyncio.run(AsyncLock(client, "a").acquire())):
            with pytest.raises(LockBackendError, match=r"Give the CA .* as ssl_ca_certs"):
                acquire()
        (finding,) = inspect(server_of(client))
        assert "ssl_ca_certs" in finding.advice


@pytest.mark.parametrize("kind", [redis.Redis, redis.asyncio.Redis])
def test_tls_will_do(tmp_path, kind):
    server, port, certificate = tls_server(tmp_path)
    with server:
        client = kind(host="127.0.0.1", port=port, ssl=True, ssl_ca_certs=str(certificate))

        async def main():
            async with AsyncLock(client, "a") as lock:
                task = asyncio.create_task(acquire_and_release(AsyncLock(client, "a")))
                while not (await lock.owner()).waiting:
                    await asyncio.sleep(0.005)
                assert await lock.owned()
            assert await task
            server.pause()  # a server that does not take its leave keeps no loop from ending

        started = time.monotonic()
        asyncio.run(main())
        assert time.monotonic() - started < 10
        server.resume()
        if kind is redis.Redis:
            client.close()


@pytest.mark.processes
async def test_sentinel_is_asked_for_the_primary(sentinel):
    """Also when the primary became a replica while connections stay open: the next one goes where Sentinel says."""
    manager = redis.sentinel.Sentinel([("127.0.0.1", sentinel)], socket_timeout=5)
    primary = manager.master_for("main")
    asked = manager.sentinels[0]

    async with AsyncLock(primary, "a") as lock:
        assert await lock.owned()
    with RedisServer() as promoted, promoted.client() as client:
        primary.replicaof("127.0.0.1", promoted.port)
        asked.sentinel_remove("main")
        asked.sentinel_monitor("main", "127.0.0.1", promoted.port, 1)
        async with AsyncLock(primary, "a", timeout=4):
            assert client.exists(key_of("a"))
    primary.close()
    if hasattr(manager, "close"):  # redis-py 5.0 has none
        manager.close()


def test_a_client_without_a_counterpart_is_refused(redis_url):
    manager = redis.asyncio.Sentinel([("127.0.0.1", 1)])
    with pytest.raises(TypeError, match="the synchronous client of the same server"):
        AsyncLock(manager.master_for("main"), "a")

    class Special(redis.Connection):
        pass

    lock = AsyncLock(
        redis.Redis(connection_pool=redis.ConnectionPool.from_url(redis_url, connection_class=Special)), "a"
    )
    with pytest.raises(TypeError, match="no counterpart for asyncio"):
        asyncio.run(lock.acquire())


def test_a_function_that_prepares_connections_of_one_kind_is_not_called_for_those_of_the_other(redis_url):
    """Not awaited, it sent neither the password nor the number of the database: there the task had another lock."""

    async def prepare(connection):
        await connection.on_connect()

    with pytest.raises(TypeError, match=r"for connections of asyncio.* one of threads"):
        AsyncLock(redis.asyncio.from_url(redis_url, redis_connect_func=prepare), "a")
    with redis.Redis.from_url(redis_url, redis_connect_func=redis.Connection.on_connect) as for_threads:
        assert Lock(for_threads, "a").acquire(blocking=False)
        with pytest.raises(TypeError, match=r"for connections of threads.* one of asyncio.*credential_provider"):
            asyncio.run(AsyncLock(for_threads, "a").locked())


def test_without_asyncio_it_is_told_that_it_needs_it(aclient):
    """Under trio, say: it steps through coroutines as this does."""
    lock = AsyncLock(aclient, "a")
    for operation in (lock.acquire, lock.release, lock.extend, lock.owner, lock.locked, lock.reset, lock.__aenter__):
        coroutine = operation()
        with pytest.raises(RuntimeError, match=r"AsyncLock is for asyncio only.*trio"):
            coroutine.send(None)


def test_what_a_coroutine_function_is_tells():
    assert all(
        asyncio.iscoroutinefunction(getattr(AsyncLock, name))
        for name in ("acquire", "release", "extend", "owner", "locked", "owned", "ttl", "reset")
    )


KEYS = lock_keys("redislock", "a")


@pytest.mark.slow
async def test_a_connection_that_fell_silent_is_left_and_what_was_asked_on_it_is_undone(redis_url, client, monkeypatch):
    """The server does what it is told on that connection, but no answer comes."""
    monkeypatch.setattr(async_connection, "ANSWERED_WITHIN", 1.0)
    monkeypatch.setattr(effects, "retry_for", 0.0)
    aclient = async_client_at(redis_url, socket_timeout=1.5)

    async with AsyncLock(aclient, "a"):
        pass
    line = async_server_of(server_of(aclient))._commands.connection
    line.send_raw(encode_command(b"CLIENT", b"REPLY", b"OFF"))
    first = asyncio.create_task(AsyncLock(aclient, "a", expire=60).acquire())
    await until(lambda: client.exists(KEYS.lock))
    await asyncio.sleep(1)
    second = asyncio.create_task(AsyncLock(aclient, "b", expire=60).acquire())
    with pytest.raises(LockBackendError, match="no reply"):
        await first
    assert not second.done()
    async with asyncio.timeout(BUSY), AsyncLock(aclient, "c"):  # over another one
        pass
    with pytest.raises(LockBackendError, match="no reply"):
        await second
    await until(lambda: not client.exists(KEYS.lock, lock_keys("redislock", "b").lock), timeout=1 + BUSY)
    await asyncio.wait_for(asyncio.shield(line.lost), 1.5 + 1 + BUSY)
