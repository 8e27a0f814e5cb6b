"""The cache backends when replies are lost, connections are few, and time-outs short."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from django_redislock.cache.lease import obtain, single_flight
from django_redislock.cache.lease.request import Answer, ValueRequest, Verdict
from django_redislock.core import held_locks
from django_redislock.core.clock import monotonic
from tests.support import lived, wait_until
from tests.support.cache_programs import Work, cache_at, held, waiters


@pytest.mark.one_server("a client of a Cluster goes past the proxy, to the addresses that nodes name")
@pytest.mark.parametrize("of", [b"compute", b"value"], ids=["lease", "settle"])
def test_a_lost_reply_loses_nothing(proxy, redis_url, client, backend, of):
    """Each script may be repeated: the reply of the first or of the second one does not arrive."""
    cache = cache_at(proxy.url, backend)
    cache.get_or_set("warm", lambda: 1)

    def compute():
        if of == b"value":
            proxy.drop_next_reply(containing=b"EVALSHA")
        return "v"

    if of == b"compute":
        assert cache.get("k") is None
        proxy.drop_next_reply(containing=b"EVALSHA")
    started = time.monotonic()
    assert cache.get_or_set("k", compute, 60) == "v"
    assert time.monotonic() - started < 5, "it never waits for itself"
    assert proxy.dropped == 1
    assert cache.get("k") == "v"
    assert not held(client)


@pytest.mark.one_server("a client of a Cluster goes past the proxy, to the addresses that nodes name")
def test_who_loses_the_subscription_before_it_is_used_subscribes_again(proxy, backend, monkeypatch):
    asked = single_flight.get_or_compute
    monkeypatch.setattr(
        single_flight,
        "get_or_compute",
        lambda request, acquirer, until, listening, *rest: asked(request, acquirer, until, True, *rest),
    )
    cache = cache_at(proxy.url, backend)
    cache.get("connected")
    proxy.drop_next_reply(containing=b"SUBSCRIBE")
    assert cache.get_or_set("k", lambda: "v", 60) == "v"
    assert proxy.dropped == 1


@pytest.fixture
def cache_and_want(redis_url):
    cache = cache_at(redis_url)
    server = cache._server_of(":1:k")
    return cache, ValueRequest(server, "redislock", ":1:k", str, None, None, 60.0, False, None, False)


def test_who_finds_the_value_after_a_lost_reply_keeps_no_lease(cache_and_want, client):
    cache, want = cache_and_want
    lease = want.lease(threading.current_thread())
    steps = partial(obtain.request_lease, want, lease, b"", monotonic() + 10, False)
    assert want.server.run(steps()).verdict is Verdict.COMPUTE
    cache.set("k", "v")
    assert want.server.run(steps()) == Answer(Verdict.VALUE, client.get(":1:k")), (
        "the same call again, as its reply did not arrive"
    )
    assert not held(client)


def test_a_wake_up_that_is_lost_costs_half_a_second(proxy, redis_url, client):
    there, here = cache_at(redis_url), cache_at(proxy.url)
    work = Work()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(there.get_or_set, "k", work, 60)
        assert work.running.wait(10)
        second = pool.submit(here.get_or_set, "k", lambda: "own", 60)
        wait_until(lambda: waiters(client, "k") == 1)
        proxy.drop_next_reply()  # the message, as it is the next that comes
        started = time.monotonic()
        work.end.set()
        assert first.result(20) == "v"
        assert second.result(20) == "v"
        assert time.monotonic() - started < 2


@pytest.mark.slow
def test_a_pool_of_two_connections_serves_sixteen_threads(redis_url, client):
    pool_of_two = {
        "CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool",
        "CONNECTION_POOL_KWARGS": {"max_connections": 2},
    }
    cache = cache_at(redis_url, OPTIONS=pool_of_two)
    work = Work()
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(cache.get_or_set, f"k{number}", work, 60, expire=1.8) for number in range(16)]
        wait_until(lambda: work.calls == 16)
        lived(2.5)
        assert len(list(held_locks(client))) == 16, "all are renewed"
        work.end.set()
        assert [future.result(20) for future in futures] == ["v"] * 16


@pytest.mark.slow
def test_a_short_socket_timeout_and_long_work(redis_url):
    cache = cache_at(f"{redis_url}?socket_timeout=0.5")
    work = Work()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_set, "k", work, 60, expire=2)
        assert work.running.wait(10)
        elsewhere = cache_at(f"{redis_url}?socket_timeout=0.51")  # as if it were another process
        second = pool.submit(elsewhere.get_or_set, "k", lambda: "own", 60)
        lived(2.5)
        work.end.set()
        assert first.result(20) == "v"
        assert second.result(20) == "v"


# Tasks


@pytest.mark.parametrize("of", ["lease", "settle"])
def test_a_lost_reply_loses_nothing_for_tasks(proxy, client, of):
    cache = cache_at(proxy.url)

    async def compute():
        if of == "settle":
            proxy.drop_next_reply(containing=b"EVALSHA")
        return "v"

    async def main():
        await cache.aget_or_set("warm", compute) if of == "lease" else await cache.aget_or_set("warm", lambda: 1)
        if of == "lease":
            proxy.drop_next_reply(containing=b"EVALSHA")
        assert await asyncio.wait_for(cache.aget_or_set("k", compute, 60), 5) == "v"

    asyncio.run(main())
    assert proxy.dropped == 1
    assert cache.get("k") == "v"
    assert not held(client)


@pytest.mark.slow
def test_a_short_socket_timeout_and_long_work_of_a_task(redis_url):
    cache = cache_at(f"{redis_url}?socket_timeout=0.5")
    elsewhere = cache_at(f"{redis_url}?socket_timeout=0.51")  # as if it were another process
    running = threading.Event()

    async def compute():
        running.set()
        await asyncio.sleep(2.5)  # the work
        return "v"

    async def main():
        first = asyncio.ensure_future(cache.aget_or_set("k", compute, 60, expire=1))
        await asyncio.to_thread(running.wait, 10)
        assert await elsewhere.aget_or_set("k", lambda: "own", 60) == "v"
        assert await first == "v"

    asyncio.run(main())
