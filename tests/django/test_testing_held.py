"""`django_redislock.testing.held`: a lock that somebody else holds."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from django.core.cache import caches

from django_redislock import AcquireTimeout, LockBackendError, alock, asemaphore, lock, reset_all, rlock
from django_redislock.core import held_locks
from django_redislock.testing import held, unlocked

LOCMEM = {"default": {"BACKEND": "django_redislock.cache.LocMemCache"}}


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("somebody else")]


@pytest.fixture(autouse=True)
def _nothing_is_left(client):
    yield
    assert (threads(), list(held_locks(client))) == ([], [])


def test_a_block_meets_the_conflict_and_the_lock_is_free_afterwards(client):
    with held("a") as theirs:
        assert [info.id for info in held_locks(client)] == [theirs.id]
        for mine in (lock("a", blocking=False), rlock("a", blocking=False)):
            with pytest.raises(AcquireTimeout), mine:
                pass
        assert not lock("a").owned()
    with lock("a", blocking=False):
        pass


def test_a_decorated_function_meets_the_conflict_each_time(client):
    @held("a")
    def tries():
        return lock("a").acquire(blocking=False)

    assert [tries(), tries()] == [False, False]


def test_the_fixture_holds_until_the_end_of_the_test(redislock_held):
    redislock_held("a")
    redislock_held("b")
    assert not lock("a").acquire(blocking=False)
    assert not lock("b").acquire(blocking=False)


@pytest.mark.parametrize("kind", ["LocMemCache", "RedisCache", "DjangoRedisCache"])
def test_a_lock_of_a_cache_is_held(settings, redis_url, kind):
    location = "here" if kind == "LocMemCache" else redis_url
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{kind}", "LOCATION": location}}
    cache = caches["default"]
    with held(cache.lock("k")):
        assert not cache.lock("k").acquire(blocking=False)
    assert cache.lock("k").acquire(blocking=False)
    cache.lock("k").reset()


def test_a_lock_that_is_not_free_is_named_with_its_holder(client):
    with (
        lock("a", label="the import"),
        pytest.raises(AssertionError, match="'a' is not free: the import on"),
        held("a"),
    ):
        pass


def test_a_lock_that_the_block_force_releases_is_no_error(client):
    with held("a"):
        assert reset_all() == 1
        with lock("a", blocking=False):
            pass


def test_errors_of_the_acquisition_are_raised(settings):
    with pytest.raises(ValueError, match="name"), held(""):
        pass
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0", "RETRY_FOR": 0}
    with pytest.raises(LockBackendError), held("a"):
        pass


@pytest.mark.parametrize("theirs", [alock, partial(asemaphore, limit=1)])
def test_a_lock_for_tasks_is_refused_because_its_coroutine_would_acquire_nothing(theirs):
    with pytest.raises(TypeError, match="for tasks"), held(theirs("a")):
        pytest.fail("the block ran, and nobody held the lock")


def test_while_all_locks_are_granted_none_can_be_held():
    with unlocked(), pytest.raises(RuntimeError, match="every lock is granted"), held("a"):
        pass
