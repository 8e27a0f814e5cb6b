"""The lock around one execution, in this process: ``apply()`` runs a task as a worker does, by Celery's own tracer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from contextvars import Context, copy_context

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from celery.app.task import Context as Request
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import running as task_module
from django_redislock.celery.message import delivery_of
from django_redislock.celery.publishing import KEY_HEADER
from django_redislock.core import Lock, held_locks
from django_redislock.core.listing import Waits, contention
from django_redislock.signals import lock_conflict, task_skipped
from tests.support import counting, name_of, wait_until


@contextlib.contextmanager
def held(client, task, *args):
    """Let somebody else run the task with these arguments."""
    with Lock(client, name_of(task, *args), label="somebody", kind="celery") as lock:
        yield lock


def names(client):
    return [info.name for info in held_locks(client)]


def test_the_lock_is_held_while_the_body_runs_and_names_the_task(client, make):
    seen = []

    def body(self, a, b=2):
        seen.extend(held_locks(client))
        return a + b

    task = make(body, key="{a}")
    result = task.apply((1,))
    assert result.get() == 3
    (info,) = seen
    assert (info.name, info.kind) == (f"celery:{task.name}:1", "celery")
    assert info.label == f"{task.name}[{result.id}]"
    assert names(client) == []


def test_a_coroutine_that_a_body_runs_sees_the_bodys_lock_and_calls_the_task_under_it(client, make):
    seen, contexts = [], []

    async def run(self, depth):
        seen.append(self.single_instance.lock.fence)
        await sync_to_async(lambda: seen.append(self.single_instance.lock.fence))()
        await sync_to_async(self, thread_sensitive=False)(depth + 1)
        contexts.append(copy_context())

    def body(self, depth):
        if depth:
            return seen.append(self.single_instance.lock.fence)
        return async_to_sync(run)(self, depth)

    task = make(body, key=[], lock_direct_calls=True)
    task.apply((0,)).get()
    assert len(seen) == 3
    assert len(set(seen)) == 1
    (left,) = contexts
    assert left.run(lambda: task.single_instance.lock) is None, "the run is over, wherever its context went"
    left.run(task, 1)
    assert seen[-1] > seen[0], "it took a lock of its own"


def test_an_execution_costs_two_commands(client, make):
    task = make(lambda self: None)
    task.apply().get()
    with counting(client) as counts:
        task.apply().get()
    assert counts["evalsha"] + counts["eval"] == 2


@pytest.mark.parametrize(("on_conflict", "duplicates"), [("skip", 1), ("raise", 1), ("reschedule", 0), ("wait", 1)])
def test_duplicates_and_waits_are_counted_for_the_page_about_contention(client, make, on_conflict, duplicates):
    task = make(lambda self: None, on_conflict=on_conflict, **{"wait": 2} if on_conflict == "wait" else {})
    task.apply()
    assert contention(client).names == {}
    with held(client, task):
        task.apply()
    counted = contention(client).names.get(name_of(task), Waits())
    waits = int(on_conflict == "wait")
    assert (counted.duplicates, counted.waits, counted.gave_up) == (duplicates, waits, waits)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError, Ignore, Reject, SoftTimeLimitExceeded, SystemExit, KeyboardInterrupt]
)
def test_the_lock_is_released_however_the_body_ends(client, make, error):
    def body(self):
        assert names(client) == [f"celery:{self.name}"]
        raise error

    task = make(body, key=[])
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        task.apply()
    assert names(client) == []


def test_a_retried_execution_competes_again_and_is_not_its_own_duplicate(client, make):
    def body(self):
        assert names(client) == [f"celery:{self.name}"]
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return self.request.retries

    assert make(body, key=[]).apply().get() == 2
    assert names(client) == []


def test_a_retry_waits_for_its_former_run_to_end(client, make, monkeypatch):
    """That run has published the retry before it ends, and the retry may be faster."""
    monkeypatch.setattr(task_module, "HANDOVER_GRACE", 60)
    task = make(lambda self: "ran")
    former = Lock(client, name_of(task), label=f"{task.name}[the-id]")
    former.acquire()
    results = []
    thread = threading.Thread(target=lambda: results.append(task.apply(task_id="the-id").result))
    thread.start()
    wait_until(lambda: former.owner().waiting == 1)
    former.release()
    thread.join(timeout=60)
    assert results == ["ran"]


def test_a_duplicate_is_told_who_runs(client, make, caplog):
    task = make(lambda self, a: "ran")
    caplog.set_level(logging.INFO, logger="django_redislock")
    heard = []
    lock_conflict.connect(receiver := lambda **data: heard.append(data))
    with held(client, task, 1):
        result = task.apply((1,))
        assert task.apply((2,)).get() == "ran"
    lock_conflict.disconnect(receiver)
    error = result.result
    assert type(error) is TaskAlreadyRunning
    assert error.key == name_of(task, 1)
    assert error.holder.startswith("somebody on ")
    assert 0 < error.ttl <= 30
    assert "did not get its lock, which has been held for" in caplog.text
    assert "by somebody on " in caplog.text
    (data,) = heard
    assert (data["name"], data["holder"].label, data["task"], data["on_conflict"]) == (
        error.key,
        "somebody",
        task.name,
        "raise",
    )
    assert data["task_id"] == result.id


def test_skip_returns_its_result_and_tells_it_once(client, make, caplog):
    task = make(lambda self: pytest.fail("the body ran"), on_conflict="skip", skip_result="busy")
    caplog.set_level(logging.INFO, logger="django_redislock")
    heard = []
    task_skipped.connect(receiver := lambda **data: heard.append(data))
    with held(client, task):
        result = task.apply()
    task_skipped.disconnect(receiver)
    assert [(data["task"], data["task_id"]) for data in heard] == [(task.name, result.id)]
    assert (result.state, result.result) == ("SUCCESS", "busy")
    (record,) = [record for record in caplog.records if record.name == "django_redislock"]
    assert record.levelname == "INFO", "it is wanted"
    assert "is skipped" in record.getMessage()
    assert "by somebody on " in record.getMessage()


def test_wait_waits_and_then_raises(client, make):
    task = make(lambda self: "ran", on_conflict="wait", wait=0.3)
    with held(client, task):
        before = time.monotonic()
        assert type(task.apply().result) is TaskAlreadyRunning
        assert time.monotonic() - before >= 0.3
    patient = make(lambda self: "ran", on_conflict="wait", wait=60)
    with held(client, patient) as lock:
        results = []
        thread = threading.Thread(target=lambda: results.append(patient.apply().get(disable_sync_subtasks=False)))
        thread.start()
        wait_until(lambda: lock.owner().waiting == 1)
    thread.join(timeout=60)
    assert results == ["ran"]


def test_a_callable_decides(client, make):
    def decide(task, error):
        if task.request.args == [2]:
            raise error
        return [task.name, type(error)]

    task = make(lambda self, a: "ran", key=[], on_conflict=decide)
    assert task.apply([1]).get() == "ran"
    with held(client, task, 1):
        assert task.apply([1]).get() == [task.name, TaskAlreadyRunning]
        assert type(task.apply([2]).result) is TaskAlreadyRunning


@pytest.mark.parametrize("on_conflict", ["reschedule", "raise"])
def test_what_cannot_be_done_later_is_raised(client, make, on_conflict):
    task = make(lambda self: "ran", on_conflict=on_conflict, lock_direct_calls=True)
    with held(client, task):
        assert type(task.apply().result) is TaskAlreadyRunning
        with pytest.raises(TaskAlreadyRunning):
            task()


def test_nothing_is_locked_where_locks_are_off(client, make, settings):
    task = make(lambda self: [self.single_instance.lost, names(client)])
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    with Lock(client, name_of(task)):
        assert task.apply().get() == [None, [name_of(task)]], "of the holder, who is not in the way"
        assert task.lock_info() is None


# Direct calls and recursion


def test_a_direct_call_takes_no_lock_unless_asked(client, make):
    task = make(lambda self: names(client))
    with held(client, task):
        assert len(task()) == 1
    locking = make(lambda self: [info.label for info in held_locks(client)], lock_direct_calls=True, key=[])
    assert locking() == [f"{locking.name}[direct call]"]
    with held(client, locking), pytest.raises(TaskAlreadyRunning):
        locking()
    assert names(client) == []


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.slow
def test_a_direct_call_keeps_its_lock_for_the_time_asked_for(client, make, limit):
    """Only a message did."""
    task = make(lambda self: "ran", key=[], lock_direct_calls=True, keep_for=60, limit=limit)
    for _ in range(limit or 1):
        assert task() == "ran"
    with pytest.raises(TaskAlreadyRunning):
        task()
    assert 50 < task.lock_info().ttl <= 60
    assert task.unlock()
    assert task() == "ran"


def test_the_same_request_enters_again(client, make):
    """A task that calls or applies itself does not wait for itself; the outermost releases."""

    def body(self, depth=0):
        assert len(names(client)) == 1
        if depth == 3:
            return [depth]
        direct, applied = self(depth + 1), self.apply((depth + 1,)).get(disable_sync_subtasks=False)
        assert len(names(client)) == 1
        assert direct == applied
        return [depth, *direct]

    assert make(body, key=[]).apply().get() == [0, 1, 2, 3]
    assert make(body, key=[], lock_direct_calls=True).apply().get() == [0, 1, 2, 3]
    assert make(body, key=[], lock_direct_calls=True)() == [0, 1, 2, 3]
    assert names(client) == []


@pytest.mark.parametrize("applied", [True, False])
def test_another_key_within_a_run_is_another_lock_unless_it_is_a_direct_call(client, make, applied):
    def body(self, a):
        if a == 1:
            return self.apply((2,)).get(disable_sync_subtasks=False) if applied else self(2)
        return sorted(names(client))

    task = make(body, key="{a}")
    both = [f"celery:{task.name}:1", f"celery:{task.name}:2"]
    assert task.apply((1,)).get() == both[: 1 + applied]
    with held(client, task, 2):
        assert type(task.apply((1,)).result) is TaskAlreadyRunning if applied else task.apply((1,)).get() == both


@pytest.mark.parametrize("inherits", [False, True], ids=["a context of its own", "the context of the body"])
def test_a_thread_of_the_body_enters_again_only_with_the_context_of_the_body(client, make, inherits):
    """Threads inherit it from `asyncio.to_thread`, and all threads do in free-threaded builds of Python."""

    def body(self, nested=False):
        if nested:
            return "ran"
        results = []
        context = copy_context() if inherits else Context()
        thread = threading.Thread(target=context.run, args=(lambda: results.append(self.apply((True,)).result),))
        thread.start()
        thread.join(timeout=60)
        return results

    (result,) = make(body, key=[]).apply().get()
    assert result == "ran" if inherits else type(result) is TaskAlreadyRunning


@pytest.fixture
def eager(app):
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False


def test_eager_mode_locks_and_leaves_no_thread_of_its_own(client, make, eager):
    task = make(lambda self, a: len(names(client)))
    assert task.delay(0).get() == 1
    before = set(threading.enumerate())
    for a in range(20):
        assert task.delay(a).get() == 1
    # One watchdog may have ended, because an earlier test had asked for a check at this time, and another one begun.
    assert len(set(threading.enumerate()) - before) <= 1
    with held(client, task, 1):
        assert type(task.delay(1).result) is TaskAlreadyRunning


@pytest.mark.parametrize("error", [None, SystemExit, Reject("not now", requeue=True)], ids=["retry", "exit", "reject"])
@pytest.mark.parametrize("throw", [True, False])
def test_an_eager_job_leaves_its_lock_to_no_message(client, make, error, throw):
    """The lock lasted for an hour, because no message came."""

    def body(self):
        assert names(client) == [f"celery:{self.name}"]
        if self.request.retries or ran:
            return "ran"
        ran.append(1)
        raise error or self.retry(countdown=0)

    ran = []
    task = make(body, key=[], scope="job", task_options={"acks_late": True})
    with contextlib.suppress(Retry, SystemExit):
        result = task.apply(throw=throw)
        assert result.result == "ran" if error is None else result.state == "REJECTED"
    assert names(client) == []
    assert task.apply(throw=throw).get() == "ran"


# The key


def test_the_key_in_the_message_wins(client, make):
    task = make(lambda self, a: names(client), key="{a}")
    assert task.apply((1,), headers={KEY_HEADER: "of another version"}).get() == [
        f"celery:{task.name}:of another version"
    ]
    assert task.apply((1,)).get() == [f"celery:{task.name}:1"]
    assert task.apply((1,), headers={KEY_HEADER: 5}).get() == [f"celery:{task.name}:1"]


def test_lock_info_and_unlock_take_the_arguments_of_the_task(client, make):
    task = make(lambda self, a, b=2: [task.lock_info(a), task.lock_info(a=a, b=2), task.lock_info(a, 3)])
    one, other, third = task.apply((1,)).get()
    assert one.label == other.label
    assert one.fence == other.fence
    assert third is None
    lock = Lock(client, name_of(task, 1, 2))
    lock.acquire()
    assert task.unlock(1) is True
    assert task.unlock(1) is False
    assert task.lock_info(1) is None


# Faults


def test_a_message_of_sqs_is_known_by_its_id_because_each_delivery_has_another_tag():
    """Its second delivery passed for another message, and was acknowledged in place of the first one."""
    of_sqs = {"sqs_message": {"MessageId": "m"}}
    first, second = (
        delivery_of(Request({"id": "1", "properties": {"delivery_tag": tag, "delivery_info": of_sqs}})) for tag in "ab"
    )
    assert first == second
    assert first.known
