"""Waiters that are killed or paused, also while they are handed the lock."""

from __future__ import annotations

import time

import psutil
import pytest

from django_redislock.core import Lock
from django_redislock.core.keys import lock_keys
from tests.support import BUSY, lived, lock_programs, queued, wait_until

pytestmark = pytest.mark.processes


def frozen_waiter(client, run_python, redis_url, where):
    """Return a process that waits for the lock "a" and is frozen at that place."""
    queue = lock_keys("redislock", "a").queue
    if where == "asleep":
        process = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: client.zcard(queue) == 1)
        process.pause()
    else:
        process = run_python(lock_programs.freeze_on_the_way_in, redis_url, "a", where)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert client.zcard(queue) == (where != "register")
    return process


# Frozen between the try and the subscription, between the place in the queue and the sleep, or asleep.
MOMENTS = pytest.mark.parametrize("where", ["register", "wait", "asleep"])


@MOMENTS
def test_a_waiter_killed_while_it_is_handed_the_lock_is_passed_over(client, redis_url, run_python, where):
    keys = lock_keys("redislock", "a")
    with Lock(client, "a", expire=60):
        doomed = frozen_waiter(client, run_python, redis_url, where)
        heir = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: client.zcard(keys.queue) == 1 + (where != "register"))
    freed = time.time()
    doomed.kill()
    assert heir.wait_for(event="held")["at"] - freed < 1 + BUSY
    heir.send()
    heir.finish()
    assert not client.exists(keys.lock, keys.queue)


@MOMENTS
def test_a_waiter_paused_while_it_is_handed_the_lock_takes_it_when_it_goes_on(client, redis_url, run_python, where):
    """Paused for longer than the lock is kept for it."""
    with Lock(client, "a", expire=60):
        paused = frozen_waiter(client, run_python, redis_url, where)
    lived(0.8)
    resumed = time.time()
    paused.resume()
    assert paused.wait_for(event="held")["at"] - resumed < 1 + BUSY


def test_a_waiter_frozen_while_it_is_handed_the_lock_is_passed_over_and_keeps_its_place(
    make_lock, client, redis_url, run_python
):
    with make_lock(client, "a", expire=60):
        frozen = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: queued(client, "a") == 1)
        heir = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: queued(client, "a") == 2)
        last = run_python(lock_programs.wait_and_hold, redis_url, "a", {}, 60, {})
        wait_until(lambda: queued(client, "a") == 3)
        frozen.pause()
    freed = time.time()
    assert heir.wait_for(event="held")["at"] - freed < 1 + BUSY
    frozen.resume()
    wait_until(lambda: queued(client, "a") == 2)
    heir.send()
    assert frozen.wait_for(event="held"), "before the one who came after it"
    assert last.lines[-1]["event"] == "waiting"
    frozen.send()
    assert last.wait_for(event="held")
    last.send()
