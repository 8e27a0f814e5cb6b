"""Bad input gets an error at once that names the argument, and nothing reaches the server."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import redis
from django.core.cache import caches
from hypothesis import HealthCheck, given, settings, strategies as st

from django_redislock import lock, locked
from django_redislock.cache.lease.request import lease_name
from django_redislock.core import AsyncLock, Lock, held_locks
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError, NotAcquired
from tests.support import begin_to_wait, client_at, monitoring

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        *[("expire", value, ValueError) for value in (0, -1, 0.0001, 0.0, NAN, INF, 10**18, 10**400, timedelta(0))],
        *[("expire", value, TypeError) for value in ("5", True, [], 1j)],
        *[("max_hold", value, ValueError) for value in (0, -1, NAN)],
        *[("max_hold", value, TypeError) for value in ("5", False)],
        *[("timeout", value, ValueError) for value in (-1, -0.1, NAN, -INF, timedelta(seconds=-1))],
        *[("timeout", value, TypeError) for value in ("5", True, [])],
        *[("name", value, ValueError) for value in ("", "x" * 1001, "ü" * 501, "x" * 1_000_000, "\ud800")],
        *[("name", value, TypeError) for value in (b"bytes", None, 5)],
        *[("id", value, ValueError) for value in ("", "a b", "new\nline", "x" * 201, "ü", "\0")],
        *[("id", value, TypeError) for value in (b"bytes", 5)],
        ("auto_renewal", "yes", TypeError),
        ("label", 5, TypeError),
        ("on_lost", "not callable", TypeError),
        ("on_lost", asyncio.sleep, TypeError),
        ("prefix", "a}b", ValueError),
        ("prefix", "", ValueError),
        ("client", None, TypeError),
        ("client", "redis://localhost", TypeError),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_the_constructor_refuses(client, argument, value, error):
    arguments = {"client": client, "name": "a"} | {argument: value}
    with monitoring(client) as sent, pytest.raises(error, match=argument):
        Lock(**arguments)
    assert sent == []


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(-1, ValueError), (NAN, ValueError), (-INF, ValueError), ("5", TypeError), (True, TypeError)],
)
def test_acquire_refuses(client, timeout, error):
    with pytest.raises(error, match="timeout"):
        Lock(client, "a").acquire(timeout=timeout)


@pytest.mark.parametrize("timeout", [INF, 1e300, 10**18, 10**400, 1e9, None], ids=repr)
def test_a_timeout_of_any_size_is_waited_for(client, timeout):
    with Lock(client, "a"):
        waiter = Lock(client, "a", timeout=timeout, auto_renewal=False)
        got = begin_to_wait(client, "a", waiter.acquire, timeout=timeout)
    assert got.result(30) is True


def test_a_timeout_without_blocking_is_refused_as_in_threading(client):
    with pytest.raises(ValueError, match="timeout"):
        Lock(client, "a").acquire(blocking=False, timeout=1)
    with pytest.raises(ValueError, match="timeout"):
        Lock(client, "a", blocking=False, timeout=1)


def test_extend_refuses(client):
    with Lock(client, "a") as held:
        for value in (0, -1, NAN, 10**18):
            with pytest.raises(ValueError, match="expire"):
                held.extend(value)
        assert held.owned(), "a refused extend harms nothing"


@pytest.mark.parametrize("value", [0.001, 1, 2.5, timedelta(hours=1), 10 * 365 * 86400], ids=str)
def test_good_lives_are_taken_as_they_are(client, value):
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    held = Lock(client, "a", expire=value, auto_renewal=False)
    with monitoring(client) as sent:
        assert held.acquire()
    assert f" {round(seconds * 1000)} a " in next(line for line in sent if line.startswith("EVAL"))


def test_a_key_of_another_type_is_named(client):
    key = lock_keys("redislock", "a").lock
    client.lpush(key, "mine")
    lock = Lock(client, "a")
    for operation in (lambda: lock.acquire(timeout=1), lambda: lock.acquire(timeout=0), lock.reset):
        with pytest.raises(LockBackendError, match=r"'a'.*WRONGTYPE") as caught:
            operation()
        assert key.decode() in str(caught.value)
    assert client.lrange(key, 0, -1) == [b"mine"]


@pytest.mark.slow
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=250), min_size=2, max_size=5, unique=True))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_names_may_hold_anything_and_never_share_a_key(redis_url, names):
    with client_at(redis_url) as client:
        client.flushdb()
        locks = [Lock(client, name) for name in names]
        for held in locks:
            assert held.acquire(blocking=False)
        assert {info.name for info in held_locks(client)} == set(names)
        for held in locks:
            held.release()
        assert not list(held_locks(client))


@pytest.mark.parametrize(
    "name", ["a{b", "a}b", "{}", "{", "}", "a{}b", "\0", "a\nb", "a b", "ü", "😀", "a:b:c", "*", "x" * 1000, "ü" * 500]
)
def test_odd_names_keep_all_keys_in_one_slot(client, name):
    keys = lock_keys("redislock", name)[:5]
    tags = {key[key.index(b"{") : key.index(b"}") + 1] for key in keys}
    assert len(tags) == 1
    with Lock(client, name) as held:
        assert held.owner().name == name


def test_the_facade_refuses_too():
    with pytest.raises(TypeError, match="name"):
        lock(None)
    with pytest.raises(ValueError, match="on_conflict"):
        locked("a", on_conflict="explode")
    with pytest.raises(TypeError, match="expires"):
        locked("a", expires=5)
    with pytest.raises(ValueError, match="timeout"):
        locked("a", on_conflict="raise", timeout=3)


@pytest.mark.parametrize("operation", ["acquire", "owner", "locked", "reset", "release of an id", "aacquire"])
def test_a_string_that_something_else_wrote_at_the_key_of_a_lock_is_refused_by_name(client, operation):
    key = lock_keys("redislock", "a").lock
    client.set(key, "of another program")
    lock = Lock(client, "a")
    if operation == "release of an id":
        with pytest.raises(NotAcquired):
            Lock(client, "a", id="given").release()
    else:
        with pytest.raises(
            LockBackendError, match=r"The key \{redislock:\d+\}:lock:a has a value that no lock wrote: delete it"
        ):
            if operation == "aacquire":
                asyncio.run(AsyncLock(client, "a").acquire(timeout=0.5))
            elif operation == "acquire":
                lock.acquire(timeout=0.5)
            else:
                getattr(lock, operation)()
    assert client.get(key) == b"of another program"


def test_a_string_that_something_else_wrote_at_the_key_of_a_value_is_refused_by_name(client):
    key = lock_keys("redislock", lease_name(caches["default"].make_key("a"))).lock
    client.set(key, "of another program")
    with pytest.raises(redis.ResponseError, match="has a value that no lock wrote"):
        caches["default"].get_or_set("a", lambda: 1)
    caches["default"].delete("a")
    assert client.get(key) == b"of another program"


def test_a_lock_for_threads_names_alock_to_a_task_and_the_other_way_round(client: redis.Redis) -> None:
    async def main() -> None:
        async with Lock(client, "a"):  # type: ignore[attr-defined]
            pass

    with pytest.raises(TypeError, match=r"for threads; in a task of asyncio write: async with alock\(name\)"):
        asyncio.run(main())
    with pytest.raises(TypeError, match=r"for tasks of asyncio: async with alock\(name\)"), AsyncLock(client, "a"):  # type: ignore[attr-defined]
        pass


def test_who_holds_nothing_is_told_how_to_name_the_holder(client: redis.Redis) -> None:
    with pytest.raises(NotAcquired, match=r"lock\(name, id=held\.id\)"):
        Lock(client, "a").release()
