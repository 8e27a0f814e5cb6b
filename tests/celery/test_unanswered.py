"""Redis or the broker goes away when the body has ended, or will be refused: nothing is raised over what is known."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
from celery import Celery, signals
from celery.app.task import Context
from celery.exceptions import Reject
from kombu.exceptions import OperationalError

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import main_process, message as message_module
from django_redislock.celery.message import KEY_HEADER, SCOPE_HEADER
from django_redislock.core import Lock, held_locks
from django_redislock.core.lease import Lease
from tests.celery.deliveries import deliver, take, trace, work
from tests.support import free_port, name_of, wait_until
from tests.support.interruptions import TimeLimit, interruptions

ID = "of-the-message"


@pytest.fixture
def app():
    """An app of the test's own, because some change what it is."""
    with Celery("unanswered", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.backend.forget(ID)  # its memory is that of the process
        yield app


@pytest.fixture
def dead(settings):
    """Nobody answers where the locks should be."""
    settings.DJANGO_REDISLOCK = {"URL": f"redis://127.0.0.1:{free_port()}"}


@pytest.fixture(autouse=True)
def _forget_silence(monkeypatch):
    monkeypatch.setattr(main_process, "_silent_until", 0.0, raising=False)


def come(task, headers=None):
    """Bring a message of the task to a worker's tracer."""
    return trace(task, {"id": ID, "retries": 0, "single_instance_message": "one", **(headers or {})})


def undecorated():
    return "ran"


# What a worker reports


def test_that_a_message_was_terminated_is_logged_when_it_cannot_be_recorded(make, dead, caplog):
    task = make(scope="job", task_options={"acks_late": True})
    request = Context(id=ID, args=(), kwargs={}, headers={"single_instance_message": "one"})
    signals.task_revoked.send(sender=task, request=request, terminated=True)
    assert f"Could not record that {ID} was terminated, so its lock may stay until it expires" in caplog.text


def test_of_many_messages_that_expire_only_the_first_waits_for_a_silent_redis(make, own_server, settings, caplog):
    """In the worker's main process, which receives nothing meanwhile: 8 messages took 43 s."""
    settings.DJANGO_REDISLOCK = {"URL": f"{own_server.url}?socket_timeout=1.2"}
    task = make(scope="job")
    task.delay()
    headers = {KEY_HEADER: "", SCOPE_HEADER: "job"}
    own_server.pause()
    for number in range(8):
        signals.task_revoked.send(sender=task, request=Context(id=f"expired-{number}", headers=headers))
    own_server.resume()
    said = [record.getMessage() for record in caplog.records if "could not release" in record.getMessage()]
    assert len(said) == 8
    assert [number for number, message in enumerate(said) if "Timeout" in message] == [0]


def test_what_ended_while_redis_was_silent_is_released_when_redis_answers(make, own_server, settings):
    """Also the lock of a message about which Redis was not asked: it stayed for an hour."""
    settings.DJANGO_REDISLOCK = {"URL": f"{own_server.url}?socket_timeout=1.2"}
    task = make(scope="job", key="{a}")
    ids = [task.delay(number).id for number in range(3)]
    own_server.pause()
    for number, id in enumerate(ids):
        headers = {KEY_HEADER: str(number), SCOPE_HEADER: "job"}
        signals.task_revoked.send(sender=task, request=Context(id=id, args=(number,), kwargs={}, headers=headers))
    own_server.resume()
    with own_server.client() as client:
        wait_until(lambda: not list(held_locks(client)), 20, lambda: f"nothing is held, but {list(held_locks(client))}")


def test_a_redis_that_refuses_connections_is_asked_for_each_message(make, dead, caplog):
    """Because that costs no time, and it may be back at once."""
    task = make(scope="job")
    headers = {KEY_HEADER: "", SCOPE_HEADER: "job"}
    for number in range(2):
        signals.task_revoked.send(sender=task, request=Context(id=f"expired-{number}", headers=headers))
    assert caplog.text.count("could not release") == 2
    assert "was silent a moment ago" not in caplog.text


def test_a_revoked_task_that_is_not_single_instance_is_none_of_ours(app, dead, caplog):
    plain = app.task(name="plain", shared=False, lazy=False)(undecorated)
    signals.task_revoked.send(sender=plain, request=Context(id=ID), terminated=True)
    assert caplog.text == ""


def test_that_a_message_was_processed_is_logged_when_it_cannot_be_recorded(own_server, make, settings, caplog):
    """What remains to be recorded of a message that is acknowledged late, when its result is stored."""
    settings.DJANGO_REDISLOCK = {"URL": own_server.url}
    task = make(task_options={"acks_late": True})
    ends = lambda *args, **more: own_server.kill()  # noqa: E731
    signals.task_success.connect(ends, sender=task)
    come(task)
    assert "completed (" in caplog.text
    assert "if its message is delivered again, it runs again" in caplog.text
    assert task.AsyncResult(ID).result == "ran"


def test_a_worker_with_older_code_logs_when_it_cannot_release_the_lock_of_a_message(app, dead, caplog):
    plain = app.task(name="once decorated", shared=False, lazy=False)(undecorated)
    come(plain, {SCOPE_HEADER: "job", KEY_HEADER: "a key"})
    assert "could not release the lock of its message, which is released when Redis answers" in caplog.text
    assert plain.AsyncResult(ID).result == "ran"


@contextmanager
def interrupted_in_the_first_call_of_a_run() -> Iterator[None]:
    """Raise a TimeLimit in this thread, as a signal handler does, while it waits for the reply."""
    thread = threading.get_ident()

    def interrupt() -> None:
        wait_until(lambda: {"_run_under_lock", "receive"} <= set(running_in(thread)))
        signal.pthread_kill(thread, signal.SIGALRM)

    with interruptions(TimeLimit), ThreadPoolExecutor(1) as threads:
        done = threads.submit(interrupt)
        yield
    done.result()


def running_in(thread: int) -> Iterator[str]:
    """Return the names of the functions in which a thread is now."""
    frame = sys._current_frames()[thread]
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


# A message that is published again


def test_a_message_comes_again_although_its_copies_could_not_be_marked(
    own_server, app, make, settings, caplog, monkeypatch
):
    monkeypatch.setattr(Lease, "retry_for", 0.3)
    settings.DJANGO_REDISLOCK = {"URL": own_server.url}
    task = make(on_conflict="reschedule")
    with own_server.client() as client:
        Lock(client, name_of(task), auto_renewal=False).acquire()
    ends = lambda *args, **more: own_server.kill()  # noqa: E731
    signals.after_task_publish.connect(ends)
    come(task)
    signals.after_task_publish.disconnect(ends)
    assert "Could not mark the message of" in caplog.text
    assert task.AsyncResult(ID).state == "RETRY"
    (message,) = take(app)
    assert message.headers["single_instance_rescheduled"] == 1


@pytest.fixture
def no_broker(app):
    """Nobody answers where the broker should be."""
    app.conf.update(
        broker_url=f"redis://127.0.0.1:{free_port()}/0",
        broker_transport_options={"max_retries": 0, "interval_start": 0, "interval_step": 0},
        task_publish_retry=False,
    )


def test_a_refusal_stands_when_its_message_cannot_be_published_again(client, make, no_broker):
    task = make(on_conflict="reschedule")
    with Lock(client, name_of(task)):
        outcome = come(task)
    assert (outcome.state, type(outcome.retval)) == ("FAILURE", TaskAlreadyRunning)
    assert isinstance(outcome.retval.__cause__, OperationalError)


def test_a_copy_that_cannot_be_published_again_stays_with_the_broker(client, make, no_broker):
    task = make(task_options={"acks_late": True})
    copy = Lock(client, name_of(task), id=f"{ID}:0:one:run")
    copy.acquire()
    outcome = come(task)
    assert isinstance(outcome.retval, Reject)
    assert outcome.retval.requeue
    copy.release()


# The end of a body that was not the end of its message


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, Reject("not now", requeue=True)])
def test_a_job_whose_message_comes_again_keeps_its_lock(client, app, make, error):
    def body(self):
        if not ran:
            ran.append(self.request.id)
            raise error
        return "ran"

    ran = []
    task = make(body, scope="job", task_options={"acks_late": True})
    result = task.delay()
    (message,) = take(app)
    with nullcontext() if isinstance(error, Reject) else pytest.raises(error):
        come(task, message.headers)
    assert task.delay().id == result.id, "a duplicate"
    come(task, message.headers)
    assert list(held_locks(client)) == []


def test_a_retry_with_arguments_that_have_no_key_leaves_no_lock(client, app, make):
    def body(self, a=1):
        raise self.retry(args=(1, 2), countdown=0)

    task = make(body, scope="job", task_options={"typing": False})
    result = task.delay()
    work(app)
    assert isinstance(result.result, Exception)
    assert list(held_locks(client)) == []


# What is written down of a message


class Broken(Mapping):
    def __getitem__(self, key):
        raise ZeroDivisionError

    __iter__ = __len__ = __getitem__


def test_an_argument_that_cannot_be_shown_is_a_question_mark(make):
    bound = make(lambda self, a=1, b=2: None)._signature.bind(Broken(), 7)
    assert message_module.describe_arguments(bound) == "a=?, b=7"


def test_of_many_locks_only_the_latest_warnings_are_remembered(client, make, monkeypatch, caplog):
    monkeypatch.setattr(message_module, "MAX_REMEMBERED", 2)
    monkeypatch.setattr(message_module, "_warned_in", {})
    for _ in range(5):
        task = make(scope="job", on_conflict="skip")
        task.delay()
        task.delay()
        assert len(message_module._warned_in) <= 2
    assert message_module._warned_in


def test_what_is_no_time_is_left_to_celery(client, make):
    task = make(scope="job")
    with pytest.raises(AttributeError, match="isoformat"):
        task.apply_async(eta=object())
    assert list(held_locks(client)) == []
    task.apply_async(eta="no time")
    wait_until(lambda: task.lock_info().ttl > 3500, message="it lives as that of a message without one")


@pytest.mark.parametrize("scope", ["run", "queued", "queued+run", "job"])
def test_a_soft_time_limit_while_redis_does_not_answer_the_start_leaves_no_lock_of_the_message(
    make, app, own_server, settings, scope
):
    """A job kept its lock for an hour: it was to be taken over, and the message had ended."""
    settings.DJANGO_REDISLOCK = {"URL": f"{own_server.url}?socket_timeout=1.2"}
    task = make(scope=scope)
    task.delay()
    (message,) = take(app)
    own_server.pause()
    with interrupted_in_the_first_call_of_a_run():
        ended = deliver(app, message)
    own_server.resume()
    assert ended.type is TimeLimit
    with own_server.client() as client:
        wait_until(lambda: not list(held_locks(client)), 20, lambda: f"nothing is held, but {list(held_locks(client))}")
