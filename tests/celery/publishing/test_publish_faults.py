"""Publishing that fails or is interrupted, and what third parties see of it."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import wraps
from types import SimpleNamespace

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction
from kombu import Connection
from kombu.exceptions import SerializerNotInstalled

from django_redislock import LockBackendError, TaskAlreadyRunning, lock
from django_redislock.celery import DuplicateResult, publishing, single_instance
from django_redislock.celery.execution_lock import ExecutionLock
from django_redislock.core import held_locks
from tests.celery.deliveries import deliver, take
from tests.support import BUSY, Interrupted, counting, interruptions, wait_until

from . import CANVASES, find_receivers_again, messages


@pytest.fixture(params=["ahead", "first"], autouse=True)
def form(request, monkeypatch):
    """The lock answers while Celery makes the message.

    It is asked first where Celery's function is traced, as Sentry does it.
    """
    if request.param == "first":
        publish = Task.apply_async
        monkeypatch.setattr(Task, "apply_async", wraps(publish)(lambda *args, **more: publish(*args, **more)))
    return request.param


def test_publishing_costs_one_command(client, make, scope):
    task = make(scope=scope)
    task.delay(1)
    with counting(client) as counts:
        task.delay(2)
    assert counts["evalsha"] + counts["eval"] == 1


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


class Hooked(Task):
    """Calls `hook` while Celery makes the message."""

    hook = staticmethod(lambda: None)

    def shadow_name(self, *args):
        self.hook()


def test_while_the_lock_answers_the_message_is_made(make, scope, own_server, settings, form):
    settings.DJANGO_REDISLOCK = {"URL": own_server.url}
    task = make(scope=scope, task_options={"base": Hooked})
    task.delay(0)  # there is a connection to send on now
    if form == "first":
        task.hook = lambda: task.lock_info(1).label
    else:
        own_server.pause()
        task.hook = own_server.resume
    first = task.delay(1)
    assert task.lock_info(1).label == f"{task.name}[{first.id}]"


def test_the_only_connection_may_be_needed_while_the_lock_answers(make, scope, own_server, settings):
    """By a lock of the project's own, in a router or a class of the task."""
    settings.DJANGO_REDISLOCK = {"URL": f"{own_server.url}?max_connections=1"}
    task, entered = make(scope=scope, task_options={"base": Hooked}), []

    def hook():
        with lock("the project's own"):
            entered.append(len(entered))

    task.delay(0)
    task.hook = hook
    first = task.delay(1)
    assert entered == [0]
    assert task.delay(1).id == first.id


def test_while_all_producers_are_in_use_publishing_waits_with_its_lock(client, app, make, scope):
    task = make(scope=scope)
    task.delay(0)
    with ExitStack() as producers, ThreadPoolExecutor(1) as pool:
        for _ in range(app.producer_pool.limit):
            producers.enter_context(app.producer_pool.acquire(block=True))
        first = pool.submit(task.delay, 1)
        wait_until(lambda: len(client.keys("*:lock:*")) == 2)  # leaves the lock's own connection free
        assert not first.done()
        producers.close()
        assert first.result(30).id in messages(app, task)


def test_nobody_is_told_of_a_message_that_is_not_published(client, app, make, scope, form, monkeypatch):
    """No class of the project, which would see a failure, nor what traces Celery's own publishing, as Sentry does."""
    told, traced, publish, announced = [], [], Task.apply_async, []

    def announce(headers, **others):
        announced.append(headers["id"])

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

    if form == "first":
        monkeypatch.setattr(Task, "apply_async", trace)
    before_task_publish.connect(announce)
    after_task_publish.connect(announce)
    find_receivers_again(app)
    monkeypatch.setattr(app.backend, "on_task_call", lambda producer, task_id: told.append(task_id))
    task = make(scope=scope, task_options={"base": Careful})
    first = task.delay()
    assert (task.delay().id, told, announced) == (first.id, [first.id], [first.id] * 2)
    strict = make(scope=scope, on_duplicate="raise", task_options={"base": Careful})
    second = strict.delay()
    with pytest.raises(TaskAlreadyRunning) as caught:
        strict.delay()
    assert caught.value.__context__ is None
    assert told == [first.id, second.id]
    assert announced == [first.id] * 2 + [second.id] * 2
    assert traced == ([] if form == "ahead" else told)


def test_a_connection_or_producer_that_is_given_is_used(client, app, make, scope, monkeypatch):
    task = make(scope=scope)
    monkeypatch.setattr(app.producer_pool, "acquire", lambda **options: pytest.fail("the app's own was used"))
    with Connection("memory://elsewhere") as other, other.Producer() as producer:
        ways = [{"connection": other}, {"producer": producer}, {"publisher": producer}]
        for number, way in enumerate(ways):
            result = task.apply_async((number,), **way)
            assert task.apply_async((number,), **way).id == result.id
    assert len(messages(app, task)) == 3  # all connections to the memory broker of a process have the same queues


def test_duplicates_close_no_connection_to_the_broker(client, make, own_server, scope):
    """Each closed one, so that the next message of any task waited for another one."""
    with Celery("duplicates", set_as_current=False, broker=own_server.url) as app:
        function = lambda a=1: None  # noqa: E731
        function.__name__ = "body"
        task = app.task(name="duplicated", shared=False)(single_instance(scope=scope)(function))
        with own_server.client() as broker:
            task.delay()
            before = broker.info("stats")["total_connections_received"]
            for number in range(2 * publishing.AHEAD_AFTER):
                task.delay()
                task.delay(number + 2)
            assert broker.info("stats")["total_connections_received"] == before


def test_one_of_many_threads_publishes(client, app, make, scope):
    task = make(scope=scope)
    task.delay(-1)  # two threads that make kombu's queue in memory at once make two, and one of them is lost
    assert len(messages(app, task)) == 1
    start = threading.Barrier(8)

    def publish(_):
        start.wait(BUSY)
        return [task.delay(number).id for number in range(20)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(publish, range(8)))
    assert found == [found[0]] * 8
    assert sorted(messages(app, task)) == sorted(found[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in destructors, it is swallowed
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
@pytest.mark.parametrize("error", [Interrupted, SoftTimeLimitExceeded])
@pytest.mark.interrupts
def test_an_interruption_at_any_point_leaves_a_message_or_no_lock_and_no_reply_unread(
    client, app, make, error, form, monkeypatch
):
    """Without Celery's pools, which it may leave locked."""

    noted, interrupted = [], 0
    given = SimpleNamespace(note=noted.append)

    class Noted(Task):
        def apply_async(self, args=None, kwargs=None, **options):
            (options["producer"] or given).note(options["task_id"])

    task, producer = make(scope="queued", task_options={"base": Noted}), given
    task.apply_async(producer=producer)
    if form == "ahead":
        producer = None  # then the task takes one from the pool
        monkeypatch.setattr(publishing, "is_celerys_own", lambda *functions: True)
        pool = SimpleNamespace(acquire=lambda block: nullcontext(given))
        monkeypatch.setattr(type(app), "producer_pool", pool)
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


def test_without_redis_publishing_is_a_typed_error_and_never_none(make, scope, settings, caplog):
    """It comes at once: nothing was sent, so nothing is released, which took 4.7 s of tries."""
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    task = make(scope=scope)
    with pytest.raises(LockBackendError):
        task.delay()
    for canvas in CANVASES.values():
        with pytest.raises(LockBackendError):
            canvas(task.si(), task.si()).apply_async()
    assert "could not release" not in caplog.text


def test_without_redis_publishing_may_go_on(app, make, scope, settings, caplog):
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    task = make(scope=scope, on_backend_error="run")
    result = task.delay()
    assert messages(app, task) == [result.id]
    assert "is published without its lock, because Redis does not answer" in caplog.text


def test_the_lock_of_an_ended_message_that_cannot_be_released_is_told_with_its_name(
    client, app, make, caplog, monkeypatch
):
    task = make(scope="queued")
    first = task.delay()
    info = task.lock_info()
    wait_until(lambda: time.time() > info.acquired_at.timestamp() + 0.002)  # a state before that is a former one
    app.backend.store_result(first.id, None, "REVOKED")

    def unanswered(self, later):
        raise LockBackendError(self.name, "cut off")

    monkeypatch.setattr(ExecutionLock, "release_given_id", unanswered)
    assert isinstance(task.delay(), DuplicateResult)
    assert f"{task.name}[{first.id}] could not release the lock of its message" in caplog.text


def test_nothing_is_locked_where_locks_are_off(client, make, scope, settings):
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    task = make(scope=scope)
    assert task.delay().id != task.delay().id
    assert list(held_locks(client)) == []


def test_a_message_runs_where_locks_are_off(app, make, scope, settings):
    """Its begin expected more of the reply than that everything is granted."""
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    make(lambda: "ran", scope=scope).delay()
    (message,) = take(app)
    assert deliver(app, message) == "ran"


@pytest.mark.parametrize("policy", ["raise", "reschedule"])
def test_a_retry_is_published_though_redis_does_not_answer(app, make, scope, policy, monkeypatch, caplog):
    """Celery makes a Reject of an error there, and the task was never run again."""

    def fail():
        raise ZeroDivisionError

    def unanswered(self, *, fresh=False):
        raise LockBackendError(self.name, "cut off")

    task = make(fail, scope=scope, on_backend_error=policy, task_options={"autoretry_for": (ZeroDivisionError,)})
    task.delay()
    (message,) = take(app)
    monkeypatch.setattr(ExecutionLock, "take", unanswered)
    deliver(app, message)
    assert [retry.headers["retries"] for retry in take(app)] == [1]
    assert "is published without its lock" in caplog.text


@pytest.mark.parametrize("error", [Ignore, ValueError])
def test_a_message_that_ends_before_its_task_is_called_leaves_no_lock(client, app, make, scope, error):
    """With Ignore, nothing was stored, and each duplicate waited for it for an hour."""

    def before_start(*args):
        raise error

    task = make(scope=scope)
    task.before_start = before_start
    task.delay()
    (message,) = take(app)
    assert len(list(held_locks(client))) == 1
    deliver(app, message)
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
