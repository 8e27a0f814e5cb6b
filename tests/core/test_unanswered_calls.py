"""Calls that are given up while the server does not answer: what it grants later is given back at once."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest
import redis
from redis.credentials import UsernamePasswordCredentialProvider

from django_redislock.core import AsyncLock, Lock, held_locks
from django_redislock.core.driver import effects, idle
from django_redislock.exceptions import LockBackendError
from tests.support import BUSY, ClusterOfLocks, async_client_at, client_at, lived, queued, wait_until

pytestmark = pytest.mark.processes
MANY = 30
FOR_LONG = 600
"""An expiry that cannot end during a test."""


EXITS_AT_ONCE = """
import asyncio
from django_redislock.core import AsyncLock
from tests.support import async_client_at

async def main():
    aclient = async_client_at(args[0])
    async with AsyncLock(aclient, "warm"):
        pass
    tasks = [asyncio.create_task(AsyncLock(aclient, f"lock {i}", expire=600).acquire()) for i in range(60)]
    await asyncio.sleep(0)

asyncio.run(main())
"""


def nothing_is_held(client, *names):
    wait_until(
        lambda: not list(held_locks(client)) and not any(queued(client, name) for name in names),
        timeout=5 + BUSY,
        message=lambda: f"held: {[found.name for found in held_locks(client)]}",
    )


@pytest.mark.parametrize("held", [False, True], ids=["the locks are free", "one lock is held"])
def test_what_a_frozen_server_grants_to_tasks_that_timed_out_is_given_back(own_server, held):
    names = ["a"] * MANY if held else [f"lock {number}" for number in range(MANY)]

    async def main():
        aclient = async_client_at(own_server.url, socket_timeout=0.5)
        async with AsyncLock(aclient, "warm"):
            pass
        locks = [AsyncLock(aclient, name, expire=FOR_LONG) for name in names]
        own_server.pause()
        tasks = [asyncio.create_task(lock.acquire(blocking=held, timeout=60 if held else None)) for lock in locks]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {LockBackendError}
        own_server.resume()
        await asyncio.to_thread(nothing_is_held, client, *set(names) - {"a"})
        if held:
            await asyncio.to_thread(wait_until, lambda: not queued(client, "a"), 5 + BUSY)

    with own_server.client() as client:
        asyncio.run(main())


@pytest.mark.parametrize("frozen", [False, True], ids=["the server answers", "the server is frozen"])
def test_when_a_loop_ends_while_tasks_acquire_and_release_nothing_stays_held(own_server, frozen):
    async def hold(lock):
        async with lock:
            entered.append(lock)
            await asyncio.sleep(60)

    async def main():
        aclient = async_client_at(own_server.url, socket_timeout=60)
        holders = [asyncio.create_task(hold(AsyncLock(aclient, f"held {i}", expire=FOR_LONG))) for i in range(MANY)]
        tasks.extend(holders)
        while len(entered) < MANY:
            await asyncio.sleep(0.005)
        if frozen:
            own_server.pause()
        tasks.extend(asyncio.create_task(hold(AsyncLock(aclient, f"new {i}", expire=FOR_LONG))) for i in range(MANY))
        await asyncio.sleep(0)
        for holder in holders:
            holder.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # now they release; the end of the loop cancels them once more

    entered, tasks = [], []
    with own_server.client() as client:
        asyncio.run(main())
        own_server.resume()
        nothing_is_held(client)


def test_when_a_loop_ends_before_everything_was_sent_nothing_stays_held(own_server):
    async def main():
        aclient = async_client_at(f"unix://{own_server.unix_socket}", socket_timeout=60)
        async with AsyncLock(aclient, "warm"):
            pass
        own_server.pause()
        locks = [AsyncLock(aclient, f"lock {number}", expire=FOR_LONG, label="x" * 50_000) for number in range(60)]
        tasks = [asyncio.create_task(lock.acquire()) for lock in locks]  # more than the socket's buffer holds
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)

    asyncio.run(main())
    own_server.resume()
    with own_server.client() as client:
        nothing_is_held(client)


@pytest.fixture(params=["one server", "a Cluster"])
def frozen_later(request):
    """The address of a server or of a Cluster, and its processes."""
    if request.param == "one server":
        server = request.getfixturevalue("own_server")
        yield server.url, [server]
    else:
        with ClusterOfLocks() as cluster:
            yield cluster.url, cluster.nodes


def test_when_a_loop_is_closed_under_calls_without_a_reply_nothing_stays_held(frozen_later, monkeypatch):
    """The next loop that uses the client finds the closed one, also at the nodes that it does not use itself."""
    url, servers = frozen_later

    async def leave_tasks():
        for i in range(MANY):
            async with AsyncLock(aclient, f"lock {i}"):
                pass
        for server in servers:
            server.pause()
        for i in range(MANY):
            tasks.append(asyncio.create_task(AsyncLock(aclient, f"lock {i}", expire=FOR_LONG).acquire()))
        await asyncio.sleep(0)

    async def use():
        async with AsyncLock(aclient, "another"):
            pass

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Python warns of what such a loop leaves open
    tasks = []
    aclient = async_client_at(url, socket_timeout=60)
    with client_at(url) as client:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave_tasks())
        loop.close()
        for server in servers:
            server.resume()
        asyncio.run(use())
        nothing_is_held(client)
        while tasks:
            tasks.pop()._log_destroy_pending = False
        del loop
        gc.collect()


def test_when_a_process_ends_with_its_loop_nothing_stays_held(run_python, own_server):
    run_python(EXITS_AT_ONCE, own_server.url).finish()
    with own_server.client() as client:
        nothing_is_held(client)


def test_a_connection_that_was_idle_for_long_is_not_used_again(make_lock, proxy, monkeypatch):
    with client_at(proxy.url, socket_timeout=2) as client:
        with make_lock(client, "a"):
            pass
        proxy.forget_connections()
        monkeypatch.setattr(idle, "IDLE", 0.3)
        lived(0.4)
        with make_lock(client, "a"):
            pass


class FailingProvider(UsernamePasswordCredentialProvider):
    """As of a token service that is away."""

    def get_credentials(self):
        raise ZeroDivisionError("no token")


@pytest.mark.parametrize("tasks", [False, True])
def test_an_error_of_the_function_for_the_password_is_one_of_the_connection(redis_url, tasks, monkeypatch):
    """It came raw out of each call: out of a commit that had succeeded, and it ended leaders and pages."""
    monkeypatch.setattr(effects, "retry_for", 0.1)
    with (
        redis.Redis.from_url(redis_url, credential_provider=FailingProvider()) as client,
        pytest.raises(LockBackendError, match="ConnectionError: ZeroDivisionError: no token"),
    ):
        asyncio.run(AsyncLock(client, "a").acquire()) if tasks else Lock(client, "a").acquire()
