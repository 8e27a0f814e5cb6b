"""What the package offers to the tests of others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import unittest
from functools import partial

import pytest
from celery import Celery
from django.core.cache import caches
from django.test import SimpleTestCase, override_settings

from django_redislock import (
    AcquireTimeout,
    LockBackendError,
    alock,
    asemaphore,
    conf,
    lock,
    reset_all,
    rlock,
)
from django_redislock.celery import single_instance
from django_redislock.core import Lock, held_locks as held_locks_of
from django_redislock.testing import UnlockedMixin, assert_locked, held, unlocked


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("somebody else")]


@pytest.fixture(autouse=True)
def _nothing_is_left(client):
    """Neither a lock, nor a thread of `held`."""
    yield
    assert (threads(), list(held_locks_of(client))) == ([], [])


@pytest.fixture
def task():
    with Celery("eager", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_always_eager = True

        @app.task(name="shop.send", shared=False, lazy=False)
        @single_instance(key="{order}", scope="queued+run")
        def send(order):
            return order

        yield send


def test_the_fixture_is_there_and_unlocks(redislock_unlocked):
    assert not conf.get().enabled


def test_unlocked_grants_everything_without_redis(client, settings, task):
    with Lock(client, "taken"):
        settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0", "EXPIRE": 7}
        with unlocked():
            assert conf.get().expire == 7
            with lock("taken") as inside:
                assert inside.fence > 0
            assert task.delay(1).get() == 1
            assert task.apply((1,)).get() == 1
            assert caches["default"].get_or_set("key", lambda: 5) == 5
        assert conf.get().enabled
    assert list(held_locks_of(client)) == []


def test_unlocked_around_a_function_or_a_coroutine_function_lasts_until_it_has_run(client):
    @unlocked()
    async def sees():
        await asyncio.sleep(0)
        return conf.get().enabled

    assert (asyncio.run(sees()), conf.get().enabled) == (False, True)

    @unlocked()
    def count(left):
        assert not conf.get().enabled
        return left and count(left - 1) + 1

    assert count(3) == 3
    assert conf.get().enabled


def run_class(case: type[unittest.TestCase]) -> None:
    """Run the tests of a class, which says itself how many there are."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert (result.testsRun, result.errors, result.failures) == (case.tests, [], [])
    assert conf.get().enabled


def test_unlocked_on_a_test_class_runs_its_tests_unlocked_from_setupclass_on(client):
    @unlocked()
    @override_settings(DJANGO_REDISLOCK={"EXPIRE": 7})
    class Case(SimpleTestCase):
        tests = 2

        @classmethod
        def setUpClass(cls):
            super().setUpClass()
            cls.seen = conf.get()

        def test_settings(self):
            assert (self.seen.enabled, self.seen.expire) == (False, 7)
            assert not conf.get().enabled

        async def test_in_a_coroutine(self):
            assert not conf.get().enabled

    class Under(Case):
        tests = 3

        def test_more(self):
            with lock("name"), lock("name"):
                pass

    run_class(Case)
    run_class(Under)


def test_unlocked_on_a_class_that_is_no_django_testcase_is_an_error_that_names_the_fixture():
    class TestPlainly:
        pass

    with pytest.raises(ValueError, match=r"not .*TestPlainly; .*redislock_unlocked"):
        unlocked()(TestPlainly)


def test_the_mixin_runs_the_tests_of_a_class_and_of_its_subclasses_unlocked(client):
    @override_settings(DJANGO_REDISLOCK={"EXPIRE": 7})
    class Case(UnlockedMixin, SimpleTestCase):
        tests = 1

        def test_settings(self):
            assert (conf.get().enabled, conf.get().expire) == (False, 7)

    @override_settings(DJANGO_REDISLOCK={"EXPIRE": 8})
    class Under(Case):
        def test_settings(self):
            assert (conf.get().enabled, conf.get().expire) == (False, 8)

    run_class(Case)
    run_class(Under)
    run_class(Case)


def test_the_plugin_of_pytest_loads_nothing_of_django():
    code = (
        "import sys; before = set(sys.modules); import pytest, _pytest.fixtures; "
        "import django_redislock.pytest_plugin; "
    )
    code += "assert not [name for name in sys.modules if name.partition('.')[0] in ('django', 'redis', 'celery')]"
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_assert_locked_fails_when_no_such_lock_was_taken_and_keeps_the_error_of_its_block(client):
    with (
        pytest.raises(AssertionError, match=r"No lock 'invoice:42' was acquired\. The acquired locks: 'invoice:4'\."),
        assert_locked("invoice:42"),
        lock("invoice:4"),
    ):
        pass
    with (
        Lock(client, "name"),
        pytest.raises(AssertionError, match="The acquired locks: none"),
        assert_locked("name"),
        pytest.raises(AcquireTimeout),
        lock("name", timeout=0),
    ):
        pass
    with pytest.raises(ZeroDivisionError), assert_locked("name"):
        raise ZeroDivisionError
    with lock("name"):
        pass


def test_assert_locked_means_every_character_but_the_star_as_it_is(client):
    for asked, taken in (("a[b]", "a[b]"), ("a[b]*", "a[b]c"), ("*?", "a?")):
        with assert_locked(asked), lock(taken):
            pass
    for asked, taken in (("a[b]", "ab"), ("a?", "ab")):
        with pytest.raises(AssertionError), assert_locked(asked), lock(taken):
            pass


# A lock that somebody else holds


def test_a_block_or_a_function_meets_the_conflict_and_the_lock_is_free_afterwards(client):
    @held("a")
    def tries():
        return lock("a").acquire(blocking=False)

    @held("a")
    async def task_tries():
        return await alock("a").acquire(blocking=False)

    with held("a") as theirs:
        assert [info.id for info in held_locks_of(client)] == [theirs.id]
        for mine in (lock("a", blocking=False), rlock("a", blocking=False)):
            with pytest.raises(AcquireTimeout), mine:
                pass
        assert not lock("a").owned()
    assert [tries(), tries(), asyncio.run(task_tries())] == [False] * 3
    with lock("a", blocking=False):
        pass


def test_a_coroutine_function_has_run_when_its_locks_are_asserted(client):
    @assert_locked("b")
    async def task(name):
        async with alock(name):
            return name

    assert asyncio.run(task("b")) == "b"
    with pytest.raises(AssertionError, match=r"No lock 'b' was acquired\. The acquired locks: 'a'"):
        asyncio.run(task("a"))


@pytest.mark.parametrize("block", [assert_locked, held])
def test_a_class_is_refused_because_none_of_its_tests_would_run(block):
    with pytest.raises(TypeError, match=r"decorate functions, not the class .*Tests"):
        block("a")(type("Tests", (), {}))


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
