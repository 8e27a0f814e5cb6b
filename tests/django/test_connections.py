"""Connections are shared by clients of equal settings, and given back when nobody uses them or nobody could."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from functools import partial

import pytest
import redis
import redis.asyncio
from billiard.exceptions import SoftTimeLimitExceeded
from django.test import override_settings
from redis.credentials import UsernamePasswordCredentialProvider
from redis.sentinel import Sentinel

from django_redislock import lock
from django_redislock.core import AsyncLock, Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.driver import idle
from django_redislock.core.driver.async_server import async_server_of
from django_redislock.core.driver.effects import Pipeline
from django_redislock.core.driver.registry import server_of
from tests.support import counting, in_a_fork, in_threads, lived, queued, wait_until

PING = Pipeline(((b"PING",),))
KEEPALIVE = {"socket_keepalive": True, "socket_keepalive_options": {4: 30}}


# Which clients share a server


class Password(UsernamePasswordCredentialProvider):
    """One that says when it is the same."""

    def __eq__(self, other):
        return isinstance(other, Password) and self.password == other.password

    def __hash__(self):
        return hash(self.password)


def primary(*ports, service="main", is_master=True, **options):
    sentinel = Sentinel([("127.0.0.1", port) for port in ports], socket_timeout=5)
    return (sentinel.master_for if is_master else sentinel.slave_for)(service, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: redis.Redis(**KEEPALIVE),
        lambda: redis.asyncio.Redis(**KEEPALIVE),
        lambda: redis.Redis(ssl=True, ssl_exclude_verify_flags=[], port=1),
        lambda: redis.Redis(credential_provider=Password(password="x")),
        lambda: primary(1, 2),
        lambda: primary(1, db=3, is_master=False),
    ],
    ids=["dict", "dict, asyncio", "list", "comparable object", "primary of a Sentinel", "replica of a Sentinel"],
)
def test_clients_made_anew_with_equal_settings_share_a_server(make):
    one, other = make(), make()
    assert one.connection_pool is not other.connection_pool
    assert server_of(one) is server_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: redis.Redis(**KEEPALIVE), lambda: redis.Redis(**KEEPALIVE | {"socket_keepalive_options": {4: 31}})),
        (lambda: redis.Redis(password="1"), lambda: redis.Redis(password=b"1")),
        (
            lambda: redis.Redis(credential_provider=Password(password="x")),
            lambda: redis.Redis(credential_provider=Password(password="y")),
        ),
        (lambda: primary(1), lambda: primary(2)),
        (lambda: primary(1), lambda: primary(1, service="other")),
        (lambda: primary(1), lambda: primary(1, db=1)),
        (lambda: primary(1), lambda: primary(1, is_master=False)),
    ],
    ids=["dict", "type", "object", "sentinels", "service", "database", "role"],
)
def test_clients_of_different_settings_do_not(one, other):
    first, second = one(), other()
    assert server_of(first) is not server_of(second)


# A server whose clients are gone


def connections(client):
    """How many connections the server has, without this client's own."""
    return len(client.client_list()) - 1


@pytest.fixture
def watcher(own_server):
    own_server.client().config_set("requirepass", "x")
    with own_server.client(password="x") as client:
        client.ping()
        yield client


def provided(own_server, kind=redis.Redis):
    """A client whose settings equal nobody else's."""
    return kind.from_url(own_server.url, credential_provider=UsernamePasswordCredentialProvider(password="x"))


def links_of(server, number):
    """Lend as many connections of the server, each of which has been used."""
    links = [server.pool.wait() for _ in range(number)]
    for link in links:
        link.execute(PING)
    return links


def subscribes(client, watcher):
    """Wait for the lock for a moment; return whether that took a connection: it ends before, if it begins late."""
    assert not Lock(client, "a").acquire(timeout=0.05)
    return connections(watcher) >= 2


def test_connections_close_when_the_client_is_gone(own_server, watcher):
    for _ in range(3):
        with provided(own_server) as client, Lock(client, "a"):
            pass
        with provided(own_server) as client, Lock(client, "a", auto_renewal=False) as held:
            wait_until(partial(subscribes, client, watcher))
        del client, held
        gc.collect()
        wait_until(lambda: connections(watcher) == 0)


def test_connections_of_a_loop_that_goes_on_close_when_the_client_is_gone(own_server, watcher):
    async def main():
        for kind in (redis.asyncio.Redis, redis.Redis):
            client = provided(own_server, kind)
            async with AsyncLock(client, "a") as held:
                waiting = asyncio.create_task(AsyncLock(client, "a").acquire())
                await asyncio.to_thread(wait_until, lambda: connections(watcher) >= 2)
                waiting.cancel()
                await asyncio.wait([waiting])
            del client, held, waiting
            gc.collect()
            await asyncio.to_thread(wait_until, lambda: connections(watcher) == 0)

    asyncio.run(main())


def test_a_held_lock_keeps_its_connections_when_the_client_is_gone(own_server, watcher):
    gc.collect()
    client = provided(own_server)
    held = Lock(client, "a", expire=1)
    held.acquire()
    client.close()
    del client
    # Only what is young: among the objects of all tests it keeps the GIL for ten seconds on a busy machine.
    gc.collect(1)
    lived(1.2)
    assert held.owned()
    held.release()


def test_settings_that_a_test_overrode_leave_no_connection(own_server):
    with own_server.client() as watcher:
        for backend in ("django_redis.cache.RedisCache", "django.core.cache.backends.redis.RedisCache"):
            caches = {"default": {"BACKEND": backend, "LOCATION": own_server.url}}
            with override_settings(CACHES=caches, DJANGO_REDISLOCK={}), lock("a", auto_renewal=False):
                # Again and again, because a wait that begins after its timeout does not subscribe.
                wait_until(lambda: not lock("a").acquire(timeout=0.05) and connections(watcher) >= 2)
            wait_until(lambda: connections(watcher) == 0)
        with override_settings(DJANGO_REDISLOCK={"URL": own_server.url}), lock("a", auto_renewal=False):
            assert connections(watcher) == 1
        wait_until(lambda: connections(watcher) == 0)


# Connections that nobody uses


@pytest.fixture
def short_minute(monkeypatch):
    """A minute lasts for half a second."""
    monkeypatch.setattr(idle, "IDLE", 0.5)
    monkeypatch.setattr(idle, "housekeeper", idle.Housekeeper())


def burst(client):
    """Have many threads call at the same time."""
    server = server_of(client)
    together = threading.Barrier(40)

    def work(number):
        together.wait()
        for _ in range(5):
            server.call(PING)

    for link in links_of(server, 8):
        server._give_back(link)
    in_threads(40, work)


def housekeepers():
    return {thread for thread in threading.enumerate() if thread.name == "redislock-idle"}


def test_after_a_burst_of_threads_one_connection_remains(own_server, short_minute):
    before = housekeepers()
    with own_server.client() as watcher, own_server.client() as client:
        for _ in range(2):
            burst(client)
            assert connections(watcher) >= 8
            wait_until(lambda: connections(watcher) == 1)
            wait_until(lambda: not housekeepers() - before, message="no thread is left either")
            server_of(client).call(PING)
            assert connections(watcher) == 1


def test_a_connection_that_is_used_stays(own_server, short_minute):
    with own_server.client() as watcher, own_server.client() as client:
        server = server_of(client)
        burst(client)
        in_use = server.pool.take()
        ids = {entry["id"] for entry in watcher.client_list()}
        wait_until(lambda: connections(watcher) == 2)
        used = in_use.redis_connection._sock
        server._give_back(in_use)
        server.call(PING)
        assert in_use.redis_connection._sock is used
        assert {entry["id"] for entry in watcher.client_list()} <= ids
        wait_until(lambda: connections(watcher) == 1)


def test_what_was_used_within_the_minute_stays(own_server):
    with own_server.client() as watcher, own_server.client() as client:
        server = server_of(client)
        links = links_of(server, 3)
        server._give_back(links[0])
        before = monotonic()
        server._give_back(links[1])
        server._give_back(links[2])
        assert server.close_idle(before) == links[1].idle_since
        wait_until(lambda: connections(watcher) == 2)
        assert not links[0].open


def test_the_subscription_closes_when_nobody_has_waited_for_a_minute(own_server, short_minute):
    with own_server.client() as watcher, own_server.client() as client:
        held = Lock(client, "a", expire=60, auto_renewal=False)
        held.acquire()
        for _ in range(2):
            assert not Lock(client, "a").acquire(timeout=1.2)
            assert server_of(client).room.open, "it was needed all the time"
            assert watcher.pubsub_channels()
            wait_until(lambda: not watcher.pubsub_channels())
            assert connections(watcher) == 1
        thread = threading.Thread(target=Lock(client, "a").acquire)
        thread.start()
        wait_until(lambda: queued(watcher, "a"))
        held.release()
        thread.join(20)
        assert not thread.is_alive()


def test_the_subscription_of_a_loop_closes_when_nobody_has_waited_for_a_minute(own_server, short_minute):
    async def main(watcher, client):
        held = AsyncLock(client, "a", expire=60, auto_renewal=False)
        await held.acquire()
        server = async_server_of(server_of(client))
        for _ in range(2):
            assert not await AsyncLock(client, "a").acquire(timeout=1.2)
            assert server.room.open, "it was needed all the time"
            server.room._close_idle()  # as the timer that an earlier wait began
            assert server.room.open, "the minute counts from the last wait"
            await asyncio.to_thread(wait_until, lambda: not watcher.pubsub_channels())
            assert connections(watcher) == 1
        task = asyncio.create_task(AsyncLock(client, "a").acquire())
        await asyncio.to_thread(wait_until, lambda: queued(watcher, "a"))
        await held.release()
        assert await task

    with own_server.client() as watcher, own_server.client() as client:
        asyncio.run(main(watcher, client))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_closes_its_own_connections(own_server, short_minute):
    with own_server.client() as watcher, own_server.client() as client:
        burst(client)
        of_parent = connections(watcher)
        assert server_of(client).watched

        def child():
            with own_server.client() as mine, own_server.client() as watching:
                burst(mine)
                burst(client)
                wait_until(lambda: len(watching.client_list(_type="normal")) == 1 + 1 + 1 + 1)

        in_a_fork(child)
        assert of_parent >= 8
        wait_until(lambda: connections(watcher) == 1)


def test_without_a_further_thread_calls_go_on_and_the_next_one_tries_again(own_server, short_minute, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with own_server.client() as watcher, own_server.client() as client:
        server = server_of(client)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for link in links_of(server, 3):
                server._give_back(link)
        assert connections(watcher) == 3
        server.call(PING)
        wait_until(lambda: connections(watcher) == 1)


GREENLETS = """
{patch}
import sys, threading, time
import redis
from django_redislock.core import Lock
from django_redislock.core.driver import idle

idle.IDLE = 0.3
client = redis.Redis.from_url(sys.argv[1])
watcher = redis.Redis.from_url(sys.argv[1], client_name="watcher")

def connections():
    return sum(entry["name"] != "watcher" for entry in watcher.client_list())

def work(number):
    with Lock(client, str(number % 5), auto_renewal=False):
        time.sleep(0.01)

for _ in range(2):
    threads = [threading.Thread(target=work, args=(n,)) for n in range(40)]
    watcher.client_pause(60_000, all=False)  # or the first ones may give back their connections in time for the others
    for thread in threads:
        thread.start()
    while connections() < 3:
        time.sleep(0.01)
    watcher.client_unpause()
    for thread in threads:
        thread.join()
    end = time.monotonic() + 30
    while connections() > 1 and time.monotonic() < end:
        time.sleep(0.05)
    print(connections())
"""


@pytest.mark.parametrize(
    "patch",
    [
        "from gevent import monkey; monkey.patch_all()",
        "import warnings; warnings.simplefilter('ignore')\nimport eventlet; eventlet.monkey_patch()",
    ],
    ids=["gevent", "eventlet"],
)
def test_connections_of_greenlets_close_too(own_server, patch):
    run = subprocess.run(
        [sys.executable, "-c", GREENLETS.format(patch=patch), own_server.url],
        env=os.environ | {"PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("1\n" * 2, "")


class Interrupted:
    def __init__(self, *arguments):
        raise SoftTimeLimitExceeded


def test_a_soft_time_limit_while_a_backend_is_made_is_no_wrong_setting():
    caches = {"default": {"BACKEND": f"{__name__}.Interrupted"}}
    with override_settings(CACHES=caches), pytest.raises(SoftTimeLimitExceeded):
        lock("a")


def test_a_connection_of_ours_tells_no_name_since_that_takes_two_round_trips(client):
    connection = server_of(client).connection()
    try:
        with counting(client) as ran:
            connection.connect()
        assert ran["client|setinfo"] == 0
    finally:
        connection.close()
