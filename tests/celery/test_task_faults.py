"""An execution whose lock is lost, whose Redis does not answer, or that is interrupted."""

from __future__ import annotations

import contextlib

import pytest
from celery.exceptions import Ignore, Retry

from django_redislock import LockBackendError, TaskAlreadyRunning
from django_redislock.celery import SingleInstanceTask
from django_redislock.celery.execution_lock import ExecutionLock
from django_redislock.celery.publishing import KEY_HEADER
from django_redislock.celery.running import HIDES_IGNORED_RETRIES
from django_redislock.core import Lock, held_locks
from django_redislock.core.lease import Lease
from django_redislock.signals import task_rescheduled
from tests.celery.deliveries import deliver, take, work
from tests.support import Interrupted, free_port, name_of


def names(client):
    return [info.name for info in held_locks(client)]


def test_the_loss_of_the_lock_leaves_its_successor_alone(client, make):
    def body(self):
        self.unlock()
        taken.append(Lock(client, f"celery:{self.name}"))
        assert taken[0].acquire(timeout=5)
        raise ZeroDivisionError

    taken = []
    assert type(make(body, key=[], expire=1.5).apply().result) is ZeroDivisionError
    assert taken[0].owned()
    taken[0].release()


@pytest.fixture
def dead(settings):
    """Nobody answers where the locks should be."""
    settings.DJANGO_REDISLOCK = {"URL": f"redis://127.0.0.1:{free_port()}"}
    return settings


@pytest.mark.parametrize("policy", ["raise", "reschedule"])
def test_without_redis_a_task_fails_with_a_typed_error(make, dead, policy):
    task = make(lambda self: pytest.fail("the body ran"), on_backend_error=policy)
    assert type(task.apply().result) is LockBackendError


def test_without_redis_a_task_may_run_without_its_lock(make, dead, caplog):
    task = make(lambda self: self.single_instance.lost or "ran", on_backend_error="run")
    assert task.apply().get() == "ran"
    assert "runs without its lock, because Redis does not answer" in caplog.text


@pytest.fixture
def start(app):
    """Deliver a message whose start Redis does not answer."""

    def unanswered(self, *args, **more):
        raise LockBackendError(self.name, "cut off")

    def start(message):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExecutionLock, "acquire", unanswered)
            deliver(app, message)

    return start


@pytest.mark.parametrize("policy", ["raise", "run", "reschedule"])
def test_a_job_whose_start_is_not_answered_leaves_no_lock_when_it_has_ended(client, app, make, start, policy):
    """It stayed with its message for an hour, and each later one was a duplicate of a task that had ended."""
    held = []
    task = make(
        lambda self: held.extend(names(client)), key=[], scope="job", on_backend_error=policy, reschedule_limit=0
    )
    result = task.delay()
    start(*take(app))
    assert held == ([f"celery:{task.name}"] if policy == "run" else [])
    assert result.state == ("SUCCESS" if policy == "run" else "FAILURE")
    assert names(client) == []


@pytest.mark.parametrize("policy", ["run", "reschedule"])
def test_a_job_whose_start_is_not_answered_leaves_its_lock_to_the_message_that_follows(
    client, app, make, start, policy
):
    def body(self):
        return self.request.retries or policy == "reschedule" or self.retry(countdown=0)

    task = make(body, key=[], scope="job", on_backend_error=policy)
    result = task.delay()
    start(*take(app))
    assert result.state == "RETRY"
    assert task.delay().id == result.id, "a duplicate"
    work(app)
    assert result.state == "SUCCESS"
    assert names(client) == []


@pytest.mark.parametrize("outcome", ["finished", ZeroDivisionError])
def test_when_redis_goes_away_the_outcome_of_the_body_stands(own_server, make, settings, caplog, outcome, monkeypatch):
    monkeypatch.setattr(Lease, "retry_for", 0.3)
    settings.DJANGO_REDISLOCK = {"URL": own_server.url}

    def body(self):
        own_server.kill()
        if outcome == "finished":
            return outcome
        raise outcome

    result = make(body, expire=4).apply()
    assert result.result == outcome or type(result.result) is outcome
    assert "could not release its lock, which is released when Redis answers" in caplog.text


def test_a_redis_that_goes_away_after_a_refusal_is_no_reason_to_run(own_server, make, settings, monkeypatch):
    """That somebody holds the lock is known, whatever ``on_backend_error`` says."""
    settings.DJANGO_REDISLOCK = {"URL": own_server.url, "RETRY_FOR": 0.5}
    task = make(lambda self: pytest.fail("the body ran"), key=[], on_backend_error="run")
    with own_server.client() as client:
        Lock(client, f"celery:{task.name}", auto_renewal=False).acquire()
    owner = Lock.owner

    def die_first(self):
        own_server.kill()
        return owner(self)

    monkeypatch.setattr(Lock, "owner", die_first)
    assert type(task.apply().result) is TaskAlreadyRunning


def test_reschedule_publishes_the_same_message_again(client, app):
    """Seen from inside a request that did not come from apply(): the message keeps all that Celery sends along."""

    @app.task(base=SingleInstanceTask, name="again", single_instance={"on_conflict": "reschedule", "key": "{a}"})
    def task(a):
        pytest.fail("the body ran")

    request = {
        "headers": {"mine": "kept", KEY_HEADER: "theirs"},
        "retries": 2,
        "chain": [],
        "group": "g",
        "shadow": "s",
    }
    with held_name(client, "celery:again:theirs"), app.connection_for_write() as connection:
        task.backend  # noqa: B018 - connect before the tracer does
        task.request_stack.push(context := task.request.__class__({"id": "the-id", "args": [1], **request}))
        context.called_directly = False
        heard = []
        task_rescheduled.connect(receiver := lambda **data: heard.append(data))
        try:
            with pytest.raises(
                Retry if HIDES_IGNORED_RETRIES else Ignore, match=r"published again.* is already running"
            ):
                task(1)
        finally:
            task.request_stack.pop()
            task_rescheduled.disconnect(receiver)
        (data,) = heard
        assert (data["task"], data["task_id"], data["often"]) == ("again", "the-id", 1)
        assert 5 <= data["delay"] <= 15
        with connection.SimpleQueue("celery") as queue:
            message = queue.get(timeout=30)
    assert task.AsyncResult("the-id").state == "RETRY"
    headers = message.headers
    assert (headers["id"], headers["retries"], headers["group"], headers["shadow"]) == ("the-id", 2, "g", "s")
    assert (headers["mine"], headers[KEY_HEADER], headers["single_instance_rescheduled"]) == ("kept", "theirs", 1)
    assert headers["eta"]


@contextlib.contextmanager
def held_name(client, name):
    with Lock(client, name) as lock:
        yield lock


def test_a_message_that_is_interrupted_before_it_asks_for_its_run_gives_its_lock_back(client, app, make):
    """A soft time limit there left the lock of the message for an hour."""

    def limit(*args):
        raise Interrupted

    task = make(lambda self: "ran", key=[], scope="queued+run", limit=limit)
    task.delay()
    (message,) = take(app)
    assert names(client) == [f"celery-queue:{task.name}"]
    with pytest.raises(Interrupted):
        deliver(app, message)
    assert names(client) == []


def test_a_message_that_could_not_mark_its_claim_as_published_again_runs_at_once(client, app, make, proxy, settings):
    """It took itself for a copy, and waited for the expiry beside a free lock."""
    settings.DJANGO_REDISLOCK = {"URL": proxy.url}
    task = make(lambda self: "ran", key=[], on_conflict="reschedule", reschedule_delay=0.01)
    task.apply_async()
    (message,) = take(app)
    with Lock(client, name_of(task)):
        refused = proxy.refused
        with proxy.refusing("OOM command not allowed when used memory > 'maxmemory'.", b"\r\nagain\r\n"):
            deliver(app, message)
        assert proxy.refused > refused
    (again,) = take(app)
    assert deliver(app, again) == "ran"
