"""``aget_or_set(refresh="thread")`` in a loop that goes on: tasks do it, with a thread and connections of their own."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db.backends.signals import connection_created
from django.utils import translation

from django_redislock.cache import refresh
from django_redislock.cache.lease import single_flight
from tests.support import until, wait_until
from tests.support.bank.models import Account
from tests.support.cache_programs import never

OPTIONS = {"stale": 30, "refresh": "thread"}
TENANT: ContextVar[str] = ContextVar("tenant of a caller", default="public")


@pytest.fixture(autouse=True)
def _no_pause():
    single_flight._paused.clear()


def at_rest():
    return not [task for task in asyncio.all_tasks() if task.get_name() == "redislock-refresh"]


def compute():
    return translation.get_language(), TENANT.get(), threading.current_thread().name


async def acompute():
    return await sync_to_async(compute)()


def directly(cache, default):
    async def view():
        async with ThreadSensitiveContext():
            TENANT.set("ours")
            with translation.override("de"):
                await sync_to_async(str)()  # as a view does that uses the database
                return await cache.aget_or_set("k", default, 60, **OPTIONS)

    return view()


def behind_a_middleware(cache, default):
    """Ask as an asynchronous view does behind a synchronous middleware, under ASGI."""

    async def view():
        return await cache.aget_or_set("k", default, 60, **OPTIONS)

    def middleware():
        TENANT.set("ours")
        with translation.override("de"):
            return async_to_sync(view)()

    async def server():
        async with ThreadSensitiveContext():
            return await sync_to_async(middleware)()

    return server()


@pytest.mark.parametrize("default", [compute, acompute])
@pytest.mark.parametrize("ask", [directly, behind_a_middleware])
def test_a_value_is_refreshed_when_the_request_and_its_thread_have_ended(cache, ask, default):
    """Behind a middleware it never was: "CurrentThreadExecutor already quit or is broken"."""
    cache.set("k", "old", 25)

    async def server():
        assert await ask(cache, default) == "old"
        await until(lambda: cache.get("k") != "old")
        await until(at_rest)

    asyncio.run(server())
    assert cache.get("k")[:2] == ("de", "ours")


@pytest.fixture
def opened():
    """The connections to the database that were opened."""
    found = []

    def note(connection, **kwargs):
        found.append(connection)

    connection_created.connect(note)
    yield found
    connection_created.disconnect(note)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_refreshes_use_a_few_connections_and_close_them(cache, database, opened, asynchronous):
    """Of 45 connections 42 stayed open, and 60 values that were due opened 60 at once."""
    keys = [f"k{number}" for number in range(20)]
    cache.set_many(dict.fromkeys(keys, "old"), 25)
    at_once = []

    def count():
        at_once.append(sum(connection.connection is not None for connection in opened))
        return Account.objects.count()

    async def count_in_thread():
        return await sync_to_async(count)()

    async def request(key):
        async with ThreadSensitiveContext():
            for _ in range(2):
                assert await cache.aget_or_set(key, count_in_thread if asynchronous else count, 60, **OPTIONS) == "old"

    async def server():
        await asyncio.gather(*map(request, keys))
        await until(at_rest)

    asyncio.run(server())
    assert cache.get_many(keys) == dict.fromkeys(keys, 1)
    assert len(opened) == len(keys), "each value is refreshed once"
    assert max(at_once) < refresh.WORKERS
    assert not [connection for connection in opened if connection.connection is not None]


def test_no_more_tasks_wait_than_the_limit(cache, monkeypatch):
    monkeypatch.setattr(refresh, "MAX_WAITING", refresh.WORKERS)
    keys = [f"k{number}" for number in range(refresh.WORKERS)]
    cache.set_many(dict.fromkeys([*keys, "more"], "old"), 25)

    async def main():
        end = asyncio.Event()

        async def wait():
            await end.wait()
            return "new"

        for key in keys:
            assert await cache.aget_or_set(key, wait, 60, **OPTIONS) == "old"
        assert await cache.aget_or_set("more", never, 60, **OPTIONS) == "old"
        end.set()
        await until(at_rest)
        assert cache.get_many(keys) == dict.fromkeys(keys, "new")
        assert await cache.aget_or_set("more", lambda: "new", 60, **OPTIONS) == "old"
        await until(at_rest)

    asyncio.run(main())
    assert cache.get("more") == "new"


def test_values_that_wait_for_a_task_when_the_loop_ends_are_refreshed_by_threads(cache):
    keys = [f"k{number}" for number in range(3 * refresh.WORKERS)]
    cache.set_many(dict.fromkeys(keys, "old"), 25)

    async def compute():
        await asyncio.sleep(0.001)
        return "new"

    async def main():
        for key in keys:
            assert await cache.aget_or_set(key, compute, 60, **OPTIONS) == "old"

    asyncio.run(main())
    wait_until(lambda: cache.get_many(keys) == dict.fromkeys(keys, "new"))
