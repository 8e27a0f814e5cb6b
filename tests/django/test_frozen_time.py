"""Tools that stop the time in tests stop no deadline, no renewal and no wait."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from functools import partial

import pytest

from django_redislock.core import AsyncLock, Lock, clock
from django_redislock.exceptions import AcquireTimeout, LockLost
from tests.support import wait_until
from tests.support.cache_programs import cache_at


def test_the_clock_is_none_that_freezegun_puts_its_own_in_place_of():
    import freezegun

    with freezegun.freeze_time("2012-01-14") as frozen:
        before = clock.monotonic()
        frozen.tick(3600)
        assert clock.monotonic() - before < 600
        assert isinstance(
            clock.monotonic, partial
        )  # on each platform: freezegun looks for the functions of `time` themselves


@contextmanager
def by_freezegun():
    import freezegun

    with freezegun.freeze_time("2012-01-14", real_asyncio=True) as frozen:
        yield lambda seconds: frozen.tick(seconds)


@contextmanager
def by_time_machine():
    import time_machine

    with time_machine.travel("2012-01-14", tick=False) as frozen:
        yield lambda seconds: frozen.shift(seconds)


@pytest.fixture(params=[by_freezegun, by_time_machine])
def frozen(request):
    """What stops the time in a block, and gives a function that lets it jump; not around pytest's own measurements."""
    return request.param


def test_a_lock_is_held_through_a_jump_of_stopped_time_and_lost_at_the_end_of_its_real_life(client, frozen):
    with frozen() as jump:
        with Lock(client, "a", expire=60, auto_renewal=False) as lock:
            jump(3600)
            lock.raise_if_lost()
        lock = Lock(client, "b", expire=0.1, auto_renewal=False)
        lock.acquire()
        wait_until(lambda: lock.lost is not None)
        with pytest.raises(LockLost):
            lock.release()


@pytest.mark.slow
def test_a_lock_is_renewed_while_time_stands_still(client, frozen):
    with frozen(), Lock(client, "a", expire=0.6) as lock:
        lease = lock._leases[threading.current_thread()]
        begin = lease.deadline
        wait_until(lambda: lease.deadline > begin + 0.9)
        lock.raise_if_lost()


def test_a_wait_ends_while_time_stands_still(client, frozen):
    with frozen():
        with Lock(client, "a"), pytest.raises(AcquireTimeout), Lock(client, "a", timeout=0.1):
            raise AssertionError("two holders")
        Lock(client, "b", expire=0.2, auto_renewal=False).acquire()
        with Lock(client, "b", timeout=60) as second:
            assert second.owned()


def test_a_task_waits_while_time_stands_still(client, frozen):
    with frozen():

        async def wait():
            with pytest.raises(AcquireTimeout):
                async with AsyncLock(client, "a", timeout=0.1):
                    raise AssertionError("two holders")

        with Lock(client, "a"):
            asyncio.run(asyncio.wait_for(wait(), 60))


def test_a_value_is_computed_and_waited_for_while_time_stands_still(redis_url, frozen):
    with frozen():
        cache = cache_at(redis_url)
        began, goes_on, got = threading.Event(), threading.Event(), []

        def compute():
            began.set()
            goes_on.wait(60)
            return 5

        threads = [threading.Thread(target=lambda: got.append(cache.get_or_set("k", compute, 60))) for _ in range(2)]
        for thread in threads:
            thread.start()
        began.wait(60)
        assert cache.get_or_set("k", compute, 60, wait=0.1, on_wait_timeout=lambda: "none yet") == "none yet"
        goes_on.set()
        for thread in threads:
            thread.join(60)
        assert got == [5, 5]
