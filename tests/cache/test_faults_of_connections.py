"""Connections: round trips, replies that are lost or slow, few connections, and short time-outs."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import redis
from asgiref.sync import async_to_sync

from django_redislock.cache.lease import obtain
from django_redislock.cache.lease.request import Mode, ValueAttempt, ValueRequest, Verdict
from django_redislock.core import held_locks
from django_redislock.core.clock import monotonic
from django_redislock.core.options import Renewal
from tests.support import Proxy, begin, lived, monitoring, until, wait_until
from tests.support.cache_programs import Work, cache_at, commands, getter, held, waiters


@pytest.mark.one_server("a client of a Cluster goes past the proxy, to the addresses that nodes name")
@pytest.mark.parametrize("by_task", [False, True], ids=["thread", "task"])
@pytest.mark.parametrize("of", ["lease", "settle"])
def test_a_lost_reply_loses_nothing(proxy, client, backend, of, by_task):
    """Each script may be repeated: the reply of the first or of the second one does not arrive."""
    cache = cache_at(proxy.url, backend)

    def compute():
        if of == "settle":
            proxy.drop_next_reply(containing=b"EVALSHA")
        return "v"

    def get():
        if of == "lease":
            proxy.drop_next_reply(containing=b"EVALSHA")
        return cache.get_or_set("k", compute, 60)

    async def aget():
        await cache.aget_or_set("warm", lambda: 1)
        if of == "lease":
            proxy.drop_next_reply(containing=b"EVALSHA")
        return await cache.aget_or_set("k", compute, 60)

    cache.get_or_set("warm", lambda: 1)
    started = time.monotonic()
    assert (asyncio.run(aget()) if by_task else get()) == "v"
    assert time.monotonic() - started < 5, "it never waits for itself"
    assert proxy.dropped == 1
    assert cache.get("k") == "v"
    assert not held(client)


@pytest.mark.slow
@pytest.mark.one_server("a client of a Cluster goes past the proxy, to the addresses that nodes name")
def test_a_lease_that_is_granted_after_its_expiry_is_asked_for_again(proxy, client, backend):
    cache = cache_at(f"{proxy.url}?socket_timeout=5", backend, OPTIONS={"LOCK": {"EXPIRE": 2}})
    cache.get_or_set("warm", lambda: 1)
    grant = proxy.hold_next_reply(containing=b"EVALSHA")
    ended = begin(grant.let_go_after, lambda: wait_until(lambda: not held(client)))
    assert cache.get_or_set("k", lambda: held(client)), "its lease is over while it computes"
    ended.result()


@pytest.mark.one_server("a client of a Cluster goes past the proxy, to the addresses that nodes name")
def test_who_loses_the_subscription_before_it_is_used_subscribes_again(proxy, backend, monkeypatch):
    ask = obtain.ask
    monkeypatch.setattr(obtain, "ask", lambda request, attempt, mode, listening: ask(request, attempt, mode, True))
    cache = cache_at(proxy.url, backend)
    cache.get("connected")
    proxy.drop_next_reply(containing=b"SUBSCRIBE")
    assert cache.get_or_set("k", lambda: "v", 60) == "v"
    assert proxy.dropped == 1


@pytest.fixture
def cache_and_want(redis_url):
    cache = cache_at(redis_url)
    server = cache._server_of(":1:k")
    return cache, ValueRequest(server, "redislock", ":1:k", str, None, None, Renewal(60.0, auto_renewal=False), False)


def test_who_finds_the_value_after_a_lost_reply_keeps_no_lease(cache_and_want, client):
    cache, want = cache_and_want
    lease = want.lease(threading.current_thread())
    lost, again = ValueAttempt(lease), ValueAttempt(lease)
    assert want.server.run(obtain.ask(want, lost, Mode(monotonic() + 10))).verdict is Verdict.COMPUTE
    cache.set("k", "v")
    want = replace(want, loads=lambda key, data: data)
    answer = want.server.run(obtain.ask(want, again, Mode(monotonic() + 10)))
    assert (answer.verdict, answer.data) == (Verdict.VALUE, client.get(":1:k")), "the same call, as if repeated"
    wait_until(lambda: not held(client))


def test_a_wake_up_that_is_lost_costs_half_a_second(proxy, redis_url, client):
    there, here = cache_at(redis_url), cache_at(proxy.url)
    work = Work()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(there.get_or_set, "k", work, 60)
        assert work.running.wait(10)
        second = pool.submit(here.get_or_set, "k", lambda: "own", 60)
        wait_until(lambda: waiters(client, "k") == 1)
        proxy.drop_next_message()
        started = time.monotonic()
        work.end.set()
        assert first.result(20) == "v"
        assert second.result(20) == "v"
        assert time.monotonic() - started < 2
    assert proxy.dropped == 1


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
@pytest.mark.parametrize("by_task", [False, True], ids=["thread", "task"])
def test_a_short_socket_timeout_and_long_work(redis_url, by_task):
    work = Work()
    here = getter(cache_at(f"{redis_url}?socket_timeout=0.5"), by_task)
    elsewhere = getter(cache_at(f"{redis_url}?socket_timeout=0.51"), by_task)  # as if it were another process
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(here, "k", work, 60, expire=2)
        assert work.running.wait(10)
        second = pool.submit(elsewhere, "k", lambda: "own", 60)
        lived(2.5)
        work.end.set()
        assert first.result(20) == second.result(20) == "v"


# Round trips, connections and threads of tasks


def test_a_hit_is_one_get_over_a_connection_of_its_own_and_a_miss_takes_three_round_trips(cache, client):
    cache.set("k", None)

    async def compute():
        return "v"

    async def main():
        await cache.aget_or_set("warm", compute)
        with monitoring(client) as sent:
            assert await cache.aget_or_set("k", lambda: 1 / 0) is None
        assert sent == ["GET :1:k"]
        with monitoring(client) as sent:
            assert await cache.aget_or_set("l", compute) == "v"
        assert commands(sent) == ["GET", "EVALSHA", "EVALSHA"]

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
