"""The idioms of redis-py's and django-redis's documentation of locks: each test runs with theirs and with ours."""

from __future__ import annotations

import asyncio
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

from django_redislock import exceptions
from django_redislock.core import AsyncLock, Lock, held_locks
from django_redislock.core.redis_py import AsyncRedisPyLock, RedisPyLock
from tests.support import Proxy, wait_until
from tests.support.cache_programs import base_at, cache_at

THEIRS, OURS = "django-redis", ("RedisCache", "DjangoRedisCache")


@pytest.fixture(params=[THEIRS, *OURS])
def cache(request, redis_url):
    """A cache of django-redis, and each of ours."""
    return base_at(redis_url) if request.param == THEIRS else cache_at(redis_url, request.param)


@pytest.fixture(params=OURS)
def ours(request, redis_url):
    return cache_at(redis_url, request.param)


BRIEFLY = [{"blocking": False}, {"blocking_timeout": 0.2}, {"blocking": False, "blocking_timeout": 9}]


def elsewhere(function):
    """Return what the function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(20)


def token_of(lock):
    """Return the token of the caller's acquisition as redis-py shows it, None when there is none: our `id`."""
    if not isinstance(lock, Lock):
        return lock.local.token
    try:
        return lock.id and lock.id.encode()
    except exceptions.NotAcquired:
        return None


@pytest.fixture
def ttl(client):
    """``ttl(lock)`` returns the seconds left of the lock's life."""
    return lambda lock: client.pttl(lock._keys.lock if isinstance(lock, Lock) else lock.name) / 1000


def test_acquire_and_release(cache):
    lock, other = cache.lock("somekey", timeout=10), cache.lock("somekey", timeout=10)
    assert (token_of(lock), lock.locked(), lock.owned()) == (None, False, False)
    assert lock.acquire(blocking=True)
    assert isinstance(token_of(lock), bytes)
    assert (lock.locked(), lock.owned(), other.locked(), other.owned()) == (True, True, True, False)
    assert not lock.acquire(blocking=False), "not again by a try"
    assert lock.release() is None
    assert (token_of(lock), lock.locked(), lock.owned()) == (None, False, False)


def test_acquire_uses_what_the_lock_was_made_with_or_what_it_is_given(cache):
    with cache.lock("a"):
        for options in BRIEFLY:
            assert cache.lock("a", **options).acquire() is False
            assert cache.lock("a").acquire(**options) is False
            with pytest.raises(LockError), cache.lock("a", **options):
                raise AssertionError("two holders")
        assert not cache.lock("a", blocking_timeout=0.1).acquire(blocking=True)
        assert not cache.lock("a", blocking=False, blocking_timeout=0.1).acquire(blocking=True)
        assert not cache.lock("a", blocking=False).acquire(blocking_timeout=60)
        assert not cache.lock("a", blocking=False).acquire(blocking=None)
        assert not cache.lock("a", blocking_timeout=0.1).acquire(blocking_timeout=None)
    for number, options in enumerate(BRIEFLY):
        assert cache.lock(f"free {number}", timeout=5, **options).acquire() is True


def test_arguments_by_position_are_in_redis_pys_order(cache, client):
    with cache.lock("a"):
        assert not cache.lock("a").acquire(0.05, False)
        assert not cache.lock("a").acquire(0.05, True, 0.1)
    lock = cache.lock("a", None, 10)
    assert lock.acquire(0.05, True, 0.1, "mine")
    assert token_of(lock) == b"mine"
    lock.release()


def test_the_lock_is_made_by_position_in_django_rediss_order(cache, ttl):
    with cache.lock("a", 2, 10, 0.05, True, 0.1) as lock:
        assert 9 < ttl(lock) <= 10
        assert not cache.lock("a", 2, 10, 0.05, False).acquire()
        assert cache.lock("a", 3, 10, 0.05, False).acquire(), "another version"
        assert not cache.lock("a", 2, 10, 0.05, True, 0.1, None, True).acquire()


def test_the_token_of_an_acquisition_may_be_given(cache):
    for token in ("as-text", b"as-bytes"):
        lock = cache.lock("a", timeout=10)
        assert lock.acquire(blocking=False, token=token)
        assert token_of(lock) == (token.encode() if isinstance(token, str) else token)
        lock.release()
        assert token_of(lock) is None


def test_two_who_acquire_by_one_token_keep_each_other_out(cache, ttl):
    lock, other = cache.lock("a", timeout=20), cache.lock("a", timeout=90)
    assert lock.acquire(token="host")
    assert not elsewhere(lambda: other.acquire(blocking=False, token="host"))
    assert ttl(lock) <= 20, "nor does it live longer"
    assert not elsewhere(lambda: other.acquire(blocking_timeout=0.3, token="host"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: (other.acquire(token="host"), other.release()))
        lock.release()
        assert waiting.result(20)[0]


def test_a_lock_is_released_elsewhere_by_its_token(cache):
    lock = cache.lock("a", timeout=20)
    assert lock.acquire()
    token = token_of(lock)

    def release():
        other = cache.lock("a", **{"id": token.decode()} if isinstance(lock, Lock) else {})
        if not isinstance(lock, Lock):
            other.local.token = token
        assert other.owned()
        other.release()

    elsewhere(release)
    assert not lock.locked()


def test_extend_adds_to_what_is_left_or_sets_it_and_reacquire_gives_the_lock_its_life_again(cache, ttl):
    with cache.lock("a", timeout=10) as lock:
        assert lock.extend(10) is True
        assert 15 < ttl(lock) <= 20
        assert lock.extend(additional_time=0.5) is True
        assert 15 < ttl(lock) <= 20.5
        assert lock.reacquire() is True
        assert ttl(lock) <= 10
        assert lock.extend(60, True) is True
        assert 55 < ttl(lock) <= 60
        assert lock.extend(5, replace_ttl=True) is True
        assert ttl(lock) <= 5
        assert lock.reacquire() is True
        assert 5 < ttl(lock) <= 10


WORDS = {"release": lambda lock: lock.release(), "reacquire": lambda lock: lock.reacquire()}
WORDS |= {"extend": lambda lock: lock.extend(1)}


@pytest.mark.parametrize("word", WORDS)
def test_what_is_not_held_is_a_lock_error_and_what_was_lost_is_not_owned_any_more(cache, client, word):
    lock = cache.lock("a", timeout=10)
    with pytest.raises(LockError):
        WORDS[word](lock)
    assert lock.acquire()
    lock.release()
    with pytest.raises(LockError):
        WORDS[word](lock)
    assert lock.acquire()
    client.flushdb()
    with pytest.raises(LockNotOwnedError):
        WORDS[word](lock)


def test_a_block_that_lost_its_lock_ends_with_an_error_that_redis_py_knows(cache, client):
    for error in (LockNotOwnedError, LockError, redis.RedisError, ValueError):
        with pytest.raises(error), cache.lock("a", timeout=10):
            client.flushdb()


def test_another_thread_has_a_token_of_its_own(cache):
    lock = cache.lock("a", timeout=10)
    assert lock.acquire()
    # Theirs knows no token in a thread that did not make the lock.
    expected = LockError if isinstance(lock, Lock) else (LockError, AttributeError)

    def release():
        with pytest.raises(expected):
            lock.release()

    elsewhere(release)
    lock.release()


def test_without_thread_local_any_thread_may_release_and_the_lock_may_be_acquired_again(cache, caplog):
    lock = cache.lock("a", timeout=10, thread_local=False)
    assert token_of(lock) is None
    for _ in range(2):
        assert lock.acquire()
        token = token_of(lock)
        assert elsewhere(lambda: token_of(lock)) == token
        assert elsewhere(lambda: lock.extend(1)) is True
        assert elsewhere(lock.owned)
        assert not elsewhere(lambda: lock.acquire(blocking=False)), "threads still exclude each other"
        assert not elsewhere(lambda: lock.acquire(blocking_timeout=0.2))
        elsewhere(lock.release)
        assert token_of(lock) is None
    assert lock.acquire(token="mine")
    elsewhere(lock.release)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_lock_ends_with_its_timeout(cache):
    lock = cache.lock("a", timeout=0.2)
    assert lock.acquire()
    wait_until(lambda: not lock.locked())
    with pytest.raises(LockNotOwnedError):
        lock.release()


# What is ours alone


def test_the_words_of_python_redis_lock_by_position(ours, client):
    with ours.lock("a"):
        assert not ours.lock("a").acquire(False)
        started = time.monotonic()
        assert not ours.lock("a").acquire(True, 0.1)
        assert time.monotonic() - started >= 0.1
        assert not ours.lock("a").acquire(blocking=True, timeout=0.1)
    with ours.lock("a", expire=10) as lock:
        lock.extend(expire=60)
        assert 55 < lock.ttl() <= 60
        lock.extend()
        assert [info.expire for info in held_locks(client)] == [60]


def test_bad_words(ours):
    lock = ours.lock("a", timeout=10)
    with pytest.raises(TypeError, match="timeout or blocking_timeout"):
        lock.acquire(blocking_timeout=1, timeout=1)
    for token, error in ((5, TypeError), ("", ValueError), ("a b", ValueError), (b"\xff", ValueError)):
        with pytest.raises(error, match="token"):
            lock.acquire(token=token)
    with pytest.raises(ValueError, match="blocking_timeout"):
        lock.acquire(blocking_timeout=-1)
    with lock:
        for seconds, error in ((0, ValueError), ("5", TypeError), (float("nan"), ValueError)):
            with pytest.raises(error, match="additional_time"):
                lock.extend(seconds)
        with pytest.raises(TypeError, match="additional_time or expire"):
            lock.extend(1, expire=1)


def test_a_lost_reply_to_an_acquisition_by_a_token_is_no_other_holder(redis_url, client):
    with Proxy(redis_url) as proxy:
        ours = cache_at(proxy.url)
        assert ours.lock("warm").acquire(token="warm")
        lock = ours.lock("a", timeout=30)
        proxy.drop_next_reply(containing=b'"by":')
        assert lock.acquire(blocking_timeout=10, token="host")
        assert lock.owned()
        lock.release()
    assert not [info for info in held_locks(client) if info.name == ":1:a"]


def test_core_locks_know_the_words_too(client):
    lock = Lock(client, "a", expire=10, id="mine")
    assert lock.acquire(blocking_timeout=1)
    assert token_of(lock) == b"mine"
    assert lock.extend(20) is True
    assert lock.reacquire() is True
    assert 5 < lock.ttl() <= 10
    assert not elsewhere(lambda: Lock(client, "a").acquire(blocking_timeout=0.1))
    assert not elsewhere(lambda: RedisPyLock(client, "a").acquire(blocking=False, token="mine"))
    lock.release()
    with pytest.raises(LockNotOwnedError):
        lock.release()


def test_local_is_refused_and_names_id_because_a_token_set_there_gave_two_workers_one_lock(client, ours):
    for lock in (Lock(client, "a"), AsyncLock(client, "a"), ours.lock("a")):
        with pytest.raises(AttributeError, match="`id=held"):
            lock.local.token = "host"
        with pytest.raises(AttributeError, match="read `id`"):
            print(lock.local.token)


def test_two_workers_that_released_by_one_token_do_not_both_acquire(client):
    first, second = workers = [RedisPyLock(client, "a", expire=10) for _ in range(2)]
    for lock in workers:
        assert lock.acquire(token="host")
        lock.release()
    assert first.acquire()
    assert not elsewhere(lambda: second.acquire(blocking=False))
    assert (first.owned(), second.owned()) == (True, False)


def test_tasks_know_the_words_too(client):
    async def main():
        lock, other = AsyncRedisPyLock(client, "a", expire=10), AsyncRedisPyLock(client, "a")
        assert await lock.acquire(blocking_timeout=1, token="mine")
        assert lock.id == "mine"
        assert await lock.extend(expire=20) is True
        assert await lock.reacquire() is True
        assert not await asyncio.create_task(other.acquire(blocking_timeout=0.1))
        assert not await asyncio.create_task(other.acquire(blocking=False, token="mine"))
        waiting = asyncio.create_task(other.acquire(token="mine"))
        await lock.release()
        assert await waiting
        with pytest.raises(LockNotOwnedError):
            await lock.release()

    asyncio.run(main())


def test_every_error_is_one_of_redis_pys_and_survives_pickle():
    record = exceptions.LossRecord("a", "id", 5, "it ended", 1.0, "expired")
    errors = [
        exceptions.LockError("a"),
        exceptions.NotAcquired("a"),
        exceptions.AlreadyAcquired("a"),
        exceptions.AcquireTimeout("a", 5.0),
        exceptions.LockLost("a", record),
        exceptions.StaleFence("a", 5),
        exceptions.LockBackendError("a", "why"),
        exceptions.ComputationFailed("a", "kind", "text"),
        exceptions.TaskAlreadyRunning("a", "holder", 5.0),
    ]
    for error in errors:
        assert isinstance(error, LockError)
        assert (error.lock_name, error.message) == ("a", str(error))
        assert isinstance(error, LockNotOwnedError) == (type(error).__name__ in ("NotAcquired", "LockLost"))
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))
    assert isinstance(errors[3], TimeoutError)
    assert repr(errors[6]) == "LockBackendError('a', 'why', False)"
