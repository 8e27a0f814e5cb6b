"""The newest arguments: a message that waits runs with those of its last duplicate, once."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import chain
from kombu.exceptions import EncodeError
from kombu.serialization import codec, registry

from django_redislock import LockBackendError, TaskAlreadyRunning
from django_redislock.celery import DuplicateResult
from django_redislock.celery.execution_lock import ExecutionLock, confirm_published
from django_redislock.core import held_locks
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from tests.celery.deliveries import deliver, take, work
from tests.support import in_thread
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app as site
from tests.support.celery_site.harness import TaskQueue, ended


@pytest.fixture(params=["queued", "queued+run"])
def scope(request):
    return request.param


@pytest.fixture
def ran():
    return []


@pytest.fixture
def make(make, ran):
    """Make a task that notes its arguments; its duplicates replace `rows` and `more`."""

    def noting(function=None, **options):
        def body(self, customer, rows=0, more=None):
            ran.append((customer, rows, more) if more is not None else (customer, rows))
            return "ran" if function is None else function(self, rows)

        options = {"key": "{customer}", "on_duplicate": "replace", **options}
        return make(body, **{name: value for name, value in options.items() if value is not ...})

    return noting


def test_the_message_runs_once_with_the_arguments_of_its_last_duplicate(client, app, make, scope, ran):
    task = make(scope=scope)
    first = task.delay("a", 1)
    others = [task.delay("a", rows=2), task.delay("a", 3, more={"π": [1, None, "x\n"]}), task.delay("b", 4)]
    assert [type(each) is DuplicateResult for each in others] == [True, True, False]
    assert {first.id} == {each.id for each in others[:2]}
    work(app)
    assert ran == [("a", 3, {"π": [1, None, "x\n"]}), ("b", 4)]
    assert first.result == "ran"
    assert list(held_locks(client)) == []


def test_a_duplicate_that_comes_after_the_start_is_a_message_of_its_own(client, app, make, ran):
    """Also when it found the message waiting: its arguments were not given to a message that had begun."""
    task = make(scope="queued")
    task.delay("a", 1)
    given = ExecutionLock.replace_arguments

    def late(self, holder, newest):
        work(app)
        return given(self, holder, newest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExecutionLock, "replace_arguments", late)
        second = task.delay("a", 2)
    assert not isinstance(second, DuplicateResult)
    assert ran == [("a", 1)]
    work(app)
    assert ran == [("a", 1), ("a", 2)]


def test_the_message_keeps_its_place_and_its_time(client, app, make, ran):
    task, other = make(scope="queued"), make(scope="queued")
    task.apply_async(("a", 1), countdown=30)
    other.delay("b")
    task.apply_async(("a", 2), countdown=900, priority=9)
    messages = take(app)
    assert [message.headers["task"] for message in messages] == [task.name, other.name]
    confirm_published()
    (info,) = (info for info in held_locks(client) if info.label.startswith(task.name))
    assert 3600 < info.ttl <= 3630, "a new countdown would have changed it"


def test_a_message_that_is_published_again_keeps_the_newest_arguments(client, app, make, ran):
    """It waits until the run of its key ends, and its duplicates go on replacing."""

    def body(self, rows):
        if rows == 1:
            task.delay("a", 2)
            task.delay("a", 3)
            (waiting,) = take(app)
            in_thread(deliver, app, waiting)  # it is refused, and published again
            task.delay("a", 4)

    task = make(body, scope="queued+run", on_conflict="reschedule")
    task.delay("a", 1)
    work(app)
    assert ran == [("a", 1), ("a", 4)]
    assert list(held_locks(client)) == []


def test_the_receipts_of_many_duplicates_are_bounded(client):
    """They were trimmed by the fence of the lock, and so for one message in sixteen only."""
    lock = ExecutionLock(client, "a", expire=60, auto_renewal=False)
    assert lock.acquire()
    if lock.fence % 16 == 0:
        lock.release()
        lock.acquire()
    for number in range(2000):
        assert lock.replace_arguments(lock.owner(), b"%d" % number)
    assert 1024 <= client.zcard(lock_keys("redislock", "a").receipts) < 1500
    lock.release()


def test_a_copy_of_the_message_runs_with_them_too(client, app, make, scope, ran):
    """Its first run was cut off, so the broker delivers the message again, and others wait under the key now."""
    task = make(lambda self, rows: cut_off() if len(ran) == 1 else "ran", scope=scope, task_options={"acks_late": True})
    task.delay("a", 1)
    task.delay("a", 2)
    (message,) = take(app)
    with pytest.raises(SystemExit):
        deliver(app, message)
    task.delay("a", 3)
    task.delay("a", 4)
    assert deliver(app, message, redelivered=True) == "ran"
    work(app)
    assert ran == [("a", 2), ("a", 2), ("a", 4)]


def cut_off():
    raise SystemExit


def test_a_retry_has_the_arguments_of_its_run_unless_it_gives_others(client, app, make, scope, ran):
    def body(self, rows):
        if self.request.retries < 2:
            raise self.retry(countdown=0, args=("a", 7) if self.request.retries else None)

    task = make(body, scope=scope)
    task.delay("a", 1)
    task.delay("a", 2)
    work(app)
    assert ran == [("a", 2), ("a", 2), ("a", 7)]


def test_a_retry_that_waits_gets_the_newest_arguments(client, app, make, ran):
    def body(self, rows):
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = make(body, scope="queued")
    task.delay("a", 1)
    (message,) = take(app)
    deliver(app, message)
    task.delay("a", 5)
    work(app)
    assert ran == [("a", 1), ("a", 5)]


def test_hooks_and_results_tell_the_arguments_that_ran(client, app, make, scope):
    told = []
    task = make(scope=scope)
    type(task).on_success = lambda self, retval, task_id, args, kwargs: told.append((args, kwargs))
    first = task.delay("a", 1)
    task.delay("a", rows=2)
    work(app)
    assert told == [(["a"], {"rows": 2})]
    assert first.kwargs == {"rows": 2}


@pytest.mark.parametrize("serializer", ["pickle", "torn"])
def test_a_message_whose_worker_cannot_read_the_newest_arguments_runs_with_its_own_and_a_warning(
    client, app, make, scope, ran, serializer, caplog, monkeypatch
):
    """It failed, though it was accepted itself, and ran with neither."""
    monkeypatch.setitem(registry._encoders, "torn", codec("application/json", "utf-8", lambda body: '["torn'))
    task = make(scope=scope)
    first = task.delay("a", 1)
    task.apply_async(("a", 2), serializer=serializer)
    work(app)
    assert ran == [("a", 1)]
    assert first.result == "ran"
    (warning,) = [record for record in caplog.records if "own arguments" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert warning.getMessage().startswith(
        f"{task.name}[{first.id}] runs with its message's own arguments, because this worker cannot read the newest "
        f"ones: {'ContentDisallowed' if serializer == 'pickle' else 'DecodeError'}: "
    )
    assert list(held_locks(client)) == []


def test_the_newest_arguments_have_the_serializer_of_their_duplicate(client, app, make, scope, ran, monkeypatch):
    monkeypatch.setitem(app.conf, "accept_content", ["json", "pickle"])
    task = make(scope=scope)
    task.delay("a", 1)
    task.apply_async(("a", (1, 2)), serializer="pickle")
    work(app)
    assert ran == [("a", (1, 2))]


def test_arguments_that_are_too_long_to_replace_others_are_an_error_of_the_publication(client, app, make, scope, ran):
    """Five megabytes were copied by each duplicate and by each list of locks."""
    task = make(scope=scope)
    first = task.delay("a", "x" * 100_000)
    assert task.delay("a", "x" * 65_000).id == first.id
    with pytest.raises(
        ValueError, match=r"on_duplicate='replace' takes arguments of 65,536 bytes at most, and these have 65,\d{3}: "
    ):
        task.delay("a", "x" * 65_500)
    work(app)
    assert [len(rows) for _, rows in ran] == [65_000]
    assert list(held_locks(client)) == []


def test_a_message_in_pickle_is_given_arguments_too(client, app, make, scope, ran, monkeypatch):
    """Its arguments are a tuple, which cannot be changed in place."""
    monkeypatch.setitem(app.conf, "accept_content", ["json", "pickle"])
    task = make(scope=scope)
    first = task.apply_async(("a", 1), serializer="pickle")
    task.apply_async(("a", 2), serializer="pickle")
    (message,) = take(app)
    message.accept = {"application/x-python-serialize"}
    deliver(app, message)
    assert ran == [("a", 2)]
    assert (first.state, list(first.args)) == ("SUCCESS", ["a", 2])


def unanswered(self, *args, **more):
    raise LockBackendError(self.name, "cut off")


def test_a_lock_of_a_message_that_could_not_be_released_before_a_run_without_a_lock_is_released_at_its_end(
    client, app, make, scope, ran
):
    task = make(scope=scope, on_duplicate="return", on_backend_error="run")
    task.delay("a", 1)
    release = ExecutionLock.release_given_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExecutionLock, "acquire", unanswered)
        patch.setattr(ExecutionLock, "release_given_id", lambda *args: release(*args) if ran else unanswered(*args))
        work(app)
    assert ran == [("a", 1)]
    assert list(held_locks(client)) == []


def test_arguments_that_cannot_be_written_are_an_error_for_the_caller_and_change_nothing(client, app, make, scope, ran):
    task = make(scope=scope)
    task.delay("a", 1)
    with pytest.raises((EncodeError, TypeError)):
        task.delay("a", object())
    work(app)
    assert ran == [("a", 1)]


def test_a_member_of_a_canvas_is_published_and_replaces_nothing(client, app, make, ran):
    task = make(scope="queued")
    task.delay("a", 1)
    chain(task.si("a", 2), task.si("b", 3)).apply_async()
    work(app)
    assert ran == [("a", 1), ("a", 2), ("b", 3)]


def test_a_lock_of_somebody_else_is_given_no_arguments(client, app, make):
    task = make(scope="queued")
    lock = next(iter(task._locks(("a",), {})))
    lock.with_name(lock.name, label="somebody else", id="theirs").acquire()
    before = client.get(lock._keys.lock)
    with pytest.raises(TaskAlreadyRunning, match="somebody else"):
        task.delay("a", 1)
    assert client.get(lock._keys.lock) == before


def test_a_message_that_lost_its_lock_runs_with_its_own_arguments_and_a_warning(client, app, make, scope, ran, caplog):
    task = make(scope=scope)
    task.delay("a", 1)
    task.delay("a", 2)
    client.flushall()
    work(app)
    assert ran == [("a", 1)]
    (record,) = [record for record in caplog.records if "held no lock any more" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "those of later duplicates may be lost" in record.getMessage()


def test_no_warning_without_a_reason(client, app, make, scope, ran, caplog):
    task, plain = make(scope=scope), make(scope=scope, on_duplicate="return")
    task.delay("a", 1)
    plain.delay("a", 1)
    chain(task.si("b", 2), task.si("b", 3)).apply_async()
    task.apply(("c", 4))
    work(app)
    assert len(ran) == 5
    assert "held no lock any more" not in caplog.text


@pytest.mark.parametrize("policy", ["raise", "run"])
def test_when_redis_does_not_answer_at_the_start_the_policy_decides(client, app, make, ran, policy, caplog):
    """The newest arguments may be in Redis, so a run without them must be allowed."""
    task = make(scope="queued", on_backend_error=policy)
    first = task.delay("a", 1)
    task.delay("a", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExecutionLock, "acquire", unanswered)
        work(app)
    assert ran == ([("a", 1)] if policy == "run" else [])
    assert (first.state, "runs without its lock" in caplog.text) == (
        ("SUCCESS", True) if policy == "run" else ("FAILURE", False)
    )


def test_a_replacement_that_is_repeated_does_not_undo_a_newer_one(client, app, make, ran):
    """Its reply was lost, and another duplicate came before it was sent again."""
    task = make(scope="queued")
    task.delay("a", 1)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        reply_to = ExecutionLock._reply_to
        patch.setattr(ExecutionLock, "_reply_to", lambda self, call: calls.append(call) or reply_to(self, call))
        task.delay("a", 2)
        task.delay("a", 3)
    older, _ = calls
    lock = next(iter(task._locks(("a",), {})))
    assert server_of(client).run(reply_to(lock, older)) == 1
    work(app)
    assert ran == [("a", 3)]


def test_the_setting_is_for_the_tasks_that_it_fits(client, app, make, settings, ran):
    settings.DJANGO_REDISLOCK = {"CELERY": {"ON_DUPLICATE": "replace"}}
    for number, (scope, key) in enumerate([("run", "{customer}"), ("job", "{customer}"), ("queued", "{customer}")]):
        task = make(scope=scope, key=key, on_duplicate=...)
        task.delay(scope, number)
        task.delay(scope, 9)
    work(app)
    assert ran == [("run", 0), ("run", 9), ("job", 1), ("queued", 9)]


def test_a_scope_or_a_key_without_newest_arguments_is_refused_at_once(make):
    for scope in ("run", "job"):
        with pytest.raises(ValueError, match=rf"on_duplicate='replace' is about .* not '{scope}'"):
            make(scope=scope)
    with pytest.raises(ValueError, match="needs a key without the arguments that are replaced"):
        make(scope="queued", key=None)
    with pytest.raises(ValueError, match=r"on_duplicate.*'replace'"):
        make(scope="queued", on_duplicate="newest")


def test_a_task_whose_scope_is_missing_is_refused_where_it_is_used(client, make):
    task = make()
    with pytest.raises(ValueError, match=r"scope='queued' or scope='queued\+run', not 'run'"):
        task.delay("a")


@pytest.mark.processes
def test_while_processes_are_killed_each_message_runs_with_the_arguments_of_its_last_duplicate(worker_pools):
    """Its last run does: the copy of a killed run may wait again, and get newer arguments than that run."""
    queues = [TaskQueue(worker_pools.of("prefork"), blocked=killed) for killed in (True, True, False, False)]

    def publish(task_queue):
        """Return the last arguments of each message."""
        site.set_current()  # of this thread
        return {task_queue.publish(tasks.late_noting, number).id: number for number in range(1, 301)}

    with ThreadPoolExecutor(len(queues)) as pool:
        published = [pool.submit(publish, task_queue) for task_queue in queues]
        for task_queue in queues[:2]:
            task_queue.kill_child(task_queue.run_log.wait_for("start"))
        newest = [each.result() for each in published]
    for task_queue, last in zip(queues, newest, strict=True):
        assert len(last) < 300, "no message was given newer arguments"
        for id in last:  # also the copy of a killed run, which would hold its lock during the next test
            assert ended(site.AsyncResult(id)).state == "SUCCESS"
        assert {event["id"]: event["number"] for event in task_queue.run_log.events("ran with")} == last
