"""A computation that needs a value of another database, server or slot waits for it; a circle ends with its waits."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from tests.support import BUSY, wait_until
from tests.support.cache_programs import Work, cache_at, cache_elsewhere, followers, held


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


def test_a_computation_that_needs_its_own_value_through_another_client_or_in_a_task_of_its_own_does_not_wait(
    redis_url, backend
):
    here = cache_at(redis_url, backend)
    if backend == "ClusterCache":
        there = cache_at(redis_url, backend, OPTIONS={"client_name": "another"})
    else:
        there = cache_at(f"{redis_url}?socket_timeout=4.9", backend)

    async def compute():
        return await asyncio.create_task(there.aget_or_set("k", lambda: "inner", 60)) + " in a task"

    started = time.monotonic()
    assert here.get_or_set("k", lambda: there.get_or_set_many(["k"], lambda keys: {"k": "inner"})["k"]) == "inner"
    here.delete("k")
    assert here._server_of("k") is not there._server_of("k")
    assert asyncio.run(here.aget_or_set("k", compute, 60)) == "inner in a task"
    assert time.monotonic() - started < 5 + BUSY, "far below the 30 s that a caller waits at most"
    assert there.get("k") == "inner in a task"


@pytest.mark.parametrize("kind", ["threads", "tasks", "processes"])
@pytest.mark.parametrize("keys", ["ab", "abc"])
def test_a_circle_ends_with_the_wait_of_its_callers(caches, urls, backend, client, pool, kind, keys):
    """The first one whose time is over computes what it needs; the others get what they need from its value."""
    elsewhere = [cache_elsewhere(url, backend) for url in urls]
    everybody = threading.Barrier(len(keys))
    circle = list(zip(keys, keys[1:] + keys[0], strict=True))
    options = {"timeout": 60, "wait": 1}

    def cache_of(key, caller):
        of = elsewhere if kind == "processes" and caller == keys[-1] else caches
        return of[keys.index(key) % 2]

    def nest(outer, inner):
        def compute():
            everybody.wait(10)
            return outer + cache_of(inner, outer).get_or_set(inner, lambda: inner, **options)

        return cache_of(outer, outer).get_or_set(outer, compute, **options)

    async def anest(outer, inner):
        async def compute():
            await asyncio.to_thread(everybody.wait, 10)
            return outer + await cache_of(inner, outer).aget_or_set(inner, lambda: inner, **options)

        return await cache_of(outer, outer).aget_or_set(outer, compute, **options)

    async def all_values():
        return await asyncio.gather(*[anest(*each) for each in circle])

    began = time.monotonic()
    if kind == "tasks":
        values = asyncio.run(all_values())
    else:
        values = [each.result(30) for each in [pool.submit(nest, *each) for each in circle]]
    assert 1 <= time.monotonic() - began < 1.1 + 2 + BUSY, "one wait, not one for each"
    assert [value[0] for value in values] == list(keys)
    assert not held(client)


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
    wait_until(lambda: followers() == len(numbers) - 1)
    menu.end.set()
    assert list(made.result(20)) == [[number, "menu"] for number in numbers]
    assert menu.calls == 1


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
