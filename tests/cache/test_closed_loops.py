"""Event loops that are closed under tasks which compute values or wait for them: nothing stays leased or queued."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from django_redislock.core.driver import os_threads
from django_redislock.core.renewals import REPORTER
from django_redislock.core.watchdog import watchdog
from tests.support import destroy_generators, until, wait_until, wait_until_collected
from tests.support.cache_programs import cache_at, held, lease_elsewhere, waiters

KEYS = [f"k{number}" for number in range(10)]


@pytest.mark.parametrize("first", ["any", "under_leases", "request_lease"])
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
