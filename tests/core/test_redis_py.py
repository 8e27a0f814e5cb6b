"""`lock_class` of redis-py's clients: what redis-py's own tests say of its lock, on its class and on ours.

Tests that look into the key of redis-py's lock have no place here, because our key holds more.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import warnings
from datetime import timedelta
from functools import partial

import pytest
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

from django_redislock.core import AsyncLock, AsyncRedisPyLock, RedisPyLock, held_locks, redis_py
from django_redislock.exceptions import LongTimeoutWarning
from tests.support import async_client_at, client_at
from tests.support.cache_programs import cache_at

KINDS = {"redis-py's": None, "ours": RedisPyLock, "redis-py's for asyncio": None, "ours for asyncio": AsyncRedisPyLock}

QUIET = pytest.mark.skipif(redis.VERSION < (6, 0), reason="raise_on_release_error is new in redis-py 6.0")


class Words:
    """A lock of any kind, with the methods of one for asyncio."""

    def __init__(self, lock):
        self._lock = lock

    def __getattr__(self, name):
        async def call(*args, **options):
            result = getattr(self._lock, name)(*args, **options)
            return await result if inspect.isawaitable(result) else result

        return call

    async def __aenter__(self):
        await self._of_block("enter")
        return self

    async def __aexit__(self, *error):
        await self._of_block("exit", *error)

    async def _of_block(self, which, *args):
        await self.__getattr__(f"__a{which}__" if self.for_asyncio else f"__{which}__")(*args)

    @property
    def for_asyncio(self):
        return isinstance(self._lock, (AsyncLock, redis.asyncio.lock.Lock))


class Maker:
    """``make(…)``: a lock by the method of a client, of redis-py's class or of ours."""

    def __init__(self, kind, url):
        self._client = (async_client_at if "asyncio" in kind else client_at)(url)
        self._options = {"lock_class": KINDS[kind]} if KINDS[kind] else {}

    def __call__(self, **options):
        return Words(self._client.lock("a", **self._options, **options))

    async def aclose(self):
        closed = getattr(self._client, "aclose", self._client.close)()
        if inspect.isawaitable(closed):
            await closed


@pytest.fixture(params=KINDS)
def make(request, redis_url):
    return Maker(request.param, redis_url)


def test_the_lock_is_of_the_class_that_was_given(redis_url):
    assert type(client_at(redis_url).lock("a", lock_class=RedisPyLock)) is RedisPyLock
    lock = async_client_at(redis_url).lock("a", lock_class=AsyncRedisPyLock)
    assert isinstance(lock, AsyncLock)


async def test_a_lock_is_acquired_and_released(make):
    lock = make()
    assert await lock.acquire(blocking=False)
    assert await lock.locked()
    assert await lock.owned()
    assert await make().locked()
    assert not await make().owned()
    assert not await make().acquire(blocking=False)
    await lock.release()
    assert not await lock.locked()
    assert not await lock.owned()


async def test_a_token_of_the_callers_choice_owns_the_lock(make):
    lock = make()
    assert await lock.acquire(blocking=False, token="mine")
    assert await lock.owned()
    await lock.release()


async def test_a_held_lock_is_refused_at_once_or_after_the_blocking_timeout(make):
    async with make(timeout=60):
        for how in ({"blocking": False}, {"blocking_timeout": 0.1}):
            assert not await make(**how).acquire()
            assert not await make().acquire(**how)
        # A sleep that is longer than the blocking timeout does not lengthen it.
        assert not await make(sleep=600, blocking_timeout=0.2).acquire()
        with pytest.raises(LockError):
            async with make(blocking_timeout=0.1):
                raise AssertionError


async def test_a_block_holds_the_lock(make):
    async with make():
        assert await make().locked()
    assert not await make().locked()


async def lose(make):
    """Wait until the lock has ended by its timeout, and let another one have it."""
    other = make(timeout=60, sleep=0.01)
    assert await other.acquire(blocking_timeout=30)
    return other


async def test_a_block_that_lost_its_lock_ends_with_lock_not_owned(make):
    with pytest.raises(LockNotOwnedError):
        async with make(timeout=0.2):
            await lose(make)


@QUIET
async def test_with_raise_on_release_error_false_a_block_that_lost_its_lock_warns(make, caplog):
    with caplog.at_level(logging.WARNING):
        async with make(timeout=0.2, raise_on_release_error=False):
            other = await lose(make)
        assert await other.owned()
        await other.release()
    assert [record for record in caplog.records if record.levelno == logging.WARNING]


@QUIET
async def test_with_raise_on_release_error_false_the_error_of_the_body_comes_out(make):
    with pytest.raises(ZeroDivisionError):
        async with make(timeout=60, raise_on_release_error=False) as lock:
            await lock.release()
            raise ZeroDivisionError


async def test_what_is_not_held_is_neither_released_nor_extended(make):
    lock = make(timeout=10)
    for call in (lock.release, lock.reacquire):
        with pytest.raises(LockError):
            await call()
    with pytest.raises(LockError):
        await lock.extend(10)


@pytest.mark.parametrize("word", ["release", "extend", "reacquire"])
async def test_what_was_lost_is_not_owned(make, word):
    lock = make(timeout=0.2)
    assert await lock.acquire(blocking=False)
    other = await lose(make)
    with pytest.raises(LockNotOwnedError):
        await getattr(lock, word)(*[10] * (word == "extend"))
    await other.release()


@pytest.mark.parametrize(
    ("seconds", "options", "total"), [(300, {}, 400), (300, {"replace_ttl": True}, 300), (0.5, {}, 100.5)]
)
async def test_a_held_lock_is_extended(make, redis_url, seconds, options, total):
    lock = make(timeout=100)
    assert await lock.acquire(blocking=False)
    assert await lock.extend(seconds, **options) is True
    assert total - 30 < remaining(redis_url) <= total
    assert await lock.reacquire() is True
    assert 70 < remaining(redis_url) <= 100
    await lock.release()


def remaining(redis_url):
    """Return the seconds until the expiry of the only lock, whoever wrote it."""
    with client_at(redis_url) as client:
        ours = [found.ttl for found in held_locks(client)]
        return ours[0] if ours else client.pttl("a") / 1000


async def test_with_thread_local_false_another_thread_or_task_releases_the_lock(make):
    lock = make(timeout=60, thread_local=False)
    assert await lock.acquire(blocking=False)
    if lock.for_asyncio:
        await asyncio.create_task(lock.release())
    else:
        await asyncio.to_thread(asyncio.run, lock.release())
    assert not await make().locked()
    assert await make(timeout=60, thread_local=False).acquire(blocking=False)


async def test_with_thread_local_false_a_lost_lock_is_an_error_for_whoever_releases_it(make, redis_url):
    lock = make(timeout=60, thread_local=False)
    await lock.acquire()
    with client_at(redis_url) as client:
        client.flushdb()
    release = asyncio.create_task if lock.for_asyncio else lambda call: asyncio.to_thread(asyncio.run, call)
    for error in (LockNotOwnedError, LockError):
        with pytest.raises(error):
            await release(lock.release())
    assert await lock.acquire(blocking=False)
    await release(lock.release())


# What is different: a lock without a timeout


def test_without_a_timeout_our_lock_is_renewed_and_ends_with_its_holder(redis_url):
    lock = client_at(redis_url).lock("a", lock_class=RedisPyLock)
    assert lock.renewal.auto_renewal
    assert lock.acquire()
    assert 0 < lock.ttl() <= 30
    lock.release()


def test_the_errors_name_the_argument(redis_url):
    client = client_at(redis_url)
    for options, error, names in [
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "3"}, TypeError, "timeout"),
        ({"blocking_timeout": "3"}, TypeError, "blocking_timeout"),
        ({"raise_on_release_error": 1}, TypeError, "raise_on_release_error"),
    ]:
        with pytest.raises(error, match=names):
            client.lock("a", lock_class=RedisPyLock, **options)
    with pytest.raises(TypeError, match="expire or timeout"):
        RedisPyLock(client, "a", 3, expire=3)
    with pytest.raises(TypeError, match="thread_local"):
        RedisPyLock(client, "a", reentrant=True, thread_local=False)
    with pytest.raises(TypeError, match="wait"):
        RedisPyLock(client, "a", wait=3)


@pytest.fixture
def made(redis_url):
    """Ways to make a lock with redis-py's `timeout`."""
    client, aclient, cache = client_at(redis_url), async_client_at(redis_url), cache_at(redis_url)
    return {
        "client.lock": lambda **options: client.lock("a", lock_class=RedisPyLock, **options),
        "aclient.lock": lambda **options: aclient.lock("a", lock_class=AsyncRedisPyLock, **options),
        "cache.lock": lambda **options: cache.lock("a", blocking_timeout=1, **options),
        "RedisPyLock": lambda **options: RedisPyLock(client, "a", **options),
    }


@pytest.mark.parametrize("way", ["client.lock", "aclient.lock", "cache.lock", "RedisPyLock"])
def test_the_first_long_timeout_of_a_process_warns_at_the_line_that_gave_it(made, way, monkeypatch):
    monkeypatch.setattr(redis_py, "_warned", False)
    make = made[way]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
        make(timeout=120)
        assert not caught
        make(timeout=timedelta(minutes=15))
        make(timeout=900)
    (warning,) = caught
    assert (warning.category, warning.filename) == (LongTimeoutWarning, __file__)
    assert "stays for 900 s" in str(warning.message)


def test_a_long_timeout_is_quiet_where_somebody_said_so(made, monkeypatch):
    monkeypatch.setattr(redis_py, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in "cache.lock", "RedisPyLock":
            lock = made[way](timeout=900, auto_renewal=False)
            assert not lock.renewal.auto_renewal
            with pytest.raises(LongTimeoutWarning):
                made[way](timeout=900)
        partial(RedisPyLock, auto_renewal=False)(client_at("redis://localhost"), "a", timeout=900)
        warnings.simplefilter("ignore", LongTimeoutWarning)
        assert not made["client.lock"](timeout=900).renewal.auto_renewal
