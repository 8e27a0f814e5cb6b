"""fakeredis in place of a server, as sites have it in the settings of their tests: locks work, and the cache works as
its base class does."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading

import fakeredis
import pytest
from celery import Celery
from django.core.cache import caches

from django_redislock import LockLost, alock, conf, held_locks, lock, reset_all, semaphore
from django_redislock.celery import DuplicateResult, single_instance
from django_redislock.core import Lock
from tests.celery.deliveries import deliver, take
from tests.support import lived, wait_until

numbers = itertools.count()


@pytest.fixture(params=["RedisCache", "DjangoRedisCache"])
def cache(request, settings):
    """fakeredis as each backend can be given it."""
    options = {"connection_class": fakeredis.FakeRedisConnection}
    if request.param == "RedisCache":
        options = {"CONNECTION_POOL_KWARGS": options}
    settings.CACHES = {
        "default": {
            "BACKEND": f"django_redislock.cache.{request.param}",
            "LOCATION": f"redis://fake{next(numbers)}.example:6379/0",  # those of one name share all
            "OPTIONS": options,
        }
    }
    settings.DJANGO_REDISLOCK = {"CACHE_ALIAS": "default"}
    return caches["default"]


def test_the_cache_works_as_its_base_class_does(cache):
    assert cache.get_or_set("k", lambda: 5, 60) == 5
    assert cache.get_or_set("k", lambda: 6, 60, stale=60) == 5
    assert cache.get_or_set_many(["k", "l"], lambda keys: dict.fromkeys(keys, 7), 60) == {"k": 5, "l": 7}
    assert cache.delete("k")
    cache.set("k", 1, 0)
    cache.delete_many(["k", "l"])
    assert cache.get_or_set("k", lambda: 8, 60) == 8
    cache.clear()
    assert cache.get("k") is None


def test_a_lock_is_held_renewed_refused_listed_and_released(cache):
    with lock("a", expire=0.5) as held, cache.lock("b"):
        assert [info.name for info in held_locks()] == [":1:b", "a"]
        assert not lock("a", blocking=False).acquire()
        fence = held.fence
        lived(1.0)  # longer than its expiry
        held.raise_if_lost()
        assert held.extend()
    assert list(held_locks()) == []
    with lock("a") as held:
        assert held.fence > fence


def test_a_waiter_is_woken_by_the_release(cache):
    got = threading.Event()

    def wait():
        with lock("a", timeout=20):
            got.set()

    thread = threading.Thread(target=wait)
    with lock("a") as held:
        thread.start()
        wait_until(lambda: held.owner().waiting == 1)
        assert not got.is_set()
    thread.join(20)
    assert got.is_set()


def test_a_lock_that_was_force_released_is_lost_and_a_semaphore_has_its_slots(cache):
    with semaphore("s", 2), semaphore("s", 2):
        assert not semaphore("s", 2, blocking=False).acquire()
    with pytest.raises(LockLost), lock("a"):
        assert reset_all() == 1


def test_a_task_is_published_once_and_runs_under_its_lock(cache):
    with Celery("faked", set_as_current=False, broker="memory://", backend="cache+memory://") as app:

        @app.task(name="faked", shared=False, lazy=False)
        @single_instance(scope="job", key=[])
        def task():
            return [info.kind for info in held_locks()]

        task.delay()
        assert isinstance(task.delay(), DuplicateResult)
        (message,) = take(app)
        assert deliver(app, message) == ["celery"]
        assert not isinstance(task.delay(), DuplicateResult)


def test_two_clients_of_one_fake_server_share_its_locks_and_others_do_not():
    shared = fakeredis.FakeServer()
    one, other, elsewhere = (fakeredis.FakeRedis(server=server) for server in (shared, shared, None))
    with Lock(one, "a"):
        assert not Lock(other, "a").acquire(blocking=False)
        assert Lock(elsewhere, "a").acquire(blocking=False)


def test_asyncio_and_fakeredis_without_lua_are_errors_that_say_what_to_do(cache):
    with pytest.raises(TypeError, match=r"with fakeredis only locks for threads work.*'ENABLED': False"):
        asyncio.run(alock("a").acquire())
    program = (
        "import sys; sys.modules['lupa'] = None; import fakeredis; from django_redislock.core import Lock;"
        "Lock(fakeredis.FakeRedis(), 'a').acquire()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'fakeredis[lua]'" in ended.stderr


def test_with_the_locks_off_everything_works(cache, settings):
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    assert not conf.get().enabled
    with lock("a"), cache.lock("a"):
        assert cache.get_or_set("k", lambda: 5, 60) == 5
        cache.clear()
