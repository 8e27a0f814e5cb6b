"""The system checks and import-time errors for tasks that would have no lock."""

from __future__ import annotations

import functools
import gc

import pytest
from celery import Task
from django.core.checks import run_checks

from django_redislock.celery import SingleInstanceMixin, SingleInstanceTask, single_instance
from django_redislock.checks import TAG


@pytest.fixture
def app(own_app):
    return own_app


def nothing():
    pass


@pytest.mark.parametrize("marked", [True, False])
def test_an_async_function_is_a_type_error(app, marked):
    """Celery calls it, and whatever awaits it does so when the lock has been released."""

    async def body():
        pass

    async def generator():
        yield

    for function in (body, generator):
        with pytest.raises(TypeError, match=f"{function.__name__} is an async function: its lock would be released"):
            if marked:
                single_instance(function)
            else:
                app.task(base=SingleInstanceTask, lazy=False)(function)


def test_the_mixin_behind_a_projects_class_is_a_type_error(app):
    class ProjectTask(Task):
        pass

    class Harmless:
        pass

    with pytest.raises(TypeError, match=r"Wrong has no lock, .* class Wrong\(SingleInstanceMixin, \.\.\.\)"):

        class Wrong(ProjectTask, SingleInstanceMixin):
            pass

    class Right(Harmless, SingleInstanceMixin, ProjectTask):
        pass

    class Mixed(SingleInstanceMixin):
        pass

    assert issubclass(type("Fine", (Mixed, ProjectTask), {}), SingleInstanceMixin)


def test_a_method_that_does_not_come_to_ours_is_warned_of_by_the_system_check(app):
    class Forgetful(SingleInstanceTask):
        def __call__(self, *args, **kwargs):
            return self.run(*args, **kwargs)

        def apply_async(self, *args, **kwargs):
            return Task.retry(self)

    class Careful(SingleInstanceTask):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

        def apply_async(self, *args, **kwargs):
            return SingleInstanceTask.apply_async(self, *args, **kwargs)

    app.task(base=Forgetful, name="forgetful")(nothing)
    app.task(base=Careful, name="careful")(nothing)
    where = f"{test_a_method_that_does_not_come_to_ours_is_warned_of_by_the_system_check.__name__}.<locals>.Forgetful"
    assert {said.replace(where, "F") for said in found("redislock.W011")} == {
        "The task forgetful has no lock: F.__call__ does not call super().__call__().",
        "The task forgetful has no lock: F.apply_async does not call super().apply_async().",
    }


def found(id="redislock.E010"):
    gc.collect()  # marks of functions that are gone do not count
    return {message.msg.replace(f"{__name__}.", "") for message in run_checks(tags=[TAG]) if message.id == id}


def test_a_mark_without_effect_is_an_error_of_the_system_check(app):
    @single_instance
    def no_task():
        pass

    def forgetful(function):
        def wrapper(*args):
            return function(*args)

        return wrapper

    @app.task(name="forgetful")
    @forgetful
    @single_instance
    def hidden():
        pass

    assert found() == {
        f"{where} is marked with @single_instance, but no task was made from it."
        for where in (
            f"{test_a_mark_without_effect_is_an_error_of_the_system_check.__name__}.<locals>.{name}"
            for name in ("no_task", "hidden")
        )
    }


def test_where_no_app_was_imported_the_system_check_says_that(run_python):
    code = """import django; django.setup()
from celery import shared_task
from django.core.checks import run_checks
from django_redislock.celery import single_instance

@shared_task
@single_instance
def first(): pass

found = lambda: [(message.id, message.msg) for message in run_checks(tags=['redislock'])]
one = found()
second = single_instance(lambda: 0)
say(one=one, two=found())
"""
    (line,) = run_python(code).finish()
    for found, what in ((line["one"], "first is"), (line["two"], "(and 1 more) is")):
        ((id, said),) = found
        assert id == "redislock.E010"
        assert what in said
        assert said.endswith("marked with @single_instance, but no Celery app has been imported.")


@pytest.mark.filterwarnings("ignore:(?s).*already registered")
def test_of_two_tasks_with_one_name_the_mark_of_the_second_has_no_effect(app):
    def first():
        return 1

    def second():
        return 2

    tasks = [app.task(name="same")(single_instance(function)) for function in (first, second)]
    (said,) = found()
    assert "<locals>.second is marked with @single_instance" in said
    assert [task.run() for task in tasks] == [1, 1]


def test_an_app_that_cannot_make_its_tasks_is_an_error_of_the_system_check(app):
    @app.task(base=SingleInstanceTask, single_instance={"expire": 0})
    def bad():
        pass

    (said,) = found("redislock.E011")
    assert said.startswith("<Celery own at ")
    assert said.endswith("cannot make its tasks: ValueError: expire must be between 0.001 and 316224000 seconds, not 0")


def test_options_that_nobody_reads_are_an_error_of_the_system_check(app):
    @app.task(name="unread", single_instance={"expire": 5})
    def unread():
        pass

    assert found("redislock.E012") == {
        "The task unread has options single_instance={...}, but it is not a SingleInstanceTask."
    }


@pytest.mark.parametrize(
    ("options", "limit", "warned"),
    [
        ({"auto_renewal": False, "expire": 60}, 61, True),
        ({"auto_renewal": False, "expire": 60}, 60, False),
        ({"auto_renewal": False, "expire": 60}, None, False),
        ({"auto_renewal": False, "expire": 60, "scope": "queued"}, 61, False),
        ({"expire": 60}, 61, False),
    ],
)
@pytest.mark.parametrize("of_the_app", [True, False])
def test_a_life_that_is_shorter_than_the_time_limit_is_warned_of(app, options, limit, warned, of_the_app):
    app.conf.task_time_limit = limit if of_the_app else None

    @app.task(name="long", time_limit=None if of_the_app else limit)
    @single_instance(**options)
    def long():
        pass

    expected = {"The task long may run for 61 s, but its lock expires after 60 s."} if warned else set()
    assert found("redislock.W010") == expected


def test_marks_that_have_their_effect_are_fine(app):
    def careful(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    @app.task
    @careful
    @single_instance(expire=5)
    def task():
        pass

    @app.task
    @single_instance
    def never_used_yet():
        pass

    assert found() == set()
    assert task._options.expire == 5.0
