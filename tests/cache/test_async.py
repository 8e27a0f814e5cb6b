"""aget_or_set is protected, too, and takes defaults of both kinds."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import SyncToAsync, ThreadSensitiveContext, async_to_sync, sync_to_async
from django.test import override_settings

from django_redislock.cache import cached
from django_redislock.cache.lease import single_flight
from django_redislock.core import Lock
from django_redislock.core.driver import os_threads
from django_redislock.core.keys import lock_keys
from django_redislock.core.watchdog import REPORTER, watchdog
from tests.support import destroy_generators, monitoring, until, wait_until, wait_until_collected
from tests.support.cache_programs import Work, cache_at, commands, followers, held, lease_elsewhere, never, waiters


@pytest.mark.parametrize(
    "default_of",
    [
        lambda work: work,
        lambda work: work.async_,
        lambda work: lambda: work.async_(),
        lambda work: functools.partial(work.async_),
    ],
    ids=["sync", "async", "a lambda that returns a coroutine", "partial"],
)
def test_tasks_and_threads_compute_once(cache, default_of):
    work = Work(["v"])

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


def test_a_sync_call_in_the_loop_does_not_wait_for_a_sync_view_that_needs_the_loop(cache):
    """It stopped the loop, and so the view, until its wait was over."""
    computing, asked = threading.Event(), threading.Event()

    async def of_the_loop():
        return "view's"

    def compute():
        computing.set()
        wait_until(lambda: asked.is_set() or followers())
        return async_to_sync(of_the_loop)()

    async def main():
        view = asyncio.create_task(sync_to_async(cache.get_or_set)("k", compute, 60))
        await until(computing.is_set)
        own = cache.get_or_set("k", lambda: asked.set() or "own", 60, wait=3, on_wait_timeout="raise")
        return own, await view

    assert asyncio.run(main()) == ("own", "view's")


def test_who_waits_blocks_no_other_work_and_starts_no_thread(cache):
    """Nor does it take the threads of the loop's own pool, however many wait; a hit takes none either."""
    work = Work(["v"])

    async def main():
        before = threading.active_count()
        tasks = [asyncio.ensure_future(cache.aget_or_set("k", work.async_, 60)) for _ in range(50)]
        await until(lambda: followers() == 49)
        watchdog = sum(thread.name.startswith("redislock-watchdog") for thread in threading.enumerate())
        assert threading.active_count() - watchdog <= before
        assert await sync_to_async(lambda: "sensitive")() == "sensitive"
        assert await asyncio.to_thread(lambda: "pool") == "pool"
        started = threading.active_count()
        work.end.set()
        assert await asyncio.gather(*tasks) == [["v"]] * 50
        assert await cache.aget_or_set("k", work.async_, 60) == ["v"]
        assert threading.active_count() <= started

    asyncio.run(asyncio.wait_for(main(), 30))


def test_options_are_those_of_get_or_set(cache):
    with pytest.raises(ValueError, match="wait"):
        asyncio.run(cache.aget_or_set("k", lambda: 1, wait=-1))
    assert asyncio.run(cache.aget_or_set("k", lambda: 1, 60, version=2, wait=5, expire=3)) == 1
    assert cache.get("k", version=2) == 1


@pytest.mark.parametrize("leader", ["thread", "task"])
def test_threads_and_tasks_of_a_process_share_one_flight(cache, client, leader):
    work = Work(["v"])
    first = threading.Event()

    def compute():
        first.set()
        return work()

    async def acompute():
        first.set()
        return await work.async_()

    async def main(pool):
        with monitoring(client) as sent:
            if leader == "thread":
                leading = asyncio.wrap_future(pool.submit(cache.get_or_set, "k", compute, 60))
            else:
                leading = asyncio.ensure_future(cache.aget_or_set("k", acompute, 60))
            await until(first.is_set)
            waiting = [asyncio.ensure_future(cache.aget_or_set("k", acompute, 60)) for _ in range(5)]
            waiting += [asyncio.wrap_future(pool.submit(cache.get_or_set, "k", compute, 60)) for _ in range(5)]
            await until(lambda: followers() == 10)
            work.end.set()
            values = await asyncio.gather(leading, *waiting)
        assert values == [["v"]] * 11
        assert sorted(commands(sent)) == ["EVALSHA"] * 2 + ["GET"] * 11

    cache.get_or_set("warm", lambda: 1)
    with ThreadPoolExecutor(12) as pool:

        async def warmed():
            await cache.aget_or_set("warm", lambda: 1)
            await cache.aget_or_set("warm too", lambda: 1)
            await main(pool)

        asyncio.run(asyncio.wait_for(warmed(), 30))
    assert work.calls == 1


def test_a_cancelled_leader_is_followed_by_another(cache, client):
    calls = []

    async def compute():
        calls.append(1)
        if len(calls) == 1:
            await asyncio.sleep(60)
        return "v"

    async def main():
        leader = asyncio.ensure_future(cache.aget_or_set("k", compute, 60))
        await until(lambda: calls)
        others = [asyncio.ensure_future(cache.aget_or_set("k", compute, 60)) for _ in range(5)]
        await until(lambda: followers() == 5)
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        assert await asyncio.wait_for(asyncio.gather(*others), 10) == ["v"] * 5

    asyncio.run(main())
    assert len(calls) == 2
    assert not held(client)


def test_plain_defaults_of_cancelled_callers_never_overlap(cache, client):
    """No thread can be interrupted: with impatient clients six threads computed the value at once."""
    work = Work(["v"])

    async def ask():
        async with ThreadSensitiveContext():
            return await cache.aget_or_set("k", work, 60)

    async def main():
        first = asyncio.create_task(ask())
        await until(work.running.is_set)
        for _ in range(2):
            first.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        second = asyncio.create_task(ask())
        await until(lambda: followers() or work.calls > 1)
        assert work.calls == 1
        assert held(client)
        work.end.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert asyncio.run(main()) == ["v"]
    assert work.calls == 2


def test_who_is_cancelled_before_a_thread_took_the_default_does_not_wait_for_it(cache, client):
    async def main():
        busy, end = threading.Event(), threading.Event()
        other = asyncio.create_task(sync_to_async(lambda: busy.set() or end.wait(30))())
        await until(busy.is_set)
        try:
            task = asyncio.create_task(cache.aget_or_set("k", never, 60))
            await until(SyncToAsync.single_thread_executor._work_queue.qsize)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not other.done()
        finally:
            end.set()
        await other

    asyncio.run(main())
    wait_until(lambda: not held(client))


def test_a_cancelled_follower_disturbs_nobody(cache):
    work = Work(["v"])

    async def main():
        tasks = [asyncio.ensure_future(cache.aget_or_set("k", work.async_, 60)) for _ in range(5)]
        await until(lambda: followers() == 4)
        tasks[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        work.end.set()
        return await asyncio.gather(*tasks[:2], *tasks[3:])

    assert asyncio.run(main()) == [["v"]] * 4
    assert work.calls == 1


@pytest.mark.one_server("the lease has keys in the slot of its value there")
def test_one_who_waits_for_another_process_and_is_cancelled_leaves_no_trace(cache, client):
    """The lock is held by somebody else: by a plain lock of that name here."""

    async def main():
        with Lock(client, "cache::1:k"):
            task = asyncio.ensure_future(cache.aget_or_set("k", lambda: 1, 60))
            queue = lock_keys("redislock", "cache::1:k").queue
            await until(lambda: client.zcard(queue) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: client.zcard(queue) == 0)
        assert await cache.aget_or_set("k", lambda: "v", 60) == "v"

    asyncio.run(main())


def test_without_a_lease_it_takes_defaults_of_every_kind_all_the_same(cache):
    async def compute():
        return "v"

    with override_settings(DJANGO_REDISLOCK={"ENABLED": False}):
        assert asyncio.run(cache.aget_or_set("k", compute)) == "v"
    assert asyncio.run(cache.aget_or_set("l", compute, 0)) == "v"
    assert asyncio.run(cache.aget_or_set("m", compute, lock=False)) == "v"
    assert asyncio.run(cache.aget_or_set("n", 5, 60)) == cache.get("n") == 5
    assert cache.get("k") == "v"
    assert cache.get("l") is None
    assert cache.get("m") == "v"


def test_a_default_that_needs_the_thread_of_a_caller_is_not_waited_for_by_it(cache):
    """`sync_to_async` has one thread: who waits there keeps the default from going on."""
    asked = threading.Event()

    async def work():
        while not asked.is_set():
            await asyncio.sleep(0.01)
        return await sync_to_async(lambda: "v")()

    def ask():
        asked.set()
        return cache.get_or_set("k", lambda: "own", 60)

    async def main():
        first = asyncio.ensure_future(cache.aget_or_set("k", work, 60))
        await until(lambda: list(single_flight._flights))
        return await sync_to_async(ask)(), await first

    assert asyncio.run(asyncio.wait_for(main(), 20)) in (("own", "own"), ("own", "v"))


class Asking:
    async def __call__(self, value="v"):
        return value


@pytest.mark.parametrize("default", [Asking(), functools.partial(Asking(), "v")], ids=["object", "partial"])
def test_an_object_with_an_asynchronous_call_is_a_default(cache, default):
    assert asyncio.run(cache.aget_or_set("k", default)) == "v"
    assert asyncio.run(cache.aget_or_set_many(["l"], lambda keys: dict.fromkeys(keys, "v"))) == {"l": "v"}


@pytest.mark.parametrize("argument", ["should_cache", "on_wait_timeout"])
@pytest.mark.parametrize("function", [Asking(), Asking().__call__], ids=["object", "method"])
def test_coroutine_functions_are_refused_where_they_are_not_awaited(cache, argument, function):
    with pytest.raises(TypeError, match=rf"{argument} must be a plain function"):
        cache.get_or_set("k", lambda: 1, **{argument: function})
    with pytest.raises(TypeError, match=rf"{argument} must be a plain function"):
        asyncio.run(cache.aget_or_set("k", lambda: 1, **{argument: function}))


def test_an_unknown_option_is_named_with_the_function_that_was_called(cache):
    with pytest.raises(TypeError, match=r"^aget_or_set\(\) got an unexpected keyword argument 'waitt'"):
        asyncio.run(cache.aget_or_set("k", lambda: 1, waitt=3))
    with pytest.raises(TypeError, match=r"^get_or_set_many\(\) got an unexpected keyword argument 'waitt'"):
        cache.get_or_set_many(["k"], dict.fromkeys, waitt=3)
    with pytest.raises(TypeError, match=r"^cached\(\) got an unexpected keyword argument 'waitt'"):
        cached(60, waitt=3)


# Event loops that are closed under tasks: nothing stays leased or queued


KEYS = [f"k{number}" for number in range(10)]


@pytest.mark.parametrize(
    ("backend", "first"),
    [("RedisCache", "any"), ("RedisCache", "under_leases"), ("RedisCache", "_ask_and_wait"), ("ClusterCache", "any")],
)
@pytest.mark.parametrize("what", ["computes", "computes many", "waits"])
def test_when_a_loop_is_closed_under_tasks_no_lease_stays(redis_url, backend, client, monkeypatch, what, first):
    """Whatever the garbage collector destroys first."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Python warns of what such a loop leaves open
    cache = cache_at(redis_url, backend)
    running = []

    async def compute(keys=None):
        running.append(1)
        await asyncio.sleep(60)

    async def main():
        if what == "computes many":
            tasks = [asyncio.create_task(cache.aget_or_set_many(KEYS, compute, 60))]
        else:
            tasks = [asyncio.create_task(cache.aget_or_set(key, compute, 60)) for key in KEYS]
        await until(lambda: waiters(client) == len(KEYS) if what == "waits" else len(running) == len(tasks))
        assert len(held(client)) == len(KEYS)
        return tasks

    others = [lease_elsewhere(client, key, expire=600) for key in KEYS] if what == "waits" else []
    for other in others:
        other.acquire()
    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(main())
    loop.close()
    destroy_generators(first)
    while tasks:
        tasks.pop()._log_destroy_pending = False
    gc.collect()
    if what == "waits":
        # Redis may know a waiter before its task has read the reply: then the next loop sends the undo.
        asyncio.run(cache.aget_or_set("next", lambda: 1, 60))
    wait_until(lambda: not waiters(client), timeout=10)
    for other in others:
        other.release()
    wait_until(lambda: not held(client), timeout=10)
    wait_until_collected(loop)
    # The watchdog's report of what is garbage may not come into the log of another test.
    wait_until(lambda: not any(each._abandoned for each in watchdog.of_servers) and not os_threads.running(REPORTER))
