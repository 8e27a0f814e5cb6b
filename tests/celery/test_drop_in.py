"""The bases in place of those of celery-once and celery-singleton do what the pages and the code of these promise.

A test with the fixture `once` or `singleton` runs with the other package, too.
"""

from __future__ import annotations

import pickle
import warnings
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from celery import VERSION, Celery, group

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import DuplicateResult
from django_redislock.celery.drop_in import AlreadyQueued, DuplicateTaskError, QueueOnce, Singleton
from tests.celery.deliveries import deliver, take, work
from tests.support import lived

PROJECT = """
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import DuplicateTaskError, Singleton


@app.task(shared=False, base=QueueOnce, once={"keys": ["user_id"], "timeout": 600})
def send_digest(user_id, verbose=False):
    return f"digest for {user_id}"


@app.task(shared=False, base=Singleton, unique_on=["user_id"], raise_on_duplicate=True, lock_expiry=600)
def import_contacts(user_id, source="upload"):
    return f"contacts of {user_id}"


def send(user_id):
    try:
        send_digest.delay(user_id)
    except AlreadyQueued as error:
        return f"again in {error.countdown:.0f} s" if 0 < error.countdown <= 600 else "?"


def upload(user_id):
    try:
        return import_contacts.delay(user_id, source="phone").id
    except DuplicateTaskError as error:
        return error.task_id
"""


@pytest.fixture
def shop(server, client):
    """An app with settings of both packages."""
    with Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = "drop-in"
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": server.url}}
        app.conf.singleton_backend_url = server.url
        yield app
        take(app)


# Outside a worker, Celery 5.4 forgets the request of a task that has a __call__ of its own.
@pytest.fixture(params=["django_redislock.celery.drop_in", "celery_once"][: 1 if VERSION < (5, 5) else 2])
def once(request, shop):
    """A module that has `QueueOnce`, and a function that makes a task of its kind."""
    return kind(request, shop, "QueueOnce")


@pytest.fixture(params=["django_redislock.celery.drop_in", "celery_singleton"])
def singleton(request, shop):
    """A module that has `Singleton`, and a function that makes a task of its kind."""
    return kind(request, shop, "Singleton")


@pytest.fixture
def ours(shop):
    """`kind` for a base of this package."""
    return lambda base, *body, **options: maker(shop, base)(*body, **options)


def kind(request, shop, base):
    module = load(request.param)
    return SimpleNamespace(**vars(module), make=maker(shop, getattr(module, base)))


def load(name):
    """Import the other package, whose code has escapes of which newer Pythons warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


def maker(shop, base):
    def make(body=lambda self, a=1, b=2: "ran", **options):
        body.__name__ = "body"
        return shop.task(base=base, bind=True, shared=False, lazy=False, **options)(body)

    return make


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_one_changed_import_migrates_a_project(shop, after):
    project = PROJECT
    if after:
        project = project.replace("celery_once ", "django_redislock.celery.drop_in ")
        project = project.replace("celery_singleton ", "django_redislock.celery.drop_in ")
    else:
        load("celery_once"), load("celery_singleton")
    code = {"app": shop, "__name__": "project"}
    exec(project, code)
    assert code["send"](1) is None
    assert code["send"](1).startswith("again in ")
    first = code["upload"](1)
    assert code["upload"](1) == first
    assert [deliver(shop, message) for message in take(shop)] == ["digest for 1", "contacts of 1"]
    assert code["send"](1) is None
    assert code["upload"](1) != first


# celery-once


def test_a_task_that_waits_is_already_queued(once, shop):
    task = once.make()
    task.delay(1)
    with pytest.raises(once.AlreadyQueued) as refused:
        task.delay(a=1)
    assert 0 < refused.value.countdown <= 3600
    task.delay(2)
    assert [message.payload[0] for message in take(shop)] == [[1], [2]]


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_task_ends_its_lock(once, shop, fails):
    def body(self):
        with pytest.raises(once.AlreadyQueued):
            self.delay()
        seen.append(self.request.id)
        if fails:
            raise KeyError

    seen: list[str] = []
    task = once.make(body)
    expected = [task.delay().id]
    work(shop)
    expected.append(task.delay().id)
    work(shop)
    assert seen == expected


def test_a_retry_keeps_the_lock(once, shop):
    def body(self):
        if not self.request.retries:
            self.retry(countdown=0)

    task = once.make(body)
    task.delay()
    deliver(shop, *take(shop))
    with pytest.raises(once.AlreadyQueued):
        task.delay()
    deliver(shop, *take(shop))
    task.delay()


def test_a_graceful_duplicate_is_rejected_without_an_id(once, shop):
    task = once.make(once={"graceful": True})
    assert task.delay().id
    refused = task.delay()
    assert (refused.id, refused.state, refused.get()) == (None, "REJECTED", None)
    with pytest.raises(once.AlreadyQueued):
        task.apply_async(once={"graceful": False})


def test_one_call_may_be_graceful(once, shop):
    task = once.make()
    task.delay(1)
    assert task.apply_async((1,), once={"graceful": True}).state == "REJECTED"
    assert task.s(1).set(once={"graceful": True}).delay().state == "REJECTED"
    with pytest.raises(once.AlreadyQueued):
        task.apply_async((1,))


@pytest.mark.parametrize(("keys", "published"), [(["a"], 2), ([], 1), (None, 3)])
def test_keys_are_the_arguments_that_count(once, shop, keys, published):
    task = once.make(once={"keys": keys, "graceful": True})
    for a, b in (1, 1), (1, 2), (2, 1):
        task.delay(a, b=b)
    assert len(take(shop)) == published


def test_the_lock_may_end_before_the_run(once, shop):
    def body(self):
        if len(seen) < 3:
            seen.append(self.delay().id)

    seen: list[str] = []
    task = once.make(body, once={"unlock_before_run": True})
    first = task.delay()
    with pytest.raises(once.AlreadyQueued):
        task.delay()
    assert [headers["id"] for headers in work(shop)] == [first.id, *seen]
    assert len(seen) == 3


def test_the_lock_of_a_message_ends_after_the_timeout(once, shop):
    task = once.make(once={"timeout": 0.2})
    task.delay()
    with pytest.raises(once.AlreadyQueued) as refused:
        task.delay()
    assert refused.value.countdown <= 0.2
    lived(0.25)
    task.apply_async(once={"timeout": 600})
    lived(0.25)
    with pytest.raises(once.AlreadyQueued):
        task.delay()


def test_the_app_has_a_default_timeout(once, shop):
    shop.conf.ONCE["settings"]["default_timeout"] = 0.2
    task = once.make()
    task.delay()
    lived(0.25)
    task.delay()


# celery-singleton


def test_a_duplicate_gets_the_result_of_the_task_that_waits(singleton, shop):
    task = singleton.make()
    first = task.delay(1, 2)
    again = task.delay(1, 2)
    assert again.id == first.id
    assert task.delay(1, 3).id != first.id
    work(shop)
    assert again.get() == "ran"
    assert task.delay(1, 2).id != first.id


def test_a_failed_task_is_no_duplicate(singleton, shop):
    task = singleton.make(lambda self: 1 / 0)
    first = task.delay()
    work(shop)
    assert task.delay().id != first.id


def test_a_duplicate_may_raise(singleton, shop):
    task = singleton.make(raise_on_duplicate=True)
    first = task.delay()
    with pytest.raises(singleton.DuplicateTaskError) as refused:
        task.delay()
    assert refused.value.task_id == first.id
    assert str(refused.value) == f"Attempted to queue a duplicate of task ID {first.id}"


@pytest.mark.parametrize(("unique_on", "published"), [(["a"], 2), ("a", 2), (["a", "b"], 3), ([], 3)])
def test_unique_on_names_the_arguments_that_count(singleton, shop, unique_on, published):
    task = singleton.make(unique_on=unique_on)
    for a, b in (1, 1), (1, 2), (2, 1), (2, 1):
        task.delay(a, b)
    assert len(take(shop)) == published


def test_the_lock_of_a_message_ends_after_the_expiry(singleton, shop):
    task = singleton.make(lock_expiry=1)
    first = task.delay()
    assert task.delay().id == first.id
    lived(1.05)
    assert task.delay().id != first.id


def test_the_app_has_options_of_all_singletons(singleton, shop):
    shop.conf.update(singleton_raise_on_duplicate=True, singleton_lock_expiry=1)
    task, other = singleton.make(), singleton.make(lambda self: 1, name="other", raise_on_duplicate=False)
    task.delay()
    with pytest.raises(singleton.DuplicateTaskError):
        task.delay()
    assert other.delay().id == other.delay().id
    lived(1.05)
    task.delay()


def test_release_lock_lets_the_next_one_be_published(singleton, shop):
    task = singleton.make()
    first = task.delay(1, 2)
    task.release_lock(task_args=(1, 2))
    assert task.delay(1, 2).id != first.id


def test_a_message_that_is_not_published_leaves_no_lock(singleton, shop, monkeypatch):
    task = singleton.make()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no broker"):
        patch.setattr(shop.amqp, "send_task_message", Mock(side_effect=OSError("no broker")))
        task.delay()
    assert not isinstance(task.delay(), DuplicateResult)
    assert len(take(shop)) == 1


# What differs, because it is wrong there


def test_the_lock_of_a_long_run_does_not_end_and_that_of_a_dead_worker_does(ours, shop):
    def body(self):
        lived(0.25)
        with pytest.raises(AlreadyQueued):
            self.delay()
        return self.lock_info().ttl

    task = ours(QueueOnce, body, once={"timeout": 0.2}, single_instance={"expire": 5})
    task.delay()
    assert 0 < deliver(shop, *take(shop)) <= 5


def test_a_message_that_lost_its_lock_does_not_end_that_of_another_one(ours, shop):
    task = ours(QueueOnce, once={"timeout": 0.1})
    task.delay()
    lived(0.15)
    task.apply_async(once={"timeout": 600})
    late, second = take(shop)
    assert isinstance(deliver(shop, late).exception, TaskAlreadyRunning)
    with pytest.raises(AlreadyQueued):
        task.delay()
    assert deliver(shop, second) == "ran"


@pytest.mark.parametrize("base", [QueueOnce, Singleton])
def test_arguments_are_named_like_those_of_the_function_and_keep_their_types(ours, shop, base):
    task = ours(base)
    first = task.delay(1)
    for args, kwargs in ((), {}), ((), {"a": 1}), ((1, 2), {}):
        if base is QueueOnce:
            with pytest.raises(AlreadyQueued):
                task.apply_async(args, kwargs)
        else:
            assert task.apply_async(args, kwargs).id == first.id
    task.delay("1")
    assert len(take(shop)) == 2


def test_the_retry_of_a_singleton_runs(ours, shop):
    task = ours(Singleton, lambda self: self.request.retries or self.retry(countdown=0))
    result = task.delay()
    work(shop)
    assert result.get() == 1


def test_a_retry_waits_as_any_message_does(ours, shop):
    task = ours(
        QueueOnce, lambda self: self.request.retries or self.retry(countdown=0), once={"unlock_before_run": True}
    )
    task.delay()
    deliver(shop, *take(shop))
    with pytest.raises(AlreadyQueued):
        task.delay()
    assert deliver(shop, *take(shop)) == 1


@pytest.mark.parametrize("base", [QueueOnce, Singleton])
def test_members_of_a_group_are_published_and_do_not_overlap(ours, shop, base):
    task = ours(base, single_instance={"on_conflict": "skip", "skip_result": "busy"})
    task.delay()
    results = group(task.s(), task.s()).delay()
    waiting, first, second = take(shop)
    deliver(shop, first)
    deliver(shop, waiting)
    deliver(shop, second)
    assert results.get() == ["busy", "ran"]


def test_apply_takes_the_lock(ours):
    task = ours(QueueOnce)
    assert task.apply().get() == "ran"
    task.delay()
    assert isinstance(task.apply().result, TaskAlreadyRunning)


def test_once_is_unknown_to_celery(ours, shop):
    task = ours(QueueOnce)
    task.apply_async((1,), once={"timeout": 600})
    assert "once" not in take(shop)[0].properties
    shop.conf.task_always_eager = True
    assert task.apply_async((2,), once={"graceful": True}).get() == "ran"


def test_the_errors_are_pickled_and_are_errors_of_this_package(ours):
    errors = []
    for task in ours(QueueOnce), ours(Singleton, name="other", raise_on_duplicate=True):
        task.delay()
        with pytest.raises(TaskAlreadyRunning) as refused:
            task.delay()
        errors.append(refused.value)
        again = pickle.loads(pickle.dumps(refused.value))
        assert (type(again), vars(again), str(again)) == (type(refused.value), vars(refused.value), str(refused.value))
    assert [type(error) for error in errors] == [AlreadyQueued, DuplicateTaskError]
    assert errors[0].countdown == errors[0].ttl
