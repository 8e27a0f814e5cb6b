"""Time: the words of other packages are answered with ours, and tools that stop the time in tests stop no lock."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from django_redislock import alock, lock, locked, locked_atomic, rlock
from django_redislock.cache.backends import base
from django_redislock.core import AsyncLock, AsyncQuorumLock, Lock, QuorumLock, clock
from django_redislock.exceptions import AcquireTimeout, LockLost
from tests.support import wait_until
from tests.support.cache_programs import Work, cache_at
from tests.support.locks import AsyncRLock, RLock


def atomically(name, **options):
    with locked_atomic(name, **options):
        pass


def by_client(kind):
    return lambda name, **options: kind("no client", name, **options)


MAKERS = {
    "lock": lock,
    "alock": alock,
    "rlock": rlock,
    "locked": locked,
    "locked_atomic": atomically,
    "Lock": by_client(Lock),
    "RLock": by_client(RLock),
    "AsyncLock": by_client(AsyncLock),
    "AsyncRLock": by_client(AsyncRLock),
    "QuorumLock": by_client(QuorumLock),
    "AsyncQuorumLock": by_client(AsyncQuorumLock),
}


WAITS, LIVES = (
    "how long to wait for the lock is timeout=, in seconds",
    "the expiry without renewal is expire=, in seconds",
)
ANSWERS = {"wait": WAITS, "blocking_timeout": WAITS, "ttl": LIVES, "lock_timeout": LIVES}
ANSWERS |= {"tiemout": r"did you mean 'timeout'\?"}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_word_that_is_not_ours_is_a_type_error_with_the_word_that_is(maker):
    for word, answer in ANSWERS.items():
        with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{word}': {answer}$"):
            MAKERS[maker]("name", **{word: 3})


def test_a_word_that_resembles_none_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match=r"^lock\(\) got an unexpected keyword argument 'zebra'$"):
        lock("name", zebra=3)


def test_the_timeout_of_a_cache_lock_is_told_once_to_be_its_life(redis_url, backend, caplog):
    cache = cache_at(redis_url, backend)
    base.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "django_redislock"):
        cache.lock("a", expire=2)
        cache.lock("a", blocking_timeout=2)
        cache.lock("a", timeout=2, blocking_timeout=2)
        cache.lock("a", timeout=2, blocking=False)
        assert not caplog.messages
        cache.lock("a", timeout=2)
        cache.lock("b", timeout=3)
    (message,) = caplog.messages
    assert "is the expiry of the lock" in message
    assert "blocking_timeout=" in message


# Tools that stop the time in tests stop no deadline, no renewal and no wait


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
    with frozen(), Lock(client, "a", expire=3) as lock:
        lease = lock._leases[threading.current_thread()]
        begin = lease.deadline
        wait_until(lambda: lease.deadline > begin + 1.5 or lease.loss)
        lock.raise_if_lost()


def test_a_wait_of_a_thread_or_a_task_ends_while_time_stands_still(client, frozen):
    async def wait():
        with pytest.raises(AcquireTimeout):
            async with AsyncLock(client, "a", timeout=0.1):
                raise AssertionError("two holders")

    with frozen():
        with Lock(client, "a"), pytest.raises(AcquireTimeout), Lock(client, "a", timeout=0.1):
            raise AssertionError("two holders")
        with Lock(client, "a"):
            asyncio.run(asyncio.wait_for(wait(), 60))
        Lock(client, "b", expire=0.2, auto_renewal=False).acquire()
        with Lock(client, "b", timeout=60) as second:
            assert second.owned()


def test_a_value_is_computed_and_waited_for_while_time_stands_still(redis_url, frozen):
    with frozen(), ThreadPoolExecutor(2) as pool:
        cache, work = cache_at(redis_url), Work()
        got = [pool.submit(cache.get_or_set, "k", work, 60) for _ in range(2)]
        work.running.wait(60)
        assert cache.get_or_set("k", work, 60, wait=0.1, on_wait_timeout=lambda: "none yet") == "none yet"
        work.end.set()
        assert [each.result(60) for each in got] == ["v"] * 2
