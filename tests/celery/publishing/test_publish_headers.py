"""The headers of a message, seen from the producer and from tasks that were published in another way."""

from __future__ import annotations

import pytest
from celery import Celery, Task

from tests.celery.deliveries import deliver, trace

from . import QUEUE, SCOPES, taken


@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE", "RETRY"])
def test_a_worker_without_the_decorator_frees_the_lock_of_what_it_has_run(client, app, make, scope, state):
    """The producers were deployed first."""

    def body(self, a=1):
        if state == "FAILURE":
            raise ZeroDivisionError
        if state == "RETRY" and not self.request.retries:
            raise self.retry(countdown=0)

    task = make(scope=scope)
    first = task.delay()
    with Celery("older", set_as_current=False, broker="memory://", backend="cache+memory://") as older:
        older.conf.task_default_queue = QUEUE
        body.__name__ = "older"
        older.task(bind=True, name=task.name, shared=False, lazy=False)(body)
        while found := taken(app, task):
            (message,) = found
            assert task.lock_info().label == f"{task.name}[{first.id}]"
            deliver(older, message)
    assert task.lock_info() is None


@pytest.mark.parametrize("scope", ["run", *SCOPES])
def test_what_is_given_by_its_place_arrives(client, app, make, scope):
    task, after = make(scope=scope), make().si()
    task.apply_async((1,), None, "an-id", None, after, after, "a shadow")
    (message,) = taken(app, task)
    _, _, embedded = message.payload
    assert [[each["task"] for each in embedded[name]] for name in ("callbacks", "errbacks")] == [[after.task]] * 2
    assert (message.headers["id"], message.headers["shadow"]) == ("an-id", "a shadow")


@pytest.mark.parametrize("scope", ["run", *SCOPES])
@pytest.mark.parametrize("hidden", [{"argsrepr": "('4111…',)"}, {"kwargsrepr": "{'a': '4111…'}"}])
def test_arguments_that_celery_was_told_to_hide_are_in_no_record(client, app, make, scope, hidden):
    (shown,) = hidden.values()
    seen = []
    task = make(lambda a=1, password="": seen.append(task.lock_info(a, password)), scope=scope, key=[])
    for _ in range(2):
        if "argsrepr" in hidden:
            task.apply_async(("4111 1111 1111 1111",), **hidden)
        else:
            task.apply_async((), {"a": "4111 1111 1111 1111"}, **hidden)
    waiting = task.lock_info()
    assert (waiting is None) == (scope == "run")
    for message in taken(app, task):
        deliver(app, message)
    assert {info.arguments for info in (waiting, *seen) if info} == ({shown} if waiting or seen[0] else set())
    assert scope == "queued" or seen[0].arguments == shown


class Traced(Task):
    """As sentry-sdk and ddtrace do it: Celery then shows the inner headers as those of the request."""

    def apply_async(self, *args, headers=None, **options):
        return super().apply_async(*args, headers={**(headers or {}), "headers": {"trace": "1"}}, **options)


def ten_seconds_later(headers):
    """Let the message have waited longer, where it tells of that."""
    for those in (headers, headers["headers"]):
        if "single_instance_since" in those:
            those["single_instance_since"] -= 10


def test_headers_that_a_caller_put_within_the_headers_carry_ours_too(client, app, make):
    """They are all that Celery shows a body as the headers of its request."""
    task = make()
    task.apply_async((1,), headers={"headers": {"trace": "1"}})
    (message,) = taken(app, task)
    ours = {name: value for name, value in message.headers.items() if name.startswith("single_instance_")}
    assert "single_instance_key" in ours
    assert message.headers["headers"] == {"trace": "1"} | ours


def test_headers_within_the_headers_hide_nothing_of_ours(client, app, make):
    task = make(task_options={"base": Traced}, on_conflict="reschedule", reschedule_limit=20)
    first = task.apply_async((1,))
    key, states, found = None, [], taken(app, task)
    with task._running_lock(task._key_of((1,), {}), task._options, None, (), {}):
        while found:
            (message,) = found
            assert message.headers["headers"]["trace"] == "1"
            key = key or message.headers["single_instance_key"]
            assert message.headers["single_instance_key"] == key
            ten_seconds_later(message.headers)
            deliver(app, message)
            states.append(task.AsyncResult(first.id).state)
            found = taken(app, task)
    assert states == ["RETRY", "RETRY", "FAILURE"]


def test_a_message_without_our_headers_is_told_once_where_it_should_have_had_a_lock(client, app, make, scope, caplog):
    task = make(scope=scope)
    for _ in range(2):
        trace(task, {"id": "foreign"})
    said = f"{task.name}[foreign] was published without its lock: "
    assert caplog.text.count(said) == 1


def test_a_task_that_is_published_in_another_way_has_its_lock(client, make, scope):
    """Whose class hands its messages to something else than Celery's producer."""

    class Outbox(Task):
        def apply_async(self, args=None, kwargs=None, **options):
            return self.AsyncResult(options["task_id"])

    task = make(scope=scope, task_options={"base": Outbox})
    first = task.delay()
    assert task.lock_info().label == f"{task.name}[{first.id}]"
