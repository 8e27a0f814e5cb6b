"""Duplicates that have an id or callbacks of their own, and jobs that publish themselves."""

from __future__ import annotations

import gc
import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery, chain, chord, group, states

from django_redislock.celery import DuplicateResult, SingleInstanceTask
from django_redislock.core import held_locks
from django_redislock.core.listing import contention
from django_redislock.signals import task_skipped
from tests.celery.deliveries import take, work
from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.harness import TaskQueue, ended


@pytest.fixture(params=["queued", "queued+run", "job"])
def scope(request):
    return request.param


@pytest.fixture
def ran():
    return []


@pytest.fixture
def make(make, ran):
    """Make a task that notes its runs."""

    def noting(function=None, **options):
        def body(self, a=1):
            ran.append(self.request.id)
            return "ran" if function is None else function(self, a)

        return make(body, **options)

    return noting


# An id of its own


def test_a_duplicate_with_an_id_of_its_own_is_skipped_and_does_not_run_afterwards(
    client, app, make, scope, ran, caplog
):
    task = make(scope=scope, on_conflict="skip", skip_result="busy")
    caplog.set_level(logging.INFO, logger="django_redislock")
    heard = []
    task_skipped.connect(receiver := lambda **data: heard.append(data))
    first = task.delay()
    second = task.apply_async(task_id=f"mine-{scope}")
    assert (type(second).__name__, second.id) == ("AsyncResult", f"mine-{scope}"), "its id ends, so it is published"
    work(app)
    task_skipped.disconnect(receiver)
    assert ran == [first.id]
    assert (second.state, second.result) == ("SUCCESS", "busy")
    (record,) = [record for record in caplog.records if record.name == "django_redislock"]
    assert record.levelname == "INFO"
    said = f"{task.name}[{second.id}] is skipped, because {task.name}[{first.id}] on "
    assert record.getMessage().startswith(said)
    assert record.getMessage().endswith(" held the lock when this message was published.")
    assert [(data["task"], data["task_id"]) for data in heard] == [(task.name, second.id)]
    assert sum(found.duplicates for found in contention(client).names.values()) == 1
    assert list(held_locks(client)) == []


def test_a_holder_that_will_never_run_makes_nobody_skipped(client, app, make, scope, ran):
    task = make(scope=scope, on_conflict="skip")
    first = task.delay()
    published = task.lock_info().acquired_at
    wait_until(lambda: datetime.now(UTC) - published > timedelta(milliseconds=2))
    app.backend.store_result(first.id, None, states.REVOKED)
    take(app)
    task.apply_async(task_id=f"after-{scope}")
    work(app)
    assert ran == [f"after-{scope}"]


def test_the_same_id_again_is_not_its_own_duplicate(client, app, make, scope, ran):
    task = make(scope=scope, on_conflict="skip")
    for _ in range(2):
        task.apply_async(task_id=f"twice-{scope}")
    found = work(app)
    assert found
    assert all("single_instance_refused" not in headers for headers in found)


def retry_once(task, a):
    if not task.request.retries:
        raise task.retry(countdown=0)


def test_an_id_that_is_published_again_while_it_runs_is_not_its_own_duplicate(client, app, make, ran):
    """Skipped, it would store its result over that of the run."""
    headers = []

    def again(task, a):
        if len(ran) == 1:
            task.apply_async(task_id=task.request.id)
            headers.extend(work(app))
        return "of the run"

    task = make(again, scope="job", on_conflict="skip")
    result = task.apply_async(task_id="again and again")
    work(app)
    assert len(headers) >= 1
    assert all("single_instance_refused" not in each for each in headers)
    assert result.result == "of the run"


def test_a_retry_is_refused_by_nobody_who_held_the_lock_of_its_former_message(client, app, make, ran, settings):
    """Where the worker has another policy than the producer, as while it is changed."""
    settings.DJANGO_REDISLOCK = {"CELERY": {"ON_CONFLICT": "skip"}}
    task = make(retry_once, scope="queued")
    task.delay()
    task.apply_async(task_id="refused and retried")
    settings.DJANGO_REDISLOCK = {"CELERY": {"ON_CONFLICT": "raise"}}
    headers = [each for each in work(app) if each["id"] == "refused and retried"]
    assert ["single_instance_refused" in each for each in headers] == [True, False]


@pytest.mark.parametrize("policy", ["raise", "reschedule", "wait"])
def test_other_policies_decide_at_the_start_as_ever(client, app, make, scope, ran, policy):
    task = make(scope=scope, on_conflict=policy)
    first, second = task.delay(), task.apply_async(task_id=f"mine-{scope}-{policy}")
    work(app)
    assert ran == [first.id, second.id]


def test_members_of_canvases_and_retries_are_skipped_at_their_start_only(client, app, make, scope, ran):
    """By then the lock may be free: a chain of the same task runs it as often as it stands there."""
    task, retried = make(scope=scope, on_conflict="skip"), make(retry_once, scope=scope, on_conflict="skip")
    for canvas in (chain(task.si(), task.si()), group(task.si(), task.si()), chord([task.si(), task.si()], task.si())):
        canvas.apply_async()
        found = work(app)
        assert found
        assert all("single_instance_refused" not in headers for headers in found)
    retried.delay()
    found = work(app)
    assert len(found) == 2
    assert all("single_instance_refused" not in headers for headers in found)


@pytest.mark.processes
def test_a_worker_skips_a_duplicate_with_an_id_of_its_own(worker_pools):
    task_queue = TaskQueue(worker_pools.of("prefork"), blocked=True)
    first = task_queue.publish(tasks.job_skip)
    task_queue.run_log.wait_for("start")
    second = task_queue.publish(tasks.job_skip, task_id=f"mine-{task_queue.name}")
    task_queue.run_log.let_bodies_end()
    assert ended(first).result == f"ran {first.id}"
    assert ended(second).result == "skipped"
    assert len(task_queue.run_log.events("start")) == 1


# Callbacks


def dropped(caplog):
    return [record for record in caplog.records if "will not be called" in record.getMessage()]


@pytest.mark.parametrize(
    ("callbacks", "named"),
    [(["link"], "link"), (["link_error"], "link_error"), (["link", "link_error"], "link and link_error")],
)
def test_the_callbacks_of_a_duplicate_are_told_to_be_dropped(client, app, make, scope, caplog, callbacks, named):
    task, callback = make(scope=scope), make()
    first = task.delay()
    given = {name: callback.si() for name in callbacks}
    for second in (task.apply_async(**given), task.s().set(**given).apply_async()):
        assert isinstance(second, DuplicateResult)
    records = dropped(caplog)
    assert [record.levelname for record in records] == ["WARNING"] * 2
    assert f"{task.name} is not published, and its {named} will not be called" in records[0].getMessage()
    assert first.id in records[0].getMessage()


def test_without_callbacks_or_with_an_id_of_its_own_nothing_is_dropped(client, app, make, scope, ran, caplog):
    task, callback = make(scope=scope), make()
    task.apply_async(link=callback.si())
    task.delay()
    task.apply_async(link=callback.si(), task_id=f"own-{scope}")
    work(app)
    assert dropped(caplog) == []
    assert len(ran) == 4, "both, and both callbacks"


# Jobs that publish themselves


@pytest.mark.parametrize(("scope", "rounds"), [("job", 1), ("queued", 3), ("queued+run", 3), ("run", 3)])
def test_a_job_that_publishes_itself_anew_is_its_own_duplicate(client, app, make, ran, scope, rounds):
    """As the page says: with "job" the lock is held to the body's end; with the other scopes the next message waits."""
    results = []

    def again(task, a):
        if len(ran) < 3:
            results.append(task.delay())

    task = make(again, scope=scope)
    first = task.delay()
    work(app)
    assert len(ran) == rounds
    if scope == "job":
        (result,) = results
        assert (type(result), result.id) == (DuplicateResult, first.id)


def test_a_job_that_goes_on_with_a_callback_or_a_retry_goes_on(client, app, make, ran):
    """As the page says to do."""

    def again(task, a):
        if task.request.retries < 2:
            raise task.retry(countdown=0, max_retries=None)

    make(again, scope="job").delay()
    work(app)
    assert len(ran) == 3
    task = make(scope="job")
    task.apply_async(link=task.si())
    work(app)
    assert len(ran) == 5


# Its result


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # by Celery
def test_a_duplicate_that_is_dropped_ends_no_wait_for_its_original(client, server):
    """Celery before 5.7 forgot the waiter, and `get` hung."""
    with Celery("waits", set_as_current=False, broker="memory://", backend=server.url) as app:

        @app.task(base=SingleInstanceTask, single_instance={"scope": "job"}, shared=False, lazy=False)
        def task():
            return "ran"

        first, results = task.delay(), []
        thread = threading.Thread(target=lambda: results.append(first.get(timeout=10)))
        thread.start()
        with server.client() as of_results:
            wait_until(lambda: of_results.pubsub_numsub(app.backend.get_key_for_task(first.id))[0][1])
        assert type(task.delay()) is DuplicateResult
        gc.collect()
        work(app)
        thread.join(timeout=60)
    assert results == ["ran"]
