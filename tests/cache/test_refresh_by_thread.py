"""``refresh="thread"``: a few threads do it, also for tasks whose event loop ends before the refresh."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextvars import ContextVar

import asgiref.sync
import pytest
from asgiref.sync import async_to_sync
from django.utils import translation

from django_redislock.cache import refresh
from tests.support import wait_until
from tests.support.cache_programs import Work, cache_at, never
from tests.support.interruptions import interrupted_at_each_point

OPTIONS = {"stale": 30, "refresh": "thread"}
TENANT: ContextVar[str] = ContextVar("tenant of a refresh", default="public")


def refreshing() -> int:
    return sum(thread.name == "redislock-refresh" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _all_threads_end():
    yield
    wait_until(lambda: not refreshing())
    assert not refresh._workers._known
    assert refresh._workers._free.qsize() == refresh.WORKERS


def run_by_asgiref(coroutine):
    async def main():
        return await coroutine

    return async_to_sync(main)()


@pytest.mark.parametrize("run", [asyncio.run, run_by_asgiref])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_value_is_refreshed_although_the_loop_of_its_caller_ends_at_once(cache, run, asynchronous):
    """As with asynchronous views under WSGI, `async_to_sync` in a task of Celery, and `asyncio.run`."""
    cache.set("k", "old", 25)

    def compute():
        return translation.get_language(), TENANT.get()

    async def acompute():
        await asyncio.sleep(0)
        return compute()

    async def ask():
        with translation.override("de"):
            TENANT.set("ours")
            return await cache.aget_or_set("k", acompute if asynchronous else compute, 60, **OPTIONS)

    assert run(ask()) == "old"
    wait_until(lambda: cache.get("k") == ("de", "ours"))


def test_a_loop_that_goes_on_refreshes_in_a_task(cache):
    cache.set("k", "old", 25)
    seen = []

    async def compute():
        seen.append((threading.get_ident(), asyncio.current_task().get_name()))
        return "new"

    async def main():
        assert await cache.aget_or_set("k", compute, 60, **OPTIONS) == "old"
        while await cache.aget("k") != "new":
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert seen == [(threading.get_ident(), "redislock-refresh")]


def test_many_due_values_are_refreshed_by_a_few_threads(cache):
    works = {f"k{number}": Work("new") for number in range(30)}
    cache.set_many(dict.fromkeys(works, "old"), 25)
    for key, work in works.items():
        for _ in range(2):
            assert cache.get_or_set(key, work, 60, **OPTIONS) == "old"
    wait_until(lambda: sum(work.running.is_set() for work in works.values()) == refresh.WORKERS)
    assert refreshing() == refresh.WORKERS
    assert refresh._workers._jobs.qsize() == len(works) - refresh.WORKERS, "each value waits once"
    for work in works.values():
        work.end.set()
    wait_until(lambda: cache.get_many(works) == dict.fromkeys(works, "new"))
    assert [work.calls for work in works.values()] == [1] * len(works)


def test_no_more_than_the_limit_wait_for_a_thread(cache, monkeypatch):
    monkeypatch.setattr(refresh, "MAX_WAITING", refresh.WORKERS + 1)
    works = [Work("new") for _ in range(refresh.WORKERS)]
    cache.set_many({f"k{number}": "old" for number in range(10)}, 25)
    for number, work in enumerate(works):
        cache.get_or_set(f"k{number}", work, 60, **OPTIONS)
    assert cache.get_or_set("k8", lambda: "new", 60, **OPTIONS) == "old"
    assert cache.get_or_set("k9", never, 60, **OPTIONS) == "old"
    for work in works:
        work.end.set()
    wait_until(lambda: cache.get("k8") == "new")
    assert cache.get("k9") == "old"
    assert cache.get_or_set("k9", lambda: "new", 60, **OPTIONS) == "old"
    wait_until(lambda: cache.get("k9") == "new")


def test_a_computation_that_ends_the_thread_does_not_end_the_refreshes(cache, caplog):
    cache.set_many({f"k{number}": "old" for number in range(8)}, 25)
    for number in range(2 * refresh.WORKERS):
        assert cache.get_or_set(f"k{number}", exit_thread, 60, **OPTIONS) == "old"
    wait_until(lambda: caplog.text.count("The refresh of the value of") == 2 * refresh.WORKERS)
    cache.set("k", "old", 25)
    assert cache.get_or_set("k", lambda: "new", 60, **OPTIONS) == "old"
    wait_until(lambda: cache.get("k") == "new")


def exit_thread():
    raise SystemExit


class RaisingHandler(logging.Handler):
    def emit(self, record):
        raise ZeroDivisionError("handler of the log")


@pytest.mark.parametrize("raising", ["handler of the log", "close"])
def test_an_error_that_comes_out_of_a_refresh_takes_no_thread_away(cache, monkeypatch, caplog, raising):
    """After four of them the process refreshed nothing more, and said nothing."""

    def close_all():
        raise ZeroDivisionError("close")

    cache.set_many({f"k{number}": "old" for number in range(2 * refresh.WORKERS)}, 25)
    with monkeypatch.context() as broken:
        if raising == "close":
            broken.setattr(refresh.connections, "close_all", close_all)
        else:
            broken.setattr(refresh.log, "handlers", [RaisingHandler()])
        for number in range(2 * refresh.WORKERS):
            assert cache.get_or_set(f"k{number}", exit_thread, 60, **OPTIONS) == "old"
        wait_until(lambda: not refresh._workers._known and not refreshing())
    assert caplog.text.count("An error came out of a refresh") == (2 * refresh.WORKERS if raising == "close" else 0)
    cache.set("k", "old", 25)
    assert cache.get_or_set("k", lambda: "new", 60, **OPTIONS) == "old"
    wait_until(lambda: cache.get("k") == "new")


@pytest.mark.processes
def test_a_forked_child_refreshes_although_the_threads_of_its_parent_were_busy(redis_url, backend, run_python):
    process = run_python(fork_while_refreshing, redis_url, backend)
    assert process.wait(60) == 0


def fork_while_refreshing(url: str, backend: str) -> None:
    cache = cache_at(url, backend)
    works = [Work("new") for _ in range(refresh.WORKERS)]
    for number, work in enumerate(works):
        cache.set(f"p{number}", "old", 25)
        cache.get_or_set(f"p{number}", work, 60, **OPTIONS)
    cache.set("c", "old", 25)
    child = os.fork()
    if not child:
        assert cache.get_or_set("c", lambda: "new", 60, **OPTIONS) == "old"
        wait_until(lambda: cache.get("c") == "new")
        os._exit(0)
    ended, status = os.waitpid(child, 0)
    assert (ended, os.waitstatus_to_exitcode(status)) == (child, 0)
    for work in works:
        work.end.set()


def test_without_the_private_function_of_asgiref_the_context_of_the_caller_is_kept(cache, monkeypatch):
    assert callable(asgiref.sync._restore_context), "the fallback is used where asgiref has it no more"
    monkeypatch.setattr(refresh, "_restore", None)
    cache.set("k", "old", 25)
    token = TENANT.set("ours")
    try:
        assert cache.get_or_set("k", TENANT.get, 60, **OPTIONS) == "old"
    finally:
        TENANT.reset(token)
    wait_until(lambda: cache.get("k") == "ours")


@pytest.mark.interrupts
def test_a_time_limit_at_any_point_of_the_start_leaves_no_key_that_is_never_refreshed_again():
    workers, done = [refresh.Workers() for _ in range(500)], []

    def start(point):
        workers[point].do("k", lambda: None)

    for point in interrupted_at_each_point(start, refresh):
        wait_until(lambda point=point: not workers[point]._known)
        workers[point].do("k", lambda point=point: done.append(point))
        wait_until(lambda point=point: done[-1:] == [point])
    assert len(done) > 20
