"""aget_or_set and its connections: round trips, threads, large answers and answers that stop coming."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis
from asgiref.sync import async_to_sync

from tests.support import Proxy, monitoring, until, wait_until
from tests.support.cache_programs import Work, cache_at, commands, followers, held, waiters


def test_a_hit_is_one_get_over_a_connection_of_its_own(cache, client):
    cache.set("k", "v")

    async def main():
        await cache.aget_or_set("warm", lambda: 1)
        with monitoring(client) as sent:
            assert await cache.aget_or_set("k", lambda: 1 / 0) == "v"
        return sent

    assert asyncio.run(main()) == ["GET :1:k"]


def test_a_miss_takes_three_round_trips(cache, client):
    async def compute():
        return "v"

    async def main():
        await cache.aget_or_set("warm", compute)
        with monitoring(client) as sent:
            assert await cache.aget_or_set("k", compute) == "v"
        return commands(sent)

    assert asyncio.run(main()) == ["GET", "EVALSHA", "EVALSHA"]


def test_with_an_async_default_no_thread_is_started(cache):
    """Neither for the hit nor for the miss, nor for those who wait: sync_to_async has nothing to do with it."""
    work = Work(["v"])

    async def main():
        before = threading.active_count()
        tasks = [asyncio.ensure_future(cache.aget_or_set("k", work.async_, 60)) for _ in range(20)]
        while followers() < 19:
            await asyncio.sleep(0.01)
        work.end.set()
        assert await asyncio.gather(*tasks) == [["v"]] * 20
        assert await cache.aget_or_set("k", work.async_, 60) == ["v"]
        watchdog = sum(thread.name.startswith("redislock-watchdog") for thread in threading.enumerate())
        assert threading.active_count() - watchdog <= before

    asyncio.run(main())


def test_each_loop_has_connections_of_its_own_and_closes_them(cache, client):
    async def main():
        await cache.aget_or_set("k", lambda: 1)
        return {connection["id"] for connection in client.client_list()}

    def ids():
        return {connection["id"] for connection in client.client_list()}

    before = ids()
    opened = (asyncio.run(main()) | asyncio.run(main())) - before
    assert opened
    wait_until(lambda: not opened & ids())


def test_hits_of_async_views_under_wsgi_open_no_connection_each(redis_url, backend, client):
    """There each request has a loop of its own, which ends with it."""
    cache = cache_at(redis_url, backend)
    view = async_to_sync(partial(cache.aget_or_set, "k", lambda: "v", 60))
    many = async_to_sync(partial(cache.aget_or_set_many, ["k"], lambda missing: {}))
    stale = async_to_sync(partial(cache.aget_or_set, "k", lambda: "v", 60, stale=5))
    assert (view(), view(), many(), stale()) == ("v", "v", {"k": "v"}, "v")
    before = client.info("stats")["total_connections_received"]
    for _ in range(10):
        assert (view(), many(), stale()) == ("v", {"k": "v"}, "v")
    assert client.info("stats")["total_connections_received"] == before


def test_a_value_of_several_megabytes_arrives(cache):
    value = "x" * 3_000_000

    async def main():
        assert await cache.aget_or_set("k", lambda: value) == value
        assert await cache.aget_or_set("k", lambda: 1 / 0) == value

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.one_server("a client of a Cluster goes past the proxy, to the addresses that nodes name")
@pytest.mark.parametrize("many", [False, True])
def test_an_answer_that_takes_longer_than_the_socket_timeout_but_keeps_coming_arrives(redis_url, backend, many):
    cache_at(redis_url, backend).set("k", "x" * 1_000_000)
    with Proxy(redis_url) as proxy:
        slow = cache_at(f"{proxy.url}?socket_timeout=0.6", backend)

        async def main():
            await slow.aget_or_set("warm", lambda: 1)
            began = time.monotonic()
            proxy.delay_replies(0.1)  # each piece of 64 KB
            if many:
                value = (await slow.aget_or_set_many(["k"], lambda missing: {}))["k"]
            else:
                value = await slow.aget_or_set("k", lambda: "computed")
            return value, time.monotonic() - began

        value, seconds = asyncio.run(main())
    assert len(value) == 1_000_000
    assert seconds > 0.9, "it took longer than the socket timeout"


@pytest.mark.slow
def test_an_answer_that_stops_coming_is_not_waited_for_for_ever(redis_url):
    cache_at(redis_url).set("k", "x" * 1_000_000)
    with Proxy(redis_url) as proxy:
        slow = cache_at(f"{proxy.url}?socket_timeout=0.6")

        async def main():
            await slow.aget_or_set("warm", lambda: 1)
            proxy.delay_replies(0.1)
            asking = asyncio.create_task(slow.aget_or_set("k", lambda: "computed"))
            await asyncio.sleep(0.25)  # the time in which some of it comes
            proxy.stall()
            with pytest.raises(redis.TimeoutError, match="no reply within"):
                await asyncio.wait_for(asking, 20)
            proxy.heal()

        asyncio.run(main())


def test_a_pool_of_two_connections_serves_sixteen_tasks_and_threads(redis_url, client):
    """All compute at the same time, and as many wait for them in another process's stead."""
    pool_of_two = {
        "CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool",
        "CONNECTION_POOL_KWARGS": {"max_connections": 2},
    }
    cache = cache_at(redis_url, OPTIONS=pool_of_two)
    elsewhere = cache_at(f"{redis_url}?socket_timeout=6", OPTIONS=pool_of_two)  # shares no flights with the first
    work = Work(["v"])
    keys = [f"k{number}" for number in range(16)]

    async def main():
        computing = [asyncio.ensure_future(cache.aget_or_set(key, work.async_, 60, expire=60)) for key in keys]
        await until(lambda: work.calls == 16)
        waiting = [asyncio.ensure_future(elsewhere.aget_or_set(key, lambda: "own", 60)) for key in keys]
        with ThreadPoolExecutor(16) as pool:
            threads = [pool.submit(elsewhere.get_or_set, key, lambda: "own", 60) for key in keys]
            await until(lambda: sum(waiters(client, key) for key in keys) == 16)
            work.end.set()
            values = await asyncio.gather(*computing, *waiting, *map(asyncio.wrap_future, threads))
        assert values == [["v"]] * 48

    asyncio.run(main())
    assert not held(client)
