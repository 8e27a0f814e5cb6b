"""A computation that needs a value of another database, server or slot waits for it; a circle of waits is found."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial

import pytest
import redis

from django_redislock.cache.lease import obtain
from django_redislock.cache.lease.request import lease_keys, lease_name
from django_redislock.core.driver.effects import Pipeline
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.core.lease import Lease
from django_redislock.core.options import Renewal
from tests.support import BUSY, Proxy, client_at, wait_until
from tests.support.cache_programs import Work, cache_at, cache_elsewhere


@pytest.fixture(scope="module")
def other_servers():
    """Return the module's server of a kind: a Cluster of one node takes two seconds to begin."""
    with ExitStack() as stack:
        yield functools.cache(lambda kind: stack.enter_context(kind()))


@pytest.fixture(
    params=[
        "one cache",
        pytest.param("two databases", marks=pytest.mark.one_server("a Cluster has one database")),
        "two servers",
    ]
)
def urls(request, redis_url, server, client):
    """The URLs of two caches; a third value is in the first one."""
    second = redis_url
    if request.param == "two databases":
        second = server.url_of_db(9)
    elif request.param == "two servers":
        other = request.getfixturevalue("other_servers")(request.getfixturevalue("server_kind"))
        second = other.url
        with other.client() as client_of_other:
            client_of_other.flushall()
    return redis_url, second


@pytest.fixture
def caches(urls, backend):
    one, two = (cache_at(url, backend) for url in urls)
    two.clear()
    return one, two


@pytest.fixture
def pool():
    with ThreadPoolExecutor(40) as pool:
        yield pool


def lease_of(cache, key):
    """Return the value of the lease's lock, which names the leases for which its holder waits."""
    server = cache._server_of(":1:any")
    lock = lease_keys(server, "redislock", lease_name(f":1:{key}"), f":1:{key}").lock
    return server.call(Pipeline(((b"GET", lock),)))[0]


def waiting_for(cache, *keys):
    """Return how many callers wait for the values of these keys, on any kind of server."""
    server, number = cache._server_of(":1:any"), 0
    for key in [f":1:{key}" for key in keys]:
        queue = lease_keys(server, "redislock", lease_name(key), key).queue
        number += server.call(Pipeline(((b"ZCARD", queue),)))[0]
    return number


def test_a_key_may_be_wanted_while_it_is_computed(cache):
    def outer():
        return ["outer", cache.get_or_set("inner", lambda: ["inner", cache.get_or_set("outer", lambda: "end")])]

    async def aouter():
        return ["outer", await cache.aget_or_set("ainner", ainner)]

    async def ainner():
        return ["inner", await cache.aget_or_set("aouter", lambda: "end")]

    started = time.monotonic()
    assert cache.get_or_set("outer", outer) == ["outer", ["inner", "end"]]
    assert asyncio.run(cache.aget_or_set("aouter", aouter)) == ["outer", ["inner", "end"]]
    own = cache.get_or_set("k", lambda: ["k", cache.get_or_set("k", lambda: "inner")])
    assert own == cache.get("k") == ["k", "inner"]
    assert time.monotonic() - started < 5 + BUSY, "far below the 30 s that a caller waits at most"


@pytest.mark.parametrize("way", ["there", "back"])
@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_pages_that_need_one_menu_compute_it_once(caches, pool, kind, way):
    pages, menus = caches if way == "there" else reversed(caches)
    menu, numbers = Work("menu"), range(10)

    def page(number):
        return pages.get_or_set(f"page{number}", lambda: [number, menus.get_or_set("menu", menu, 60)], 60)

    async def apage(number):
        async def compute():
            return [number, await menus.aget_or_set("menu", partial(asyncio.to_thread, menu), 60)]

        return await pages.aget_or_set(f"page{number}", compute, 60)

    async def all_pages():
        return await asyncio.gather(*map(apage, numbers))

    made = pool.submit(asyncio.run, all_pages()) if kind == "tasks" else pool.submit(pool.map, page, numbers)
    assert menu.running.wait(10)
    wait_until(lambda: waiting_for(menus, "menu") == len(numbers) - 1)
    menu.end.set()
    assert list(made.result(20)) == [[number, "menu"] for number in numbers]
    assert menu.calls == 1


class ForThreadsOnly(redis.Connection):
    """redis-py has no class for asyncio that corresponds to it."""


@pytest.mark.parametrize(
    "kind",
    [
        "threads",
        "tasks",
        pytest.param("tasks beside a client for threads only", marks=pytest.mark.one_server("it is one of one server")),
    ],
)
@pytest.mark.parametrize("keys", ["ab", "abc"])
def test_who_closes_a_circle_does_not_wait(caches, urls, pool, kind, keys):
    pools = [redis.ConnectionPool.from_url(url, connection_class=ForThreadsOnly) for url in urls if "only" in kind]
    beside = [server_of(redis.Redis(connection_pool=each)) for each in pools]
    of = {key: caches[number % 2] for number, key in enumerate(keys)}
    everybody = threading.Barrier(len(keys))
    circle = list(zip(keys, keys[1:] + keys[0], strict=True))

    def nest(outer, inner):
        def compute():
            everybody.wait(10)
            return outer + of[inner].get_or_set(inner, lambda: inner, 60)

        return of[outer].get_or_set(outer, compute, 60)

    async def anest(outer, inner):
        async def compute():
            await asyncio.to_thread(everybody.wait, 10)
            return outer + await of[inner].aget_or_set(inner, lambda: inner, 60)

        return await of[outer].aget_or_set(outer, compute, 60)

    async def all_values():
        return await asyncio.gather(*[anest(*each) for each in circle])

    tasks = kind != "threads"
    made = [pool.submit(asyncio.run, all_values())] if tasks else [pool.submit(nest, *each) for each in circle]
    late = wait(made, 5 + BUSY).not_done  # far below the 30 s that a caller waits at most
    assert not late, [lease_of(of[key], key) for key in keys]
    values = made[0].result() if tasks else [each.result() for each in made]
    assert [value[0] for value in values] == list(keys)
    # The one that does not wait computes the next value for itself; each of the others gets it from its leader.
    lengths = sorted(map(len, values))
    assert lengths == list(range(2, len(keys) + 2)), values
    assert all(each.place in (cache._server_of(":1:any").place for cache in caches) for each in beside)


def test_a_circle_is_found_by_who_knows_the_servers_by_another_name(urls, backend, pool):
    here = [cache_at(url, backend) for url in urls]
    there = [cache_elsewhere(url, backend) for url in urls]
    here[1].clear()
    both, started = threading.Barrier(2), time.monotonic()

    def nest(caches, outer, inner):
        def compute():
            both.wait(10)
            return caches[inner].get_or_set(f"k{inner}", lambda: "end", 60)

        return caches[outer].get_or_set(f"k{outer}", compute, 60)

    for future in [pool.submit(nest, here, 0, 1), pool.submit(nest, there, 1, 0)]:
        assert future.result(25) == "end"
    assert time.monotonic() - started < 5 + BUSY


def test_a_circle_is_found_past_a_user_of_the_server_who_is_refused(urls, backend, pool):
    refused = [cache_at(url.replace("//", "//nobody:wrong@"), backend)._server_of(":1:any") for url in urls]
    one, two = (cache_at(url, backend) for url in urls)
    two.clear()
    everybody, last, started = threading.Barrier(3), threading.Event(), time.monotonic()

    def nest(outer, key, inner, wanted):
        def compute():
            everybody.wait(10)
            assert key != "a" or last.wait(10)
            return inner.get_or_set(wanted, lambda: "end", 60)

        return outer.get_or_set(key, compute, 60)

    made = [pool.submit(nest, *each) for each in [(one, "a", two, "b"), (two, "b", one, "c"), (one, "c", one, "a")]]
    wait_until(lambda: waiting_for(one, "c") + waiting_for(one, "a") == 2)
    last.set()
    assert [future.result(25) for future in made] == ["end"] * 3
    assert time.monotonic() - started < 5 + BUSY
    del refused


@pytest.mark.one_server("whose clients differ by their options only")
def test_of_several_clients_of_a_silent_server_one_is_waited_for(client, redis_url, monkeypatch):
    """Each one was asked, so a computation began later by as many time-outs."""
    asked, with_retries = [], obtain.with_retries
    monkeypatch.setattr(obtain, "with_retries", lambda *args: asked.append(args[1]) or with_retries(*args))
    with Proxy(redis_url) as proxy, ExitStack() as stack:
        clients = [stack.enter_context(client_at(proxy.url, socket_timeout=seconds)) for seconds in (0.2, 0.21, 0.22)]
        servers = [server_of(each) for each in clients]
        wanted = Lease(server_of(client), "a", lock_keys("redislock", "a"), "id", Renewal(60), None)
        record = json.dumps({"needs": [[obtain.label(servers[0].place), "b", "8"]]})
        client.set(wanted.keys.lock, f"id\n7\n0\n{record}")
        proxy.black_hole()
        assert server_of(client).run(obtain.closes_circle(wanted, b"7")) is None
    assert len(asked) == 2


@pytest.mark.one_server("a Cluster has one database")
def test_a_computation_that_waits_for_two_values_at_once_is_found_by_both(redis_url, server, backend):
    """Two tasks of one computation wait for one value each: the lease names both."""
    here, there = cache_at(redis_url, backend), cache_at(server.url_of_db(9), backend)
    there.clear()

    async def main():
        leaders, waits = asyncio.Barrier(3), asyncio.Event()

        async def both():
            await leaders.wait()
            wanted = [asyncio.create_task(there.aget_or_set(key, str, 60)) for key in "bc"]
            await asyncio.to_thread(wait_until, lambda: waiting_for(there, *"bc") == 2)
            waits.set()
            return sorted(await asyncio.gather(*wanted))

        async def back(key):
            await leaders.wait()
            await waits.wait()
            return key + str(await here.aget_or_set("a", lambda: "own a", 60))

        began = time.monotonic()
        values = await asyncio.gather(
            here.aget_or_set("a", both, 60), *[there.aget_or_set(key, partial(back, key), 60) for key in "bc"]
        )
        assert time.monotonic() - began < 5 + BUSY
        return values

    a, b, c = asyncio.run(main())
    # Each circle is opened by who closed it, or by the waiter for "a", if it looks again just then.
    assert (b in ("bown a", f"b{a}"), c in ("cown a", f"c{a}")) == (True, True)
    assert set(a) <= {"", "bown a", "cown a"}


def test_a_nested_call_that_stops_the_loop_of_the_leader_does_not_wait_for_it(caches):
    """A function that is not asynchronous runs in the loop: while it waited, the task that computes could not go on."""
    pages, menus = caches

    async def main():
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def menu():
            begun.set()
            await goes_on.wait()
            return "of the task"

        task = asyncio.create_task(menus.aget_or_set("menu", menu, 60))
        await begun.wait()
        started = time.monotonic()
        page = pages.get_or_set("page", lambda: menus.get_or_set("menu", lambda: "own", 60), 60)
        assert time.monotonic() - started < 5 + BUSY, "far below the 30 s that a caller waits at most"
        goes_on.set()
        return page, await task

    assert asyncio.run(main()) == ("own", "of the task")


def test_a_wait_that_is_over_is_no_part_of_a_circle(caches, client, pool):
    """The lease of the page named the menu: when the next computation of the menu needs the page, it waits."""
    pages, menus = caches
    menu, page, goes_on = Work("menu"), Work("page"), threading.Event()

    def compute_page():
        menus.get_or_set("menu", menu, 60)
        menus.delete("menu")
        goes_on.set()
        return page()

    first = pool.submit(menus.get_or_set, "menu", menu, 60)
    assert menu.running.wait(10)
    outer = pool.submit(pages.get_or_set, "page", compute_page, 60)
    wait_until(lambda: waiting_for(menus, "menu") == 1)
    menu.end.set()
    assert first.result(20) == "menu"
    assert goes_on.wait(10)
    again = pool.submit(menus.get_or_set, "menu", lambda: pages.get_or_set("page", lambda: "twice", 60), 60)
    wait_until(lambda: waiting_for(pages, "page") == 1)
    page.end.set()
    assert (outer.result(20), again.result(20)) == ("page", "page")


@pytest.mark.slow
def test_a_circle_is_found_though_a_failover_lost_who_waits_for_whom(redis_url, pool, monkeypatch):
    monkeypatch.setattr(obtain, "LOOK_AGAIN", 1.0)
    cache, inner, outer = cache_at(redis_url), Work("b"), Work("a")
    get = partial(cache.get_or_set, timeout=60, wait=25, on_wait_timeout="raise")
    second = pool.submit(get, "b", lambda: inner() + get("a", lambda: "own a"))
    first = pool.submit(get, "a", lambda: outer() + get("b", lambda: "own b"))
    assert inner.running.wait(10)
    assert outer.running.wait(10)
    outer.end.set()
    server, named = cache._server_of(":1:a"), b',"needs":'
    lock = lease_keys(server, "redislock", lease_name(":1:a"), ":1:a").lock
    wait_until(lambda: waiting_for(cache, "b") == 1 and named in server.call(Pipeline(((b"GET", lock),)))[0])
    without = server.call(Pipeline(((b"GET", lock),)))[0].partition(named)[0] + b"}"
    server.call(Pipeline(((b"SET", lock, without, b"KEEPTTL"),)))
    inner.end.set()
    assert (first.result(30)[0], second.result(30)[0]) == ("a", "b"), "a caller whose time is over raises"


def test_a_name_of_a_server_that_is_unknown_or_of_nobody_ends_the_chain(redis_url):
    server = cache_at(redis_url)._server_of("k")
    head = b"id\n7\n1\n"
    assert obtain._needs_in(head + b'{"needs":[["elsewhere","lock","5"]]}', server) == [(None, b"lock", "5")]
    for value in (None, b"id\n0\n1\nchannel", head + b"{}", b"not ours", head + b"{"):
        assert obtain._needs_in(value, server) == []
