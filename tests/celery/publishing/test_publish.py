"""The scopes that begin with publishing, seen from the producer; no worker runs."""

from __future__ import annotations

import logging
import pickle
import signal
from contextlib import closing, nullcontext
from datetime import UTC, datetime, timedelta

import pytest
from celery.backends.base import DisabledBackend
from celery.contrib.abortable import AbortableAsyncResult, AbortableTask
from celery.signals import before_task_publish
from django.core.exceptions import SynchronousOnlyOperation

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import DuplicateResult, execution_lock, message as message_module, publishing
from django_redislock.celery.execution_lock import Delivery, MessageLease
from django_redislock.core import held_locks
from django_redislock.core.clock import monotonic
from django_redislock.core.listing import contention
from django_redislock.core.options import Renewal
from django_redislock.core.watchdog import watchdog
from django_redislock.signals import lock_conflict
from tests.celery.deliveries import trace
from tests.support import BUSY, PythonProcess, counting, wait_until

from . import CANVASES, find_receivers_again, messages


def test_a_duplicate_gets_the_result_of_the_one_that_waits(client, app, make, scope):
    task = make(scope=scope)
    first, second, other = task.delay(1), task.delay(1), task.delay(2)
    assert type(second) is DuplicateResult
    assert second.id == first.id
    assert not isinstance(first, DuplicateResult)
    assert not isinstance(other, DuplicateResult)
    assert messages(app, task) == [first.id, other.id]
    assert second.state == "PENDING"


def test_the_duplicate_of_an_abortable_task_can_be_aborted(client, make, scope):
    task = make(scope=scope, task_options={"base": AbortableTask})
    first, second = task.delay(), task.delay()
    again = pickle.loads(pickle.dumps(second))
    for result in second, again:
        assert isinstance(result, DuplicateResult)
        assert isinstance(result, AbortableAsyncResult)
    second.abort()
    assert first.is_aborted()


def test_a_state_that_cannot_be_read_is_a_warning_once_a_minute(client, make, scope, monkeypatch, caplog):
    """As with django-db in a coroutine, where the ORM raises for each duplicate."""
    monkeypatch.setattr(message_module, "_warned_in", {})
    task = make(scope=scope)
    first = task.delay()
    monkeypatch.setattr(type(task.backend), "get_task_meta", lambda *args, **options: raise_asynchronous())
    caplog.set_level(logging.INFO, logger="django_redislock")
    assert {task.delay().id for _ in range(3)} == {first.id}
    levels = [record.levelname for record in caplog.records if "could not be read" in record.getMessage()]
    assert levels == ["WARNING", "INFO", "INFO"]


def raise_asynchronous():
    raise SynchronousOnlyOperation("You cannot call this from an async context - use a thread or sync_to_async.")


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


def test_a_duplicate_is_counted_for_the_page_about_contention(client, make):
    task = make(scope="queued")
    first = task.delay()
    assert contention(client).names == {}
    with counting(client) as counts:
        assert task.delay().id == first.id
    assert counts["evalsha"] == 1  # the try, which is told who holds it, and counts
    ((name, found),) = contention(client).names.items()
    assert name.startswith(f"celery-queue:{task.name}")
    assert (found.duplicates, found.waits) == (1, 0)


def retry(task, error=None):
    raise task.retry(countdown=60)


@pytest.mark.parametrize("refused", [False, True])
def test_a_retry_holds_its_place_though_the_run_or_the_conflict_that_published_it_ends_later(
    client, app, make, refused
):
    task = make(
        (lambda self: None) if refused else (lambda self: retry(self)),
        scope="queued+run",
        on_conflict=retry,
        task_options={"bind": True},
    )
    first = task.delay()
    (running, _) = task._locks((), {})
    with running if refused else nullcontext():
        traced = trace(task, {"id": first.id, "retries": 0, "args": (), "kwargs": {}})
    assert (traced and traced.state, messages(app, task)) == ("RETRY", [first.id, first.id])
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
    request = task._running_lock("x", task._options, None, (), {})
    running = request.with_name(task.lock_info().name, label=f"{task.name}[{first.id}]", delivery=Delivery(first.id))
    assert running.acquire(blocking=False), "it takes over from its message"
    started = task.lock_info().acquired_at
    wait_until(lambda: datetime.now(UTC) - started > timedelta(milliseconds=2))
    task.backend.mark_as_failure(first.id, ZeroDivisionError())
    assert task.delay().id == first.id
    running.release()


def test_where_results_are_not_kept_a_duplicate_is_one(client, make, scope, caplog):
    task = make(scope=scope)
    first = task.delay()
    task.backend = DisabledBackend(task.app)
    assert task.delay().id == first.id
    assert "could not be read" not in caplog.text


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
    with pytest.raises(NotImplementedError, match="only to the process that published the task"):
        task.delay().get(timeout=5)


def test_the_run_scope_asks_nothing_when_publishing(client, make):
    task = make()
    task.delay()
    with counting(client) as counts:
        task.delay()
    assert counts["evalsha"] + counts["eval"] == 0


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


@pytest.fixture
def at_once(monkeypatch):
    """The locks of published messages get their life without a pause in which others may join them."""
    monkeypatch.setattr(execution_lock, "CONFIRM_AFTER", 0.0)


PUBLISHER = """
import os, signal, sys
from celery import Celery, signals
from django_redislock.celery import single_instance
from django_redislock.celery.execution_lock import ExecutionLock

(end,) = args
app = Celery("publisher", broker="memory://")
def body(): pass
task = app.task(name="killed", shared=False)(single_instance(scope="job")(body))
ends = lambda **data: os.kill(os.getpid(), signal.SIGKILL)
if end == "before, and another message ended":
    has_taken = ExecutionLock._has_taken
    def ended(lock, *args):
        taken = has_taken(lock, *args)
        if not taken:
            lock.reset()
            lock.refused_by = None
        return taken
    ExecutionLock._has_taken = ended
    task.delay()
if end.startswith("before"):
    signals.before_task_publish.connect(ends)
task.delay()
if end == "after":
    ends()
"""


@pytest.mark.processes
@pytest.mark.parametrize("end", ["before", "before, and another message ended", "after", "exit"])
def test_a_publisher_that_ends_before_its_message_is_sent_blocks_the_key_for_a_short_time(client, end, locks):
    """Killed between the lock and the message, it blocked the key for an hour. At an exit the lock gets its life."""
    with closing(PythonProcess(PUBLISHER, end, new=True)) as publisher:
        assert publisher.wait() == (0 if end == "exit" else -signal.SIGKILL), publisher.errors
    (info,) = held_locks(client)
    assert (info.expire, info.ttl > execution_lock.OF_PUBLISHER.expire) == (3600, end == "exit")


@pytest.mark.slow
def test_a_message_that_takes_long_to_publish_keeps_its_lock(client, app, make, monkeypatch):
    """Because the broker does not answer, for example."""
    monkeypatch.setattr(execution_lock, "OF_PUBLISHER", Renewal(2.4))
    task = make(scope="job")
    fences = []

    def slow(**data):
        first = task.lock_info()
        wait_until(lambda: task.lock_info().age > 2.7)
        fences.extend([first.fence, task.lock_info().fence])

    before_task_publish.connect(slow)
    find_receivers_again(app)
    task.delay()
    before_task_publish.disconnect(slow)
    assert fences[0] == fences[1]


@pytest.mark.slow
def test_the_locks_of_published_messages_cost_one_command_together(client, make, scope, caplog, monkeypatch):
    """Also of those whose message a worker has already, which is no loss."""
    # The count begins after the last unlock: with the usual second the watchdog was sometimes earlier.
    monkeypatch.setattr(execution_lock, "CONFIRM_AFTER", 60.0)
    monkeypatch.setattr(execution_lock, "OF_PUBLISHER", Renewal(300.0))
    task = make(scope=scope)
    for number in range(20):
        task.delay(number)
    for number in range(10):
        task.unlock(number)
    leases = list(MessageLease.published)
    with counting(client) as counts:
        for lease in leases:
            lease.next_renewal = monotonic()
        watchdog.reschedule(leases[0])
        wait_until(lambda: not MessageLease.published)
    assert len(leases) == 20
    assert 0 < counts["evalsha"] + counts["eval"] <= 4
    assert all(task.lock_info(number).ttl > 100 for number in range(10, 20))
    assert "lost" not in caplog.text


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
def test_the_life_of_a_published_message(client, app, make, scope, options, seconds, at_once):
    task = make(scope=scope, queue_life=100)
    options = {name: value() if callable(value) else value for name, value in options.items()}
    task.apply_async(**options)
    wait_until(lambda: task.lock_info().ttl > seconds - BUSY - 5)
    assert task.lock_info().ttl <= seconds + 0.1


def test_the_tasks_own_expiry_counts(client, make, at_once):
    task = make(scope="queued", queue_life=100, task_options={"expires": 60})
    task.delay()
    wait_until(lambda: 40 < task.lock_info().ttl <= 60)


def test_other_caches_are_other_locks(client, make, settings, server):
    task = make(scope="queued")
    task.delay()
    elsewhere = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": server.url_of_db(5)}
    settings.CACHES = {"default": elsewhere}
    assert task.lock_info() is None


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
