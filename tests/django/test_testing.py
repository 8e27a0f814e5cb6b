"""What the package offers to the tests of others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import unittest
from contextlib import nullcontext

import pytest
from celery import Celery
from django.core.cache import caches
from django.test import SimpleTestCase, override_settings

from django_redislock import AcquireTimeout, conf, lock
from django_redislock.celery import single_instance
from django_redislock.core import Lock, held_locks
from django_redislock.testing import UnlockedMixin, assert_locked, unlocked


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


def test_unlocked_around_a_coroutine_function_lasts_until_it_has_run(client):
    @unlocked()
    async def sees():
        await asyncio.sleep(0)
        return conf.get().enabled

    assert (asyncio.run(sees()), conf.get().enabled) == (False, True)


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


@pytest.mark.usefixtures("redislock_unlocked")
def test_the_fixture_is_there_and_unlocks():
    assert not conf.get().enabled


def test_the_plugin_of_pytest_loads_nothing_of_django():
    code = (
        "import sys; before = set(sys.modules); import pytest, _pytest.fixtures; "
        "import django_redislock.pytest_plugin; "
    )
    code += "assert not [name for name in sys.modules if name.partition('.')[0] in ('django', 'redis', 'celery')]"
    subprocess.run([sys.executable, "-c", code], check=True)


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
        pytest.raises(AssertionError, match=r"No lock 'invoice:42' was acquired\. The acquired locks: 'invoice:4'\."),
        assert_locked("invoice:42"),
        lock("invoice:4"),
    ):
        pass
    with pytest.raises(AssertionError, match="The acquired locks: none"), assert_locked("*"):
        pass


def test_assert_locked_does_not_count_what_was_refused(client):
    with (
        Lock(client, "name"),
        pytest.raises(AssertionError, match="The acquired locks: none"),
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


@pytest.mark.parametrize(
    ("asked", "taken", "is_found"),
    [("a[b]", "a[b]", True), ("a[b]*", "a[b]c", True), ("a[b]", "ab", False), ("a?", "ab", False), ("*?", "a?", True)],
)
def test_assert_locked_means_every_character_but_the_star_as_it_is(client, asked, taken, is_found):
    with nullcontext() if is_found else pytest.raises(AssertionError), assert_locked(asked), lock(taken):
        pass


def test_a_function_that_calls_itself_is_unlocked_until_it_has_returned(settings):
    @unlocked()
    def count(left):
        assert not conf.get().enabled
        return left and count(left - 1) + 1

    assert count(3) == 3
    assert conf.get().enabled
