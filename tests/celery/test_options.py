"""Options, the forms of the mark and the wrong ways to write them, without a worker."""

from __future__ import annotations

import functools
import inspect
import json
import pickle

import pytest
from celery import Task, shared_task
from celery.contrib.django.task import DjangoTask
from celery.worker.request import Request
from django.db import transaction

from django_redislock import TaskAlreadyRunning, conf
from django_redislock.celery import SingleInstanceMixin, SingleInstanceTask, single_instance
from django_redislock.celery.options import complete
from tests.celery.deliveries import take


@pytest.fixture
def app(own_app):
    return own_app


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"scope": "queue"}, ValueError, "scope must be one of 'run', 'queued', 'queued[+]run', 'job', not 'queue'"),
        (
            {"on_conflict": "ignore"},
            ValueError,
            "on_conflict must be one of 'raise', 'skip', 'reschedule', 'wait' or a callable, not 'ignore'",
        ),
        ({"on_conflict": None}, ValueError, "on_conflict must be"),
        (
            {"on_backend_error": "skip"},
            ValueError,
            "on_backend_error must be one of 'raise', 'run', 'reschedule', not 'skip'",
        ),
        ({"expire": 0}, ValueError, "expire must be between"),
        ({"expire": "5"}, TypeError, "expire must be a number"),
        ({"expire": True}, TypeError, "expire must be a number"),
        ({"expire": float("nan")}, ValueError, "expire must not be nan"),
        ({"max_hold": -1}, ValueError, "max_hold must be between"),
        ({"wait": None}, TypeError, "wait must be a number of seconds"),
        ({"keep_for": None}, TypeError, "keep_for must be a number of seconds or a timedelta, not None"),
        ({"scope": "queued", "keep_for": 5}, ValueError, "with scope='queued' the lock ends before the body"),
        ({"wait": -1}, ValueError, "wait must be None or between 0"),
        ({"auto_renewal": 1}, TypeError, "auto_renewal must be True or False"),
        ({"lock_direct_calls": None}, TypeError, "lock_direct_calls must be True or False"),
        ({"reschedule_delay": 0}, ValueError, "reschedule_delay must be between"),
        ({"reschedule_limit": -1}, ValueError, "reschedule_limit must be None or between 0"),
        ({"reschedule_limit": "5"}, TypeError, "reschedule_limit must be a number of seconds or a timedelta, not str"),
        ({"key": ""}, ValueError, r"key must not be empty; key=\[\] means one lock for all arguments"),
        ({"key": 5}, TypeError, "key must be a format string"),
        ({"key": [5]}, TypeError, "key must be a format string"),
        ({"tenant": "schema"}, TypeError, "tenant must be a callable, the dotted path of one or None, not 'schema'"),
        ({"key": "{c}"}, ValueError, "key names 'c', which is no parameter of .*: (self, )?a, b"),
        ({"key": "{c.pk:d}"}, ValueError, "key names 'c', which is no parameter"),
        ({"key": "{}"}, ValueError, "key names '', which is no parameter"),
        (
            {"key": "a"},
            ValueError,
            r"key='a' is the same for all arguments: .* key='\{a\}'; key=\[\] means one lock for all arguments",
        ),
        ({"key": "{a"}, ValueError, "expected '}' before end of string"),
        ({"key": ["a", "c"]}, ValueError, "key names 'c', which is no parameter"),
        ({"expires": 5}, TypeError, "no option 'expires': did you mean 'expire'?"),
        (
            {"timeout": 5},
            TypeError,
            r"no option 'timeout': did you mean 'wait'\? It is how long a duplicate with on_conflict='wait' waits for ",
        ),
        ({"blocking_timeout": 5}, TypeError, "did you mean 'wait'?"),
        ({"ttl": 5}, TypeError, "did you mean 'expire'?"),
        ({"colour": 5}, TypeError, "no option 'colour': there are expire, "),
    ],
)
def test_a_bad_option_is_an_error_that_names_it_where_it_is_written(app, options, error, said):
    def function(a, b=2):
        pass

    with pytest.raises(error, match=said):
        single_instance(**options)(function)
    with pytest.raises(error, match=said):
        app.task(base=SingleInstanceTask, single_instance=options, lazy=False)(function)
    with pytest.raises(error, match=said):
        type("ClassBased", (SingleInstanceTask,), {"single_instance": options, "run": lambda self, a, b=2: None})


def test_options_that_are_no_dict_are_a_type_error(app):
    with pytest.raises(TypeError, match="single_instance must be a dict of options, not bool"):
        app.task(base=SingleInstanceTask, single_instance=True, lazy=False)(single_instance)


def test_what_is_not_given_comes_from_the_settings_as_they_are(app, settings):
    @app.task
    @single_instance(wait=3, expire=None)
    def task():
        pass

    assert task._options == complete({"wait": 3.0}, conf.get())
    assert (task._options.wait, task._options.expire, task._options.on_conflict) == (3.0, 30.0, "raise")
    settings.DJANGO_REDISLOCK = {"CELERY": {"WAIT": 5, "EXPIRE": 7, "ON_CONFLICT": "skip"}}
    assert (task._options.wait, task._options.expire, task._options.on_conflict) == (3.0, 7.0, "skip")


def test_subclasses_inherit_options_one_by_one(app):
    class Base(SingleInstanceTask):
        single_instance = {"expire": 60, "on_conflict": "skip"}

    @app.task(base=Base, single_instance={"expire": 5})
    def one():
        pass

    @app.task(base=Base)
    @single_instance(wait=1)
    def two():
        pass

    assert (one._options.expire, one._options.on_conflict) == (5.0, "skip")
    assert (two._options.expire, two._options.on_conflict, two._options.wait) == (60.0, "skip", 1.0)
    assert isinstance(one.single_instance.lost, type(None)), "the name now gives the execution"


@shared_task
def shared():
    pass


def nothing():
    pass


class CallableObject:
    def __call__(self):
        pass

    def method(self):
        pass


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("decorator", [single_instance, single_instance(), single_instance(expire=5)])
def test_on_top_of_the_task_decorator_it_says_what_to_write(app, decorator, lazy):
    for task in (app.task(lazy=lazy)(nothing), shared):
        with pytest.raises(
            TypeError, match=r"below @shared_task or @app.task(.|\n)*@shared_task\n *@single_instance\n *def"
        ):
            decorator(task)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("report:{id}", "decorates functions, not 'report:{id}'; options are given by name"),
        (5, "decorates functions, not 5"),
        (Task, "write a task class as class X"),
        (functools.partial(print), r"decorates functions, not functools.partial\(<built-in function print>\)"),
        (functools.update_wrapper(functools.partial(nothing), nothing), "decorates functions, not functools.partial"),
        (functools.update_wrapper(CallableObject(), nothing), "decorates functions, not <tests"),
        (functools.lru_cache(nothing), "decorates functions, not <functools._lru_cache_wrapper"),
        (CallableObject().method, "decorates functions, not <bound method CallableObject.method"),
        (CallableObject(), "decorates functions, not <tests.celery.test_options.CallableObject"),
        (len, "decorates functions, not <built-in function len>"),
    ],
)
def test_what_is_no_function_is_a_type_error(wrong, said):
    with pytest.raises(TypeError, match=said):
        single_instance(wrong)


def test_options_in_two_places_are_a_type_error(app):
    def task():
        pass

    with pytest.raises(TypeError, match="has both @single_instance and single_instance="):
        app.task(single_instance={"expire": 5}, lazy=False)(single_instance(task))


def test_a_marked_function_stays_the_function_that_it_was():
    def function(a, b=2):
        """Say what it does."""
        return a + b

    marked = single_instance(function)
    assert marked is function
    assert marked(1) == 3
    assert list(inspect.signature(marked).parameters) == ["a", "b"]


def test_the_mark_changes_no_other_task(app):
    @app.task
    def other():
        return 1

    assert not isinstance(other._get_current_object(), SingleInstanceMixin)
    assert other.__class__.__mro__[1:] == app.Task.__mro__


def test_the_mixin_goes_in_front_of_whatever_base_the_task_has(app):
    class Base(Task):
        throws = KeyError

    @app.task(base=Base)
    @single_instance
    def of_a_project():
        pass

    @app.task
    @single_instance
    def of_the_app():
        pass

    assert isinstance(of_a_project._get_current_object(), Base)
    assert isinstance(of_the_app._get_current_object(), app.Task)
    assert of_a_project.throws == (KeyError, TaskAlreadyRunning), "so that a duplicate is logged at INFO"
    assert of_the_app.throws == (TaskAlreadyRunning,)
    assert Base.throws is KeyError


def nothing():
    pass


class OwnRequest(Request):
    pass


class WithRequest:
    Request = OwnRequest


@pytest.mark.parametrize("way", ["class", "path", "inherited", "class in front", "option"])
def test_a_request_of_the_tasks_own_does_not_hide_ours(client, app, way):
    """Nobody released the lock of a job that had reached its hard time limit."""
    options = {"base": SingleInstanceTask, "single_instance": {"scope": "job"}}
    if way == "class in front":
        options["base"] = type("Mine", (WithRequest, SingleInstanceTask), {})
    elif way in ("class", "path", "inherited"):
        given = f"{__name__}:OwnRequest" if way == "path" else OwnRequest
        options["base"] = type("Mine", (SingleInstanceTask,), {"Request": given})
        if way == "inherited":
            options["base"] = type("Derived", (options["base"],), {})
    else:
        options["Request"] = OwnRequest

    @app.task(lazy=False, **options)
    def task():
        pass

    task.delay()
    (message,) = take(app)
    received = task.Request(message, app=app, task=task, headers=message.headers)
    assert isinstance(received, OwnRequest)
    received.on_timeout(soft=False, timeout=1)
    assert task.lock_info() is None
    plain = app.task(lazy=False, base=SingleInstanceTask, name="plain")(nothing)
    assert not issubclass(plain.Request, OwnRequest)


def test_delay_on_commit_is_kept(app, django_capture_on_commit_callbacks, db):
    @app.task
    @single_instance
    def task(a):
        pass

    assert isinstance(task._get_current_object(), DjangoTask)
    assert issubclass(SingleInstanceTask, DjangoTask)
    with django_capture_on_commit_callbacks() as callbacks, transaction.atomic():
        task.delay_on_commit(1)
    assert len(callbacks) == 1


@pytest.mark.parametrize("bind", [True, False])
def test_celery_still_checks_the_arguments_when_publishing(app, bind):
    def function(a, b=2):
        pass

    def bound(self, a, b=2):
        pass

    task = app.task(bind=bind)(single_instance(bound if bind else function))
    for args, kwargs in [((), {}), ((1, 2, 3), {}), ((1,), {"c": 3})]:
        with pytest.raises(TypeError, match=r"(bound|function)\(\)"):
            task.apply_async(args, kwargs)


def sent(task, *args, **kwargs):
    """Publish to a broker in memory, and return the message."""
    with task.app.connection_for_write() as connection:
        task.apply_async(args, kwargs, connection=connection)
        with connection.SimpleQueue("celery") as queue:
            return queue.get(timeout=30)


def test_the_key_travels_in_a_header(app):
    @app.task
    @single_instance(key="{a}")
    def task(a, b=2):
        pass

    assert sent(task, 42).headers["single_instance_key"] == "42"
    message = task.s(43)
    message.options["headers"] = {"mine": "kept", "single_instance_key": "42"}
    with app.connection_for_write() as connection:
        message.apply_async(connection=connection)
        with connection.SimpleQueue("celery") as queue:
            headers = queue.get(timeout=30).headers
    assert (headers["mine"], headers["single_instance_key"]) == ("kept", "43"), "the arguments have the last word"


def test_arguments_without_a_stable_form_are_refused_when_publishing(app):
    @app.task(serializer="pickle")
    @single_instance
    def task(a):
        pass

    with pytest.raises(TypeError, match="no key can be made"):
        task.delay(object())


def test_with_argument_checks_off_the_worker_tells_of_wrong_arguments(app):
    @app.task(typing=False)
    @single_instance
    def task(a):
        pass

    assert "single_instance_key" not in sent(task).headers


def test_the_error_survives_pickle_and_json(app):
    error = TaskAlreadyRunning("celery:a:1", "a[id] on host pid 1", 3.5)
    for copy in (
        pickle.loads(pickle.dumps(error)),
        app.backend.exception_to_python(json.loads(json.dumps(app.backend.prepare_exception(error, "json")))),
    ):
        assert type(copy) is TaskAlreadyRunning
        assert (copy.key, copy.holder, copy.ttl) == ("celery:a:1", "a[id] on host pid 1", 3.5)
        assert str(copy) == "celery:a:1 is already running: a[id] on host pid 1"


def test_an_inherited_key_is_checked_against_the_function_that_it_comes_to(app):
    class Base(SingleInstanceTask):
        single_instance = {"key": ["account_id"]}

    class OfAClass(Base):
        def run(self, account_id):
            pass

    for task in (
        lambda f: app.task(base=Base, lazy=False)(f),
        lambda f: app.task(base=Base, lazy=False)(single_instance(f)),
    ):
        with pytest.raises(ValueError, match="key names 'account_id', which is no parameter of nothing: it has none"):
            task(nothing)
    with pytest.raises(
        ValueError, match=r"key names 'account_id', which is no parameter of .*Wrong.run: self, account"
    ):
        type("Wrong", (Base,), {"run": wrong_run})


def wrong_run(self, account):
    pass


wrong_run.__qualname__ = "Wrong.run"


def test_a_list_of_names_that_no_argument_has_is_refused_when_publishing(app):
    """Known only then, where other keyword arguments are taken; else all would have one key."""

    @app.task
    @single_instance(key=["account_id"])
    def anything(*args, **kwargs):
        pass

    assert sent(anything, account_id=5).headers["single_instance_key"]
    for args, kwargs in (((5,), {}), ((), {"acount_id": 5})):
        with pytest.raises(TypeError, match="names 'account_id', which is not one of the arguments"):
            anything.apply_async(args, kwargs)


# Marks without effect
