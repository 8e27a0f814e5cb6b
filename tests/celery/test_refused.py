"""What remains of a message that is refused, or published again: seen by its next delivery, and by others."""

from __future__ import annotations

from contextlib import suppress

import pytest
from celery import VERSION, Task, signals
from celery.app.task import Context
from celery.exceptions import Reject, WorkerLostError

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import SingleInstanceTask
from django_redislock.core import Lock
from tests.celery.deliveries import deliver, take
from tests.support import name_of, wait_until


def reject(task, error):
    raise Reject(error, requeue=False)


@pytest.mark.slow
def test_a_message_that_a_policy_rejects_runs_when_the_queue_of_dead_letters_brings_it_back(client, app, make):
    """A queue for dead letters with a time to live is how RabbitMQ delays a message; it was dropped as processed."""
    task = make(lambda self: "ran", key=[], on_conflict=reject, expire=1, task_options={"acks_late": True})
    task.delay()
    (message,) = take(app)
    with Lock(client, name_of(task), label="a long run"):
        deliver(app, message)
    wait_until(lambda: not list(client.scan_iter("*:done:*")))
    assert deliver(app, message) == "ran"


def test_a_message_that_is_published_again_holds_its_place_no_longer_than_until_it_expires(client, app, make):
    task = make(lambda self: "ran", key=[], scope="queued+run", on_conflict="reschedule")
    first = task.apply_async(expires=60)
    (message,) = take(app)
    with Lock(client, name_of(task), label="a long run"):
        deliver(app, message)
    place = task.lock_info()
    assert place.label == f"{task.name}[{first.id}]"
    assert place.ttl <= 60


HIDDEN = {"argsrepr": "('4111…',)", "kwargsrepr": "{…}"}


def test_a_message_that_is_published_again_shows_what_celery_was_told_to_show(client, app, make):
    """Its worker's events, log and Flower showed the arguments themselves from then on."""
    task = make(lambda self, card="": "ran", key=[], on_conflict="reschedule")
    task.apply_async(("4111 1111",), **HIDDEN)
    with Lock(client, name_of(task), label="a long run"):
        for _ in range(3):
            (message,) = take(app)
            assert {name: message.headers[name] for name in HIDDEN} == HIDDEN
            deliver(app, message)


def test_the_record_of_a_retry_that_waits_shows_what_celery_was_told_to_show(client, app, make):
    def body(self, card=""):
        raise self.retry(countdown=0)

    task = make(body, key=[], scope="queued")
    task.apply_async(("4111 1111",), **HIDDEN)
    shown = task.lock_info().arguments
    for _ in range(2):
        (message,) = take(app)
        deliver(app, message)
        assert task.lock_info().arguments == shown == ", ".join(HIDDEN.values())


def test_a_message_that_is_published_again_still_has_no_result(client, app, make):
    task = make(lambda self: "ran", key=[], on_conflict="reschedule")
    first = task.apply_async(ignore_result=True)
    with Lock(client, name_of(task), label="a long run"):
        deliver(app, *take(app))
    assert deliver(app, *take(app)) == "ran"
    assert first.backend.get_task_meta(first.id)["status"] == "PENDING"


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_copy_of_a_message_that_was_refused_at_the_end_of_its_time_does_not_run(client, app, make, acks_late):
    """It ran when the lock was free, although the failure of its id was stored."""
    options = {"on_conflict": "reschedule", "reschedule_limit": 0, "task_options": {"acks_late": acks_late}}
    task = make(lambda self: "ran", key=[], **options)
    result = task.delay()
    (message,) = take(app)
    with Lock(client, name_of(task), label="a long run"):
        deliver(app, message)
    assert deliver(app, message) != "ran"
    assert type(result.result) is TaskAlreadyRunning


def test_a_message_that_is_rejected_at_the_end_of_its_time_runs_when_it_comes_again(client, app, make):
    """From a queue for dead letters, as after other conflicts."""
    names = {"acks_on_failure", "acks_on_failure_or_timeout"} & set(dir(Task))  # the first one of Celery 5.7
    task_options = {"acks_late": True, **dict.fromkeys(names, False)}
    options = {"on_conflict": "reschedule", "reschedule_limit": 0, "task_options": task_options}
    task = make(lambda self: "ran", key=[], **options)
    task.delay()
    (message,) = take(app)
    with Lock(client, name_of(task), label="a long run"):
        deliver(app, message)
    assert deliver(app, message) == "ran"


@pytest.mark.parametrize(
    "by",
    [
        "a result that cannot be stored",
        pytest.param(
            "on_success",
            marks=pytest.mark.skipif(VERSION < (5, 6), reason="Celery 5.5 warns of an error outside the body"),
        ),
    ],
)
def test_a_message_that_is_rejected_after_its_body_runs_when_it_comes_again(client, app, make, by):
    """It was dropped as processed before."""

    def reject(*args):
        if len(ran) == 1:
            raise Reject("again", requeue=True)

    ran = []
    names = {"acks_on_failure", "acks_on_failure_or_timeout"} & set(dir(Task))  # the first one of Celery 5.7
    more = {"on_success": reject} if by == "on_success" else {}
    task = make(
        lambda self: ran.append(1) or (object() if len(ran) == 1 and not more else "ran"),
        key=[],
        expire=0.3,
        task_options={"acks_late": True, **dict.fromkeys(names, False), **more},
    )
    task.delay()
    (message,) = take(app)
    with suppress(Reject):
        deliver(app, message)
    wait_until(lambda: not list(client.scan_iter("*:done:*")), message="the note that it ends is over")
    assert deliver(app, message, redelivered=True) == "ran"


@pytest.mark.parametrize("acks_late", [False, True])
def test_copies_of_a_message_whose_limit_raised_do_not_run_and_those_of_a_processed_one_do_not_fail(
    client, app, make, acks_late
):
    broken, ran = [], []
    task_options = {"acks_late": acks_late}
    task = make(lambda self: ran.append(1), key=[], limit=lambda: 1 // (not broken), task_options=task_options)
    for breaks in ([1], []):
        broken[:] = breaks
        first = task.delay()
        (message,) = take(app)
        deliver(app, message)
        state = first.state
        broken[:] = [] if breaks else [1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app.backend, "store_result", lambda *args, **more: pytest.fail("a copy stored a state"))
            deliver(app, message, redelivered=True)
        assert (state, len(ran)) == (("FAILURE", 0) if breaks else ("SUCCESS", 1))


@pytest.mark.parametrize("ends", ["by a retry", "by a retry that expires later", "with its worker"])
def test_the_lock_of_a_job_is_kept_no_longer_than_until_its_message_expires(client, app, make, ends):
    def body(self):
        if ends == "with its worker":
            raise SystemExit
        raise self.retry(countdown=5, **({"expires": 120} if "later" in ends else {}))

    task = make(body, key=[], scope="job", task_options={"acks_late": True})
    first = task.apply_async(expires=60)
    (message,) = take(app)
    with suppress(SystemExit):
        deliver(app, message)
    kept = task.lock_info()
    assert kept.label == f"{task.name}[{first.id}]"
    assert kept.ttl <= 60 if "later" not in ends else 60 < kept.ttl <= 120


@pytest.mark.parametrize("ends", ["revoked with terminate", "a lost worker"])
def test_a_job_that_was_published_without_us_leaves_no_lock_when_it_is_ended_from_outside(client, app, make, ends):
    """Its lock stayed for the life of a message, an hour: without our header the message itself has none."""

    def body(self):
        raise SystemExit

    task = make(body, key=[], scope="job", task_options={"acks_late": True})
    app.send_task(task.name)
    (message,) = take(app)
    with suppress(SystemExit):
        deliver(app, message)
    assert task.lock_info().ttl > 3000, "its message has it"
    if ends == "a lost worker":
        signals.task_failure.send(
            sender=task, task_id=message.headers["id"], exception=WorkerLostError(), args=(), kwargs={}
        )
    else:
        request = Context(message.headers, args=(), kwargs={})
        signals.task_revoked.send(sender=task, request=request, terminated=True)
    assert task.lock_info() is None


@pytest.mark.parametrize("acks_on_failure", [True, False])
def test_a_copy_of_a_message_that_a_policy_retried_does_not_retry_it_again(client, app, make, acks_on_failure):
    names = {"acks_on_failure", "acks_on_failure_or_timeout"} & set(dir(Task))  # the first one of Celery 5.7
    task = make(
        lambda self: "ran",
        key=[],
        on_conflict=lambda task, error: task.retry(countdown=0),
        task_options={"acks_late": True, **dict.fromkeys(names, acks_on_failure)},
    )
    task.delay()
    (message,) = take(app)
    with Lock(client, name_of(task), label="a long run"):
        for _ in range(2):
            deliver(app, message, redelivered=True)
    retries = [message for message in take(app) if message.headers["retries"]]
    assert len(retries) == 1


@pytest.mark.parametrize("by", ["before_start", "__call__"])
@pytest.mark.parametrize("scope", ["queued", "queued+run", "job"])
@pytest.mark.parametrize("args", [None, (1,), (2,)], ids=["its own arguments", "equal arguments", "other arguments"])
def test_a_message_that_is_retried_before_its_task_is_called_leaves_its_lock_to_its_retry_alone(
    client, own_app, by, scope, args
):
    """With other arguments, and so another key, the lock of the first one stayed for an hour."""

    class Retrying(SingleInstanceTask):
        single_instance = {"scope": scope, "key": ["a"]}

        def before_start(self, *given):
            if by == "before_start" and not self.request.retries:
                raise self.retry(countdown=0, args=args)

        def __call__(self, *given, **more):
            if by == "__call__" and not self.request.retries:
                raise self.retry(countdown=0, args=args)
            return super().__call__(*given, **more)

    @own_app.task(base=Retrying, name="retrying")
    def task(a):
        return "ran"

    first = task.delay(1)
    deliver(own_app, *take(own_app))
    locks = [task.lock_info(a) for a in (1, 2)]
    assert [lock and lock.label for lock in locks] == (
        [None, f"retrying[{first.id}]"] if args == (2,) else [f"retrying[{first.id}]", None]
    )
    assert deliver(own_app, *take(own_app)) == "ran"
    assert [task.lock_info(a) for a in (1, 2)] == [None, None]
