"""What a site says of all its tasks: ``DJANGO_REDISLOCK["CELERY"]``, and where it is told."""

from __future__ import annotations

import ast
import functools
import pydoc
import re
from dataclasses import asdict

import pytest
from django.core.checks import run_checks

from django_redislock import TaskAlreadyRunning, conf
from django_redislock.celery import SingleInstanceOptions, SingleInstanceTask, single_instance
from django_redislock.celery.options import NAMES, OWN
from django_redislock.checks import TAG
from django_redislock.core import Lock


@pytest.fixture
def app(own_app):
    own_app.task = functools.partial(own_app.task, lazy=False)
    return own_app


OTHERS = {
    "scope": "job",
    "key": ["a"],
    "tenant": "shop.tenants.schema",
    "expire": 7.0,
    "auto_renewal": False,
    "max_hold": 5.0,
    "renewal_jitter": 0.2,
    "on_conflict": "skip",
    "wait": 3.0,
    "skip_result": {"busy": True},
    "on_duplicate": "raise",
    "queue_life": 60.0,
    "keep_for": 4.0,
    "on_backend_error": "run",
    "lock_direct_calls": True,
    "reschedule_delay": 2.0,
    "reschedule_limit": 900.0,
}


def test_the_settings_take_every_option():
    assert SingleInstanceOptions.__optional_keys__ == set(NAMES)
    assert OTHERS.keys() == set(NAMES) - set(OWN)


def takes_a(a):
    pass


@pytest.mark.parametrize("name", OTHERS)
def test_a_task_has_the_option_that_the_settings_give_unless_it_has_its_own(app, settings, name):
    bare = app.task(name="bare", base=SingleInstanceTask)(takes_a)
    own = app.task(name="own", base=SingleInstanceTask, single_instance={name: OTHERS[name]})(takes_a)
    section = conf.Settings() if name == "tenant" else conf.CelerySettings()  # refreshes of values use it, too
    default = getattr(section, name)
    assert getattr(bare._options, name) == default

    def in_settings(value):
        return {name.upper(): value} if name == "tenant" else {"CELERY": {name.upper(): value}}

    settings.DJANGO_REDISLOCK = in_settings(OTHERS[name])
    expected = ("a",) if name == "key" else OTHERS[name]
    assert getattr(bare._options, name) == expected
    settings.DJANGO_REDISLOCK = in_settings(default)
    assert getattr(own._options, name) == expected


def test_what_the_settings_give_is_what_happens(client, app, settings):
    @app.task(name="given")
    @single_instance
    def task(a, b=0):
        return "ran"

    settings.DJANGO_REDISLOCK = {"CELERY": {"KEY": "for {a}", "ON_CONFLICT": "skip", "SKIP_RESULT": "busy"}}
    with Lock(client, "celery:given:for 1"):
        assert task.apply((1, 2)).get() == "busy"
        assert task.apply((2, 1)).get() == "ran"
        assert task(1) == "ran"
        settings.DJANGO_REDISLOCK["CELERY"] |= {"LOCK_DIRECT_CALLS": True, "ON_CONFLICT": "raise"}
        settings.DJANGO_REDISLOCK = {**settings.DJANGO_REDISLOCK}
        with pytest.raises(TaskAlreadyRunning):
            task(1)


def test_a_key_of_the_settings_that_a_task_has_no_parameter_for_is_an_error_of_the_system_check(app, settings):
    def nothing():
        pass

    def nothing_else():
        pass

    settings.DJANGO_REDISLOCK = {"CELERY": {"KEY": ["account_id"]}}
    task = app.task(name="keyless")(single_instance(nothing))
    app.task(name="keyed")(single_instance(key=[])(nothing_else))
    with pytest.raises(TypeError, match="names 'account_id', which is not one of the arguments"):
        task.apply(throw=True)
    found = [message for message in run_checks(tags=[TAG]) if message.id == "redislock.E013"]
    assert not [message for message in found if "the task keyed" in message.msg]
    (said,) = [message.msg for message in found if "the task keyless" in message.msg]
    assert said.startswith("DJANGO_REDISLOCK['CELERY']['KEY'] does not fit the task keyless: key names 'account_id', ")
    assert said.endswith(f"which is no parameter of {nothing.__qualname__}: it has none")


def defaults_in(text):
    """Read the lines of a table such as ``name=default   what it is``."""
    return {name: ast.literal_eval(value) for name, value in re.findall(r"^ +(?:\| +)?(\w+)=(\S+)  +\S", text, re.M)}


def test_help_tells_every_option_with_its_default():
    assert defaults_in(pydoc.plain(pydoc.render_doc(single_instance))) == {
        **asdict(conf.CelerySettings()),
        "tenant": None,
        **dict.fromkeys(OWN),
    }
