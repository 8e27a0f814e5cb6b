"""The options of the bases in place of those of celery-once and celery-singleton: where they come from, and which are
refused."""

from __future__ import annotations

import itertools

import pytest

from django_redislock.celery import single_instance
from django_redislock.celery.drop_in import QueueOnce, Singleton


@pytest.fixture
def app(own_app):
    return own_app


@pytest.fixture
def make(app):
    """Make a task with this base."""
    numbers = itertools.count()

    def make(base, body=lambda self, a=1, b=2: "ran", **options):
        body.__name__ = "body"
        return app.task(base=base, bind=True, lazy=False, name=f"task{next(numbers)}", **options)(body)

    return make


def test_a_class_has_its_own_once_and_what_its_base_says_of_the_rest(app, make):
    class Polite(QueueOnce):
        once = {"graceful": True, "timeout": 600}
        single_instance = {"expire": 5, "on_conflict": "skip"}

    class Strict(Polite):
        once = {"keys": ["a"]}
        single_instance = {"expire": 6}

        def run(self, a, b=1):
            return a

    app.conf.ONCE = {"settings": {"default_timeout": 60}}
    options = make(Polite)._options, app.register_task(Strict())._options
    assert [(each.on_duplicate, each.key, each.queue_life, each.expire, each.on_conflict) for each in options] == [
        ("return", None, 600, 5, "skip"),
        ("raise", ("a",), 60, 6, "skip"),
    ]


@pytest.mark.parametrize(
    ("base", "options", "said"),
    [
        (QueueOnce, {"once": True}, "once must be a dict of options, not bool"),
        (QueueOnce, {"once": {"gracefal": True}}, "once['gracefal'] is unknown here: did you mean 'graceful'?"),
        (QueueOnce, {"once": {"x": 1}}, "once['x'] is unknown here: graceful, unlock_before_run, keys, timeout"),
        (QueueOnce, {"once": {"graceful": "no"}}, "once['graceful'] must be True or False, not 'no'"),
        (QueueOnce, {"once": {"timeout": None}}, "once['timeout'] must be a number of seconds"),
        (QueueOnce, {"once": {"timeout": 0}}, "once['timeout'] must be between 0.001 and "),
        (QueueOnce, {"once": {"keys": "a"}}, "once['keys'] must be a list of the names of parameters, not 'a'"),
        (QueueOnce, {"once": {"keys": ["c"]}}, "once['keys'] names 'c', which is no parameter of "),
        (QueueOnce, {"single_instance": {"limit": 2}}, "limit is about runs"),
        (QueueOnce, {"single_instance": {"queue_life": 2}}, "body has 'queue_life' by the options of its base"),
        (Singleton, {"unique_on": ["c"]}, "unique_on names 'c', which is no parameter of "),
        (Singleton, {"unique_on": 1}, "unique_on must be a list of the names of parameters, not 1"),
        (Singleton, {"lock_expiry": -1}, "lock_expiry must be between "),
        (Singleton, {"raise_on_duplicate": 1}, "raise_on_duplicate must be True or False, not 1"),
        (Singleton, {"single_instance": {"scope": "run"}}, "body has 'scope' by the options of its base"),
    ],
)
def test_bad_options_are_named(make, base, options, said):
    with pytest.raises((TypeError, ValueError)) as error:
        make(base, **options)
    assert said in str(error.value)


def test_bad_settings_of_the_app_are_named(app, make):
    app.conf.update(ONCE={"settings": {"blocking": True}}, singleton_lock_expiry=0)
    with pytest.raises(ValueError, match=r"ONCE\['settings'\]\['blocking'\] is unknown here"):
        make(QueueOnce)
    with pytest.raises(ValueError, match="singleton_lock_expiry must be between"):
        make(Singleton)
    app.conf.ONCE = {"settings": {"default_timeout": "1h"}}
    with pytest.raises(TypeError, match=r"ONCE\['settings'\]\['default_timeout'\] must be "):
        make(QueueOnce)


def test_the_decorator_is_for_other_options(make):
    task = make(Singleton, single_instance(expire=5)(lambda self: 1))
    assert (task._options.scope, task._options.expire) == ("job", 5)
    with pytest.raises(TypeError, match="body has 'key' by the options of its base"):
        make(Singleton, single_instance(key=[])(lambda self: 1))


@pytest.mark.parametrize("name", ["keys", "unlock_before_run"])
def test_one_call_cannot_change_what_its_worker_must_know(make, name):
    with pytest.raises(TypeError, match=rf"once\['{name}'\] is unknown here: graceful, timeout"):
        make(QueueOnce).apply_async(once={name: True})


@pytest.mark.parametrize(("base", "name"), [(QueueOnce, "get_key"), (Singleton, "generate_lock")])
def test_a_method_that_nothing_calls_is_refused(base, name):
    with pytest.raises(TypeError, match=f"Own.{name} would never be called: see the page about migration"):
        type("Own", (base,), {name: lambda self: "", "__qualname__": "Own"})
