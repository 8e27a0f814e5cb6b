"""What the package offers to the tests of others."""

from __future__ import annotations

import pytest
from celery import Celery
from django.core.cache import caches

from django_redislock import AcquireTimeout, conf, lock
from django_redislock.celery import single_instance
from django_redislock.core import Lock, held_locks
from django_redislock.testing import assert_locked, unlocked


@pytest.fixture
def task():
    with Celery("eager", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_always_eager = True

        @app.task(name="shop.send", shared=False, lazy=False)
        @single_instance(key="{order}", scope="queued+run")
        def send(order):
            return order

        yield send


def test_unlocked_grants_everything_without_redis(client, settings, task):
    with Lock(client, "taken"):
        settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0", "EXPIRE": 7}
        with unlocked():
            assert conf.get().expire == 7
            with lock("taken") as inside:
                assert inside.fence > 0
            assert task.delay(1).get() == 1
            assert task.apply((1,)).get() == 1
        assert conf.get().enabled
    assert list(held_locks(client)) == []


def test_unlocked_is_a_decorator_too(client):
    @unlocked()
    def sees():
        return conf.get().enabled

    assert (sees(), sees(), conf.get().enabled) == (False, False, True)


def test_unlocked_leaves_the_cache_working(redis_url):
    with unlocked():
        assert caches["default"].get_or_set("key", lambda: 5) == 5


@pytest.mark.parametrize("how", ["locked", "unlocked"])
def test_assert_locked(client, task, how):
    def run():
        with assert_locked("invoice:42") as taken, lock("invoice:42"), lock("other"):
            pass
        assert taken == ["invoice:42", "other"]
        with assert_locked("celery:shop.send:*"):
            task.delay(7)
        with assert_locked("celery:shop.send:7"):
            task.delay(7)

    unlocked()(run)() if how == "unlocked" else run()


def test_assert_locked_fails_when_no_such_lock_was_taken(client):
    with (
        pytest.raises(AssertionError, match=r"No lock 'invoice:42' was taken; those taken are 'invoice:4'\."),
        assert_locked("invoice:42"),
        lock("invoice:4"),
    ):
        pass
    with pytest.raises(AssertionError, match="those taken are none"), assert_locked("*"):
        pass


def test_assert_locked_does_not_count_what_was_refused(client):
    with (
        Lock(client, "name"),
        pytest.raises(AssertionError, match="taken are none"),
        assert_locked("name"),
        pytest.raises(AcquireTimeout),
        lock("name", timeout=0),
    ):
        pass


def test_an_error_in_the_block_is_the_error(client):
    with pytest.raises(ZeroDivisionError), assert_locked("name"):
        raise ZeroDivisionError
    with lock("name"):
        pass


def test_a_name_with_brackets_is_meant_as_it_is(client):
    with assert_locked("a[b]"), lock("a[b]"):
        pass
