"""aget_or_set is protected, too, and takes defaults of both kinds."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest
from asgiref.sync import sync_to_async

from tests.cache_programs import BACKENDS, cache_at, followers
from tests.support import wait_until


@pytest.fixture(params=BACKENDS)
def cache(request, redis_url):
    return cache_at(redis_url, request.param)


class Work:
    """A default that runs until the test lets it end."""

    def __init__(self):
        self.calls = 0
        self.end = threading.Event()

    def sync(self):
        self.calls += 1
        assert self.end.wait(20)
        return ["v"]

    async def async_(self):
        self.calls += 1
        while not self.end.is_set():
            await asyncio.sleep(0.01)
        return ["v"]


async def until(condition):
    await sync_to_async(wait_until, thread_sensitive=False)(condition)


@pytest.mark.parametrize(
    "default_of",
    [
        lambda work: work.sync,
        lambda work: work.async_,
        lambda work: lambda: work.async_(),
        lambda work: functools.partial(work.async_),
    ],
    ids=["sync", "async", "a lambda that returns a coroutine", "partial"],
)
def test_tasks_and_threads_compute_once(cache, default_of):
    work = Work()

    async def main():
        tasks = [asyncio.ensure_future(cache.aget_or_set("k", default_of(work), 60)) for _ in range(10)]
        await until(lambda: followers() == 9)
        work.end.set()
        return await asyncio.gather(*tasks)

    values = asyncio.run(main())
    assert values == [["v"]] * 10
    assert len({id(value) for value in values}) == 10
    assert work.calls == 1
    assert cache.get("k") == ["v"]


def test_a_hit_computes_nothing(cache):
    cache.set("k", None)
    assert asyncio.run(cache.aget_or_set("k", lambda: 1 / 0)) is None


def test_a_default_that_is_not_callable(cache):
    assert asyncio.run(cache.aget_or_set("k", 5, 60)) == 5
    assert cache.get("k") == 5


def test_an_async_default_runs_in_the_callers_loop(cache):
    async def main():
        loop = asyncio.get_running_loop()

        async def compute():
            return asyncio.get_running_loop() is loop

        return await cache.aget_or_set("k", compute)

    assert asyncio.run(main()) is True


def test_who_waits_blocks_no_other_work(cache):
    """Nor does it take the threads of the loop's own pool, however many wait."""
    work = Work()

    async def main():
        tasks = [asyncio.ensure_future(cache.aget_or_set("k", work.async_, 60)) for _ in range(50)]
        await until(lambda: followers() == 49)
        assert await sync_to_async(lambda: "sensitive")() == "sensitive"
        assert await asyncio.to_thread(lambda: "pool") == "pool"
        work.end.set()
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_defaults_exception_comes_out(cache):
    async def fail():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(cache.aget_or_set("k", fail))
    assert asyncio.run(cache.aget_or_set("k", lambda: 1)) == 1


def test_nested(cache):
    async def outer():
        return ["outer", await cache.aget_or_set("inner", inner)]

    async def inner():
        return ["inner", await cache.aget_or_set("outer", lambda: "end")]

    async def main():
        return await asyncio.wait_for(cache.aget_or_set("outer", outer), 10)

    assert asyncio.run(main()) == ["outer", ["inner", "end"]]


def test_options_are_those_of_get_or_set(cache):
    with pytest.raises(ValueError, match="wait"):
        asyncio.run(cache.aget_or_set("k", lambda: 1, wait=-1))
    with pytest.raises(TypeError):
        asyncio.run(cache.aget_or_set("k", lambda: 1, nonsense=1))
    assert asyncio.run(cache.aget_or_set("k", lambda: 1, 60, version=2, wait=5, expire=3)) == 1
    assert cache.get("k", version=2) == 1
