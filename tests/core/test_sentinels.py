"""Sentinels are asked side by side, and locks, values and tasks of asyncio outlive real failovers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from django_redis.pool import ConnectionFactory

from django_redislock.core import AsyncLock, Lock, Semaphore
from django_redislock.core.driver import sentinels
from django_redislock.core.driver.registry import close_unused, server_of
from django_redislock.core.driver.sentinels import ASK_FOR
from django_redislock.exceptions import LockBackendError
from django_redislock.server_url import client_from_url
from tests.support import BUSY, Deployment, begin, free_port, in_thread, queued, running_sentinel, wait_until
from tests.support.cache_programs import cache_at

pytestmark = pytest.mark.processes


def url_of(*ports, service="main"):
    return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports)}/{service}/0"


@pytest.fixture
def silent():
    """The ports of two programs that accept connections and never answer."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]


def test_threads_and_tasks_find_the_primary_by_the_url(make_lock, sentinel):
    with client_from_url(url_of(sentinel)) as client, make_lock(client, "a") as held:
        assert held.owned()
        assert not in_thread(lambda: make_lock(client, "a").acquire(timeout=0.1))


def test_sentinels_that_are_silent_or_gone_are_not_waited_for_one_after_another(sentinel, silent):
    with client_from_url(url_of(*silent, free_port(), free_port(), sentinel)) as client:
        began = time.monotonic()
        address = server_of(client).settings["connection_pool"].get_master_address()
        assert address[0] == "127.0.0.1"
        assert time.monotonic() - began < ASK_FOR + BUSY
        with Lock(client, "a", timeout=5) as held:
            assert held.owned()


def test_when_no_thread_can_start_the_sentinels_are_asked_in_this_one(sentinel, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with client_from_url(url_of(free_port(), sentinel)) as client:
        service = server_of(client).settings["connection_pool"]
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert service.get_master_address()[0] == "127.0.0.1"


def test_no_sentinel_that_answers_is_an_error_within_the_callers_timeout(silent):
    with client_from_url(url_of(*silent, free_port())) as client:
        lock, began = Lock(client, "a"), time.monotonic()
        reason = r"None of 3 Sentinels of 'main' answers .*correct their addresses"
        with pytest.raises(LockBackendError, match=reason) as failure:
            lock.acquire(timeout=1)
        assert time.monotonic() - began < 1 + ASK_FOR + BUSY
        assert not failure.value.refused, "another try may find them"


def test_a_service_that_no_sentinel_knows_is_an_error_at_once_that_says_what_to_do(make_lock, sentinel):
    with client_from_url(url_of(sentinel, service="other")) as client:
        with pytest.raises(LockBackendError, match="know no service 'other': give the name of their line") as failure:
            make_lock(client, "a").acquire()
        assert failure.value.refused, "another try would be of no use"


@pytest.fixture(scope="module")
def deployment():
    with Deployment() as deployment:
        for port in deployment.sentinels:  # or each test would wait 10 s for what they learn of a healed server
            deployment.ask(port, "DEBUG", "INFO-PERIOD", "500", "PUBLISH-PERIOD", "500")
        yield deployment


@pytest.fixture
def client(deployment):
    for server in deployment.servers:
        if server.process is None:  # a test that failed has left it so
            deployment.heal(server)
    deployment.wait_until_whole()
    with client_from_url(deployment.url) as client:
        client.flushdb()
        yield client
        close_unused()


def replicated(deployment):
    """Wait until the replica has all that was written."""
    with deployment.primary.client() as client:
        client.set("mark", "x")
        wait_until(lambda: client.wait(1, 100) == 1, message="the replica has everything")


@pytest.mark.parametrize("make", [Lock, partial(Semaphore, limit=1)], ids=["lock", "semaphore"])
def test_a_killed_primary_loses_neither_the_lock_nor_a_waiter(deployment, client, make):
    held = make(client, "a", expire=30)
    held.acquire()
    waiter = begin(make(client, "a").acquire, timeout=60)
    wait_until(lambda: client.keys("*:queue:*"))
    replicated(deployment)
    former = deployment.kill()
    deployment.wait_for_another(former)
    held.release()
    assert waiter.result(60)
    deployment.heal(former)


async def test_tasks_and_a_cache_go_on_after_the_primary_was_killed(deployment, client, monkeypatch):
    # django-redis keeps its pools by URL, whatever their Sentinels are: another test has the same URL.
    monkeypatch.setattr(ConnectionFactory, "_pools", {})
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("127.0.0.1", port) for port in deployment.sentinels],
    }
    cache = cache_at("redis://main/0", OPTIONS=options)

    assert await cache.aget_or_set("k", lambda: "v", 600) == "v"
    held = AsyncLock(client, "a", expire=30)
    await held.acquire()
    waiter = asyncio.create_task(AsyncLock(client, "a").acquire(timeout=60))
    await asyncio.to_thread(wait_until, lambda: queued(client, "a"))
    await asyncio.to_thread(replicated, deployment)
    former = await asyncio.to_thread(deployment.kill)
    assert await held.extend(), "it is tried again until a replica is promoted"
    await asyncio.to_thread(deployment.wait_for_another, former)
    await asyncio.to_thread(deployment.wait_until_all_agree)  # values are read as django-redis does it
    computed = []
    assert await cache.aget_or_set("k2", lambda: computed.append(1) or "v2", 600) == "v2"
    assert computed == [1]
    assert await cache.aget_or_set("k", lambda: "w", 600) == "v"
    await held.release()
    assert await waiter
    await asyncio.to_thread(deployment.heal, former)
    calls = []
    assert cache.get_or_set("k3", lambda: calls.append(1) or "v3") == "v3"
    assert cache.get_or_set("k3", lambda: calls.append(2) or "w3") == "v3"
    assert calls == [1]


def test_a_sentinel_with_an_older_configuration_is_outvoted(deployment, client, tmp_path, monkeypatch):
    """It stands for one on the wrong side of a partition: it calls another server the primary, and answers first."""
    monkeypatch.setattr(sentinels, "ASK_FOR", 10)  # or on a busy machine it might be the only one that answers
    deployment.wait_for_another(deployment.switch())
    deployment.wait_until_all_agree()
    with running_sentinel(tmp_path) as behind:
        for ports in ([behind, *deployment.sentinels[:2]], [*deployment.sentinels[1:], behind]):
            with client_from_url(url_of(*ports)) as found:
                service = server_of(found).settings["connection_pool"]
                assert {service.get_master_address()[1] for _ in range(5)} == {deployment.primary.port}


# Under load: REDISLOCK_FAILOVERS=40 makes so many failovers in place of two; the script also measures them without
# confirmation.
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "failovers.py"
NUMBER = int(os.environ.get("REDISLOCK_FAILOVERS", "2"))


@pytest.mark.long
def test_with_confirmed_locks_no_two_threads_believe_to_hold_one(tmp_path):
    command = [sys.executable, str(SCRIPT), str(NUMBER), "--safe", "--parallel", "2", "--json"]
    kinds = ["--kind", "kill", "--kind", "partition", "--expire", "3"] if NUMBER == 2 else []
    run = subprocess.run([*command, *kinds], capture_output=True, text=True, timeout=60 * NUMBER, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["overlaps"] == []
    assert len(found["done"]) == NUMBER
    assert found["holders"] > NUMBER
