"""The scopes that begin with publishing, seen from the producer; no worker runs."""

from __future__ import annotations

import itertools
import logging
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from celery import Celery, Task, chain, chord, group
from celery.app.trace import build_tracer
from celery.backends.base import DisabledBackend
from celery.exceptions import SoftTimeLimitExceeded
from django.db import transaction
from kombu import Connection
from kombu.exceptions import SerializerNotInstalled

from django_redislock import LockBackendError, TaskAlreadyRunning
from django_redislock.celery import DuplicateResult, publishing, single_instance
from django_redislock.celery.execution_lock import Delivery
from django_redislock.celery.key import lock_name
from django_redislock.core import held_locks
from django_redislock.core.contention import contention
from django_redislock.core.lease import Lease
from django_redislock.signals import lock_conflict
from tests.support import BUSY, Interrupted, counting, interruptions, wait_until

QUEUE = "producer"  # that broker is shared by all tests of a process
SCOPES = ["queued", "queued+run", "job"]


@pytest.fixture(scope="module")
def app():
    with Celery("producer", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = QUEUE
        yield app


CANVASES = {
    "chain": lambda one, other: chain(one, other),
    "group": lambda one, other: group(one, other),
    "chord": lambda one, other: chord([one, other], other),
}


@pytest.fixture(params=SCOPES)
def scope(request):
    return request.param


@pytest.fixture
def make(app, request):
    numbers = itertools.count()

    def make(function=lambda a=1, password="": None, *, task_options=None, **options):
        function.__name__ = "body"
        name = f"{request.node.name}.{next(numbers)}"
        return app.task(name=name, shared=False, lazy=False, **task_options or {})(single_instance(**options)(function))

    return make


def taken(app, task):
    """Take the messages out of the queue, and return the task's."""
    found = []
    with app.connection_for_read() as connection, connection.SimpleQueue(QUEUE) as queue, suppress(queue.Empty):
        while True:
            message = queue.get_nowait()
            message.ack()
            if message.headers["task"] == task.name:
                found.append(message)
    return found


def messages(app, task):
    """Take the messages out of the queue, and return the ids of the task's."""
    return [message.headers["id"] for message in taken(app, task)]


def test_a_duplicate_gets_the_result_of_the_one_that_waits(client, app, make, scope):
    task = make(scope=scope)
    first, second, other = task.delay(1), task.delay(1), task.delay(2)
    assert type(second) is DuplicateResult
    assert second.id == first.id
    assert not isinstance(first, DuplicateResult)
    assert not isinstance(other, DuplicateResult)
    assert messages(app, task) == [first.id, other.id]
    assert second.state == "PENDING"


def test_the_first_owns_its_result_whoever_asks_later(client, make, scope):
    task = make(scope=scope)
    ids = {task.delay().id for _ in range(5)}
    assert len(ids) == 1


def test_a_duplicate_may_be_an_error_instead(client, app, make, scope):
    task = make(scope=scope, on_duplicate="raise")
    first = task.delay()
    with pytest.raises(TaskAlreadyRunning, match=rf"is already running: .*\[{first.id}\] on "):
        task.delay()
    assert messages(app, task) == [first.id]


def test_a_duplicate_is_told(client, make, caplog):
    task = make(scope="queued")
    caplog.set_level(logging.INFO, logger="django_redislock")
    heard = []
    lock_conflict.connect(receiver := lambda **data: heard.append(data))
    first = task.delay()
    assert heard == []
    task.delay()
    lock_conflict.disconnect(receiver)
    assert f"{task.name} is not published, because the lock has been held for " in caplog.text
    (data,) = heard
    assert (data["task"], data["holder"].label) == (task.name, f"{task.name}[{first.id}]")


def test_what_is_not_published_is_a_warning_once_a_minute_for_each_key(client, make, caplog):
    task = make(scope="job")
    caplog.set_level(logging.INFO, logger="django_redislock")
    for key in (1, 1, 1, 2, 2):
        task.delay(key)
    levels = [record.levelname for record in caplog.records if "is not published" in record.getMessage()]
    assert levels == ["WARNING", "INFO", "WARNING"]


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
        plain = older.task(bind=True, name=task.name, shared=False, lazy=False)(body)
        while found := taken(app, task):
            (message,) = found
            assert task.lock_info().label == f"{task.name}[{first.id}]"
            request = {**message.headers, "properties": message.properties, "delivery_info": {}}
            build_tracer(task.name, plain, app=older)(first.id, (), {}, {**request, "called_directly": False})
    assert task.lock_info() is None


def test_a_duplicate_is_counted_for_the_page_about_contention(client, make):
    task = make(scope="queued")
    first = task.delay()
    assert contention(client).names == {}
    with counting(client) as counts:
        assert task.delay().id == first.id
    assert counts["evalsha"] == 3  # the try, who holds it, and the count; EVAL would follow one that is not loaded yet
    ((name, found),) = contention(client).names.items()
    assert name.startswith(f"celery-queue:{task.name}")
    assert (found.duplicates, found.waits) == (1, 0)


def test_a_retry_holds_its_place_though_the_run_that_published_it_ends_later(client, app, make):
    task = make(lambda self: self.retry(countdown=60), scope="queued+run", task_options={"bind": True})
    first = task.delay()
    request = {"id": first.id, "root_id": first.id, "retries": 0, "args": (), "kwargs": {}, "delivery_info": {}}
    traced = build_tracer(task.name, task, app=app)(first.id, (), {}, {**request, "called_directly": False})
    assert (traced.info and traced.info.state, messages(app, task)) == ("RETRY", [first.id, first.id])
    second = task.delay()
    assert (type(second), second.id) == (DuplicateResult, first.id)


def test_a_conflict_that_is_retried_by_hand_holds_its_place(client, app, make):
    def later(task, error):
        raise task.retry(countdown=60)

    task = make(lambda self: None, scope="queued+run", on_conflict=later, task_options={"bind": True})
    first = task.delay()
    request = {"id": first.id, "root_id": first.id, "retries": 0, "args": (), "kwargs": {}, "delivery_info": {}}
    (running, _) = task._locks((), {})
    with running:
        traced = build_tracer(task.name, task, app=app)(first.id, (), {}, {**request, "called_directly": False})
    assert (traced.info and traced.info.state, messages(app, task)) == ("RETRY", [first.id, first.id])
    second = task.delay()
    assert (type(second), second.id) == (DuplicateResult, first.id)


def test_a_message_whose_task_has_ended_makes_nobody_a_duplicate(client, app, make, scope):
    """It was revoked, or a purge or a lost broker took it away and somebody said so."""
    task = make(scope=scope)
    for end in (task.backend.mark_as_revoked, lambda id: task.backend.mark_as_failure(id, ZeroDivisionError())):
        first = task.delay()
        published = task.lock_info().acquired_at
        wait_until(lambda published=published: datetime.now(UTC) - published > timedelta(milliseconds=2))
        end(first.id)
        second = task.delay()
        assert type(second) is not DuplicateResult
        assert messages(app, task) == [first.id, second.id]
        assert task.delay().id == second.id
        assert task.unlock()


def test_a_state_that_was_stored_before_is_not_the_messages_end(client, app, make, scope):
    task = make(scope=scope)
    task.backend.mark_as_done("nightly", "of yesterday")
    task.apply_async(task_id="nightly")
    assert type(task.delay()) is DuplicateResult


def test_a_run_keeps_its_lock_whatever_was_stored_of_it(client, make):
    task = make(scope="job")
    first = task.delay()
    request = task._running_lock(f"celery:{task.name}:x", task._options, None, (), {})
    running = request.with_name(task.lock_info().name, label=f"{task.name}[{first.id}]", delivery=Delivery(first.id))
    assert running.acquire(blocking=False), "it takes over from its message"
    started = task.lock_info().acquired_at
    wait_until(lambda: datetime.now(UTC) - started > timedelta(milliseconds=2))
    task.backend.mark_as_failure(first.id, ZeroDivisionError())
    assert task.delay().id == first.id
    running.release()


def test_where_results_are_lost_or_not_kept_a_duplicate_is_one(client, make, scope, monkeypatch, caplog):
    task = make(scope=scope)
    first = task.delay()
    monkeypatch.setattr(type(task.backend), "get_task_meta", lambda *args, **options: 1 / 0)
    assert task.delay().id == first.id
    assert "could not be read" in caplog.text
    caplog.clear()
    task.backend = DisabledBackend(task.app)
    assert task.delay().id == first.id
    assert caplog.text == ""


@pytest.mark.parametrize("by", ["task", "call"])
def test_the_result_of_a_duplicate_is_ignored_as_the_holders_is(client, make, scope, by):
    task = make(scope=scope, task_options={"ignore_result": by == "task"})
    task.apply_async(**{"ignore_result": True} if by == "call" else {})
    duplicate = task.delay()
    assert type(duplicate) is DuplicateResult
    assert duplicate.ignored
    assert duplicate.get(timeout=5) is None
    other = make(scope=scope)
    other.delay()
    assert not other.delay().ignored


def test_a_duplicate_of_another_process_has_no_result_by_rpc(client, make, monkeypatch):
    task = make(scope="job")
    task.delay()
    monkeypatch.setattr(type(task.backend), "as_uri", lambda self: "rpc://")
    assert not task.delay().elsewhere
    monkeypatch.setattr(publishing, "HOST", "another")
    with pytest.raises(NotImplementedError, match="to nobody but the process that published the task"):
        task.delay().get(timeout=5)


def test_the_run_scope_asks_nothing_when_publishing(client, make):
    task = make()
    task.delay()
    with counting(client) as counts:
        task.delay()
    assert counts["evalsha"] + counts["eval"] == 0


def test_publishing_costs_one_command(client, make, scope):
    task = make(scope=scope)
    task.delay(1)
    with counting(client) as counts:
        task.delay(2)
    assert counts["evalsha"] + counts["eval"] == 1


def test_members_of_canvases_are_published_in_any_case(client, app, make, scope):
    task = make(scope=scope)
    task.delay()
    one, last = task.si(), task.si()
    assert messages(app, task) != []
    for canvas in CANVASES.values():
        result = canvas(one, last).apply_async()
        assert not isinstance(result, DuplicateResult)
        assert messages(app, task) != []
    frozen = task.si()
    expected = frozen.freeze().id
    assert frozen.apply_async().id == expected
    assert messages(app, task) == [expected]


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 100),
        ({"countdown": 50}, 150),
        ({"eta": lambda: datetime.now(UTC) + timedelta(seconds=50)}, 150),
        ({"eta": lambda: datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=50)}, 150),
        ({"eta": lambda: (datetime.now(UTC) + timedelta(seconds=50)).isoformat()}, 150),
        ({"eta": lambda: datetime.now(UTC) - timedelta(seconds=50)}, 100),
        ({"expires": 30}, 30),
        ({"expires": lambda: datetime.now(UTC) + timedelta(seconds=30)}, 30),
        ({"expires": 300}, 100),
        ({"countdown": 50, "expires": 120}, 120),
    ],
)
def test_the_life_of_a_message(client, app, make, scope, options, seconds):
    task = make(scope=scope, queue_life=100)
    options = {name: value() if callable(value) else value for name, value in options.items()}
    task.apply_async(**options)
    (info,) = held_locks(client)
    assert seconds - BUSY - 5 < info.ttl <= seconds + 0.1


def test_the_tasks_own_expiry_counts(client, make):
    make(scope="queued", queue_life=100, task_options={"expires": 40}).delay()
    (info,) = held_locks(client)
    assert 30 < info.ttl <= 40


def test_a_message_that_could_not_be_published_leaves_no_lock(client, make, scope):
    task = make(scope=scope)
    with pytest.raises(SerializerNotInstalled):
        task.apply_async(serializer="no such serializer")
    assert list(held_locks(client)) == []
    assert not isinstance(task.delay(), DuplicateResult)


@pytest.mark.parametrize("canvas", CANVASES.values(), ids=CANVASES)
def test_a_canvas_that_could_not_be_published_leaves_no_lock(client, make, scope, canvas):
    one = make(scope=scope).si().set(serializer="no such serializer")
    with pytest.raises(SerializerNotInstalled):
        canvas(one, make(scope="run").si()).apply_async()
    assert list(held_locks(client)) == []


def test_a_message_that_could_not_be_made_leaves_no_lock(client, app, make, scope):
    task = make(scope=scope, task_options={"base": Misrouted})
    connections = []
    for _ in range(4):
        with pytest.raises(ZeroDivisionError):
            task.delay()
        assert task.lock_info() is None
        connections.append(client.info("stats")["total_connections_received"])
    assert connections[1:] == connections[1:2] * 3, "none is lost with it"
    task.broken = False
    assert messages(app, task) == []
    first = task.delay()
    assert (task.delay().id, messages(app, task)) == (first.id, [first.id])


class Misrouted(Task):
    broken = True

    def shadow_name(self, *args):
        return 1 / 0 if self.broken else None


def test_other_caches_are_other_locks(client, make, settings, server):
    task = make(scope="queued")
    task.delay()
    settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": server.url_of_db(5)}}
    assert task.lock_info() is None


def test_nobody_is_told_of_a_message_that_is_not_published(client, app, make, scope, monkeypatch):
    """No class of the project's, which would take it for a failure, nor whoever traces Celery's own publishing, as Sentry does."""
    told, traced, publish = [], [], Task.apply_async

    class Careful(Task):
        def apply_async(self, *args, **options):
            try:
                return super().apply_async(*args, **options)
            except BaseException as error:
                told.append(error)  # to publish it later, perhaps
                raise

    def trace(self, *args, **options):
        try:
            result = publish(self, *args, **options)
        except BaseException as error:
            traced.append(error)
            raise
        traced.append(result.id)
        return result

    monkeypatch.setattr(Task, "apply_async", trace)
    monkeypatch.setattr(app.backend, "on_task_call", lambda producer, task_id: told.append(task_id))
    task = make(scope=scope, task_options={"base": Careful})
    first = task.delay()
    assert (task.delay().id, told, traced) == (first.id, [first.id], [first.id])
    strict = make(scope=scope, on_duplicate="raise", task_options={"base": Careful})
    second = strict.delay()
    with pytest.raises(TaskAlreadyRunning) as caught:
        strict.delay()
    assert caught.value.__context__ is None
    assert told == traced == [first.id, second.id]


def test_a_connection_or_producer_that_is_given_is_used(client, app, make, scope, monkeypatch):
    task = make(scope=scope)
    monkeypatch.setattr(app.producer_pool, "acquire", lambda **options: pytest.fail("the app's own was used"))
    with Connection("memory://elsewhere") as other, other.Producer() as producer:
        ways = [{"connection": other}, {"producer": producer}, {"publisher": producer}]
        for number, way in enumerate(ways):
            result = task.apply_async((number,), **way)
            assert task.apply_async((number,), **way).id == result.id
    assert len(messages(app, task)) == 3  # all connections to the memory broker of a process have the same queues


@pytest.mark.parametrize("scope", ["run", *SCOPES])
def test_what_is_given_by_its_place_arrives(client, app, make, scope):
    task, after = make(scope=scope), make().si()
    task.apply_async((1,), None, "an-id", None, after, after, "a shadow")
    (message,) = taken(app, task)
    _, _, embedded = message.payload
    assert [[each["task"] for each in embedded[name]] for name in ("callbacks", "errbacks")] == [[after.task]] * 2
    assert (message.headers["id"], message.headers["shadow"]) == ("an-id", "a shadow")


class Traced(Task):
    """As sentry-sdk and ddtrace do it: Celery then shows the inner headers as those of the request."""

    def apply_async(self, *args, headers=None, **options):
        return super().apply_async(*args, headers={**(headers or {}), "headers": {"trace": "1"}}, **options)


def ten_seconds_later(headers):
    """Let the message have waited longer, where it tells of that."""
    for those in (headers, headers["headers"]):
        if "single_instance_first_conflict" in those:
            those["single_instance_first_conflict"] -= 10


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
    with task._running_lock(lock_name(task.name, task._key_of((1,), {})), task._options, None, (), {}):
        while found:
            (message,) = found
            assert message.headers["headers"]["trace"] == "1"
            key = key or message.headers["single_instance_key"]
            assert message.headers["single_instance_key"] == key
            ten_seconds_later(message.headers)
            request = {**message.headers, "properties": message.properties, "delivery_info": {}}
            build_tracer(task.name, task, app=app)(first.id, (1,), {}, {**request, "called_directly": False})
            states.append(task.AsyncResult(first.id).state)
            found = taken(app, task)
    assert states == ["RETRY", "RETRY", "FAILURE"]


def test_a_message_without_our_headers_is_told_once_where_it_should_have_had_a_lock(client, app, make, scope, caplog):
    task = make(scope=scope)
    request = {"id": "foreign", "root_id": "foreign", "delivery_info": {}, "called_directly": False}
    for _ in range(2):
        build_tracer(task.name, task, app=app)("foreign", (), {}, request)
    said = f"{task.name}[foreign] has been published without its lock: "
    assert caplog.text.count(said) == 1


def test_a_task_that_is_published_in_another_way_has_its_lock(client, make, scope):
    """Whose class hands its messages to something else than Celery's producer."""

    class Outbox(Task):
        def apply_async(self, args=None, kwargs=None, **options):
            return self.AsyncResult(options["task_id"])

    task = make(scope=scope, task_options={"base": Outbox})
    first = task.delay()
    assert task.lock_info().label == f"{task.name}[{first.id}]"


def test_one_of_many_threads_publishes(client, app, make, scope):
    task = make(scope=scope)
    start = threading.Barrier(8)

    def publish(_):
        start.wait(BUSY)
        return [task.delay(number).id for number in range(20)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(publish, range(8)))
    assert found == [found[0]] * 8
    assert sorted(messages(app, task)) == sorted(found[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in destructors, it is swallowed
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
@pytest.mark.parametrize("error", [Interrupted, SoftTimeLimitExceeded])
def test_an_interruption_at_any_point_leaves_a_message_or_no_lock_and_no_reply_unread(client, make, error):
    """Without Celery's pools, which it may leave locked."""

    class Noted(Task):
        def apply_async(self, args=None, kwargs=None, **options):
            options["producer"].note(options["task_id"])

    task = make(scope="queued", task_options={"base": Noted})
    noted, interrupted = [], 0
    producer = SimpleNamespace(note=noted.append)
    task.apply_async(producer=producer)
    with interruptions(error) as interrupted_after:
        for number in range(500):
            try:
                interrupted_after(random.uniform(0.00002, 0.0005))
                task.apply_async((number,), producer=producer)
                time.sleep(0.1)
            except error:
                interrupted += 1
            info = task.lock_info(number)
            assert info is None or info.arguments.startswith(f"a={number}, ")
    assert interrupted > 200
    held = {info.label.removeprefix(f"{task.name}[").removesuffix("]") for info in held_locks(client)}
    assert held - set(noted) == set()


def test_without_redis_publishing_is_a_typed_error_and_never_none(make, scope, settings, monkeypatch):
    monkeypatch.setattr(Lease, "retry_for", 0.3)
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    task = make(scope=scope)
    with pytest.raises(LockBackendError):
        task.delay()
    for canvas in CANVASES.values():
        with pytest.raises(LockBackendError):
            canvas(task.si(), task.si()).apply_async()


def test_without_redis_publishing_may_go_on(app, make, scope, settings, caplog):
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    task = make(scope=scope, on_backend_error="run")
    result = task.delay()
    assert messages(app, task) == [result.id]
    assert "is published without its lock, because Redis does not answer" in caplog.text


def test_nothing_is_locked_where_locks_are_off(client, make, scope, settings):
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    task = make(scope=scope)
    assert task.delay().id != task.delay().id
    assert list(held_locks(client)) == []


def test_eager_tasks_run_one_after_the_other_and_leave_nothing(client, app, make, scope):
    task = make(lambda a=1: a, scope=scope)
    app.conf.task_always_eager = True
    try:
        assert [task.delay().get(), task.delay().get()] == [1, 1]
        done = {kind: canvas(task.si(), task.si()).apply_async().get() for kind, canvas in CANVASES.items()}
        assert done == {"chain": 1, "group": [1, 1], "chord": 1}
    finally:
        app.conf.task_always_eager = False
    assert list(held_locks(client)) == []


def test_on_commit_takes_the_lock_on_commit(client, app, make, scope, db, django_capture_on_commit_callbacks):
    task = make(scope=scope)
    with django_capture_on_commit_callbacks(execute=True):
        with transaction.atomic():
            task.delay_on_commit()
            assert list(held_locks(client)) == []
        with suppress(ZeroDivisionError), transaction.atomic():
            task.delay_on_commit(2)
            raise ZeroDivisionError
    assert len(list(held_locks(client))) == 1
    assert len(messages(app, task)) == 1


def test_the_record_tells_of_the_arguments_and_hides_secrets(client, make, scope):
    task = make(scope=scope, key=["a"])
    task.delay("x" * 1000, password="hush")
    info = task.lock_info("x" * 1000)
    assert info.label.startswith(f"{task.name}[")
    assert info.arguments.startswith("a='xxx")
    assert len(info.arguments) < 100
    assert "hush" not in str(info)
    assert "password='****" in info.arguments
    assert info.worker == ""


def test_an_argument_that_has_no_words_is_told_all_the_same(client, make):
    class Odd:
        def __json__(self):
            return "odd"

        def __repr__(self):
            raise ZeroDivisionError

    task = make(scope="queued", key=[])
    task.delay([Odd()])
    assert task.lock_info().arguments.startswith("a=[<Odd instance at ")


def test_unlock_frees_whatever_the_scope_holds(client, make, scope):
    task = make(scope=scope)
    task.delay()
    assert task.lock_info() is not None
    assert task.unlock() is True
    assert task.lock_info() is None
    assert task.unlock() is False
    assert not isinstance(task.delay(), DuplicateResult)


@pytest.mark.parametrize("task_id", ["of my own", "ünïcode", "x" * 300, "a:b"])
def test_any_id_of_a_task_will_do(client, make, task_id):
    task = make(scope="job")
    assert task.apply_async(task_id=task_id).id == task_id
    assert task.delay().id == task_id
