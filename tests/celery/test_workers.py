"""Single-instance tasks on real workers of every pool: every form, every policy, every canvas.

The oracle is what the bodies note down: no two runs of one key overlap, every id ends in a terminal state, no lock is
left.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from celery import chain
from celery.exceptions import ChordError

from django_redislock import TaskAlreadyRunning
from django_redislock.celery.running import HIDES_IGNORED_RETRIES
from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app
from tests.support.celery_site.forms import FORMS
from tests.support.celery_site.harness import (
    KINDS,
    POOLS,
    TaskQueue,
    WorkerPools,
    all_ended,
    beat,
    checked_queue,
    ended,
    events,
    published,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]


@pytest.fixture(scope="module")
def worker_pools(worker_pools) -> WorkerPools:
    worker_pools.start_all()
    return worker_pools


@pytest.fixture(params=POOLS)
def pool(request) -> str:
    return request.param


@pytest.fixture
def task_queue(worker_pools, pool) -> Iterator[TaskQueue]:
    yield from checked_queue(TaskQueue(worker_pools.of(pool)))


@pytest.fixture
def blocked(worker_pools, pool) -> Iterator[TaskQueue]:
    """A queue whose bodies wait until the test lets them end."""
    yield from checked_queue(TaskQueue(worker_pools.of(pool), blocked=True))


only_prefork = pytest.mark.parametrize("pool", ["prefork"], indirect=True)


@only_prefork
@pytest.mark.parametrize("form", FORMS)
def test_every_order_and_form_runs_and_refuses_a_duplicate(blocked, form):
    task = FORMS[form]
    first = blocked.publish(task)
    blocked.run_log.wait_for("start")
    second = blocked.publish(task)
    error = ended(second).result
    assert type(error) is TaskAlreadyRunning
    assert f"{task.name}[{first.id}] on " in error.holder
    blocked.run_log.let_bodies_end()
    assert ended(first).result == "ran"
    assert len(blocked.run_log.events("start")) == 1
    assert ended(blocked.publish(task)).result == "ran", "and then it can run again"


# The policies. In each test one run holds the lock, and then come a duplicate alone, one in a chain, one in a group and
# one in a chord.


def canvases(task_queue: TaskQueue, task) -> dict:
    return {kind: published(kind, task_queue, task) for kind in KINDS}


def outcomes(results: dict) -> dict:
    """Wait until all has ended and tell how."""
    all_ended(list(results.values()))
    done = {name: result.result for name, result in results.items() if name != "group"}
    return done | {"group": [child.result for child in results["group"].results]}


@pytest.fixture
def holder(blocked):
    """Start a run that holds the lock until the test lets it end; return its result afterwards."""

    def start(task):
        result = blocked.publish(task)
        blocked.run_log.wait_for("start")
        return result

    return start


def test_raise_ends_everything_at_once(blocked, holder):
    first = holder(tasks.refuse)
    done = outcomes(canvases(blocked, tasks.refuse))
    assert not first.ready(), "the duplicates did not wait for it"
    assert type(done["single"]) is type(done["chain"]) is TaskAlreadyRunning
    assert isinstance(done["chord"], ChordError)
    assert "TaskAlreadyRunning" in str(done["chord"])
    assert [type(one) for one in done["group"]] == [TaskAlreadyRunning, str]
    blocked.run_log.let_bodies_end()
    assert ended(first).state == "SUCCESS"
    assert len(blocked.run_log.events("start")) == 1


def test_skip_ends_everything_at_once_with_its_result(blocked, holder):
    first = holder(tasks.skip)
    done = outcomes(canvases(blocked, tasks.skip))
    assert not first.ready()
    assert done == {"single": "skipped", "chain": "plain", "group": ["skipped", "plain"], "chord": 2}
    assert re.search(
        r"INFO.* is skipped, because the lock has been held for \d+\.\d s by \S*tasks\.skip\[", blocked.log
    )
    blocked.run_log.let_bodies_end()
    assert ended(first).state == "SUCCESS"
    assert len(blocked.run_log.events("start")) == 1


def all_ran(done: dict) -> None:
    assert done["single"].startswith("ran ")
    assert done["chain"] == "plain"
    assert done["group"][0].startswith("ran ")
    assert done["chord"] == 2


def test_wait_runs_one_after_the_other(blocked, holder):
    first = holder(tasks.wait)
    results = canvases(blocked, tasks.wait)
    wait_until(lambda: tasks.wait.lock_info(blocked.name).waiting >= 1)
    blocked.run_log.let_bodies_end()
    all_ran(outcomes(results))
    assert ended(first).state == "SUCCESS"
    assert len(blocked.run_log.events("start")) == 5


def test_reschedule_runs_later_under_the_same_id_without_a_retry(blocked, holder):
    """The task allows no retry at all."""
    first = holder(tasks.reschedule)
    results = canvases(blocked, tasks.reschedule)
    wait_until(lambda: results["single"].state == "RETRY")
    blocked.run_log.let_bodies_end()
    done = outcomes(results)
    all_ran(done)
    assert done["single"] == f"ran {results['single'].id}"
    assert ended(first).state == "SUCCESS"
    assert len(blocked.run_log.events("start")) == 5


@pytest.fixture
def watched(worker_pools) -> Iterator[TaskQueue]:
    """A queue whose worker sends events."""
    worker = worker_pools.start("prefork", 0, "--task-events", name="events", concurrency=2)
    yield from checked_queue(TaskQueue([worker.wait_ready()], blocked=True))


def kinds(heard, result):
    return [event["type"] for event in heard[result.id]]


@pytest.mark.skipif(not HIDES_IGNORED_RETRIES, reason="before Celery 5.6.3 a rescheduled message ends as ignored")
def test_flower_is_told_that_a_rescheduled_task_waits_again(watched):
    """From its worker's events, where a task that is merely ignored runs for ever. The result stays the successor's."""
    with events() as heard:
        first = watched.publish(tasks.reschedule)
        watched.run_log.wait_for("start")
        later = watched.publish(tasks.reschedule)
        wait_until(lambda: "task-retried" in kinds(heard, later), 30, lambda: f"a retry is told of; there are {heard}")
        watched.run_log.let_bodies_end()
        assert ended(later).result == f"ran {later.id}"
        wait_until(lambda: kinds(heard, later)[-2:] == ["task-started", "task-succeeded"], 30)
        assert ended(first).state == later.state == "SUCCESS"
        assert "task-retried" not in kinds(heard, first)


def test_reschedule_ends_with_its_message(blocked, holder):
    """By default, whatever the lock does."""
    holder(tasks.reschedule)
    result = blocked.publish(tasks.reschedule, expires=1)
    assert ended(result).state == "REVOKED"
    assert f"reschedule[{result.id}] is published again, to start in " in blocked.log


# Every way to end


def test_the_lock_is_free_before_the_next_of_a_chain_and_before_the_result_is_seen(task_queue):
    one = tasks.refuse.si(task_queue.name).set(queue=task_queue.queue)
    assert ended(chain(one, one, one).apply_async()).state == "SUCCESS"
    linked = task_queue.publish(tasks.refuse, link=one)
    assert ended(linked).state == "SUCCESS"
    task_queue.run_log.wait_for("end", 5)
    wait_until(lambda: tasks.refuse.lock_info(task_queue.name) is None)  # the linked one's result nobody waits for
    for _ in range(10):
        assert ended(task_queue.publish(tasks.refuse)).state == "SUCCESS"


@pytest.mark.parametrize(
    ("how", "events"),
    [("return", 1), ("fail", 1), ("retry", 3), ("ignore", 1), ("reject", 1), ("replace", 1)],
)
def test_the_lock_is_released_however_a_task_ends(task_queue, how, events):
    """Its life of ten minutes is longer than any patience here."""
    task_queue.publish(tasks.refuse, how)
    task_queue.run_log.wait_for("end", events)
    wait_until(lambda: tasks.refuse.lock_info(task_queue.name) is None)
    assert ended(task_queue.publish(tasks.refuse)).state == "SUCCESS"


def test_the_errback_of_a_duplicate_is_called(blocked, holder):
    holder(tasks.refuse)
    errback = tasks.note_error.s(name=blocked.name).set(queue=blocked.queue)
    blocked.publish(tasks.refuse, link_error=errback)
    assert blocked.run_log.wait_for("errback")["error"] == "TaskAlreadyRunning"


def test_a_conflict_is_not_retried_by_autoretry(blocked, holder):
    """The body is, and each of its runs competes again."""
    first = holder(tasks.autoretry)
    duplicate = ended(blocked.publish(tasks.autoretry))
    assert type(duplicate.result) is TaskAlreadyRunning
    assert f"autoretry[{duplicate.id}] retry" not in blocked.log
    blocked.run_log.let_bodies_end()
    assert ended(first).result == 2


# Whoever publishes


def test_a_producer_without_the_code_of_the_task_makes_the_same_key(blocked, holder):
    first = holder(tasks.refuse)
    with app.connection_for_write() as connection:
        for kwargs in ({"name": blocked.name}, {"name": blocked.name, "how": "return"}):
            foreign = app.send_task(tasks.refuse.name, kwargs=kwargs, queue=blocked.queue, connection=connection)
            assert f"[{first.id}]" in ended(foreign).result.holder


@only_prefork
def test_of_a_body_longer_than_its_period_beat_starts_one_at_a_time(blocked, tmp_path):
    with beat(tmp_path, 0.2, tasks.skip, blocked):
        first = blocked.run_log.wait_for("start", timeout=60)
        wait_until(
            lambda: len(re.findall(rf"{tasks.skip.name}\[.* by {tasks.skip.name}\[{first['id']}", blocked.log)) >= 3
        )
        assert len(blocked.run_log.events("start")) == 1
        blocked.run_log.let_bodies_end()
        blocked.run_log.wait_for("start", 3)


def test_the_same_id_delivered_twice_is_neither_dropped_nor_run_beside_itself(blocked, holder):
    first = holder(tasks.refuse)
    blocked.publish(tasks.refuse, task_id=first.id)
    wait_until(lambda: f"{first.id}] is published again" in blocked.log)
    assert len(blocked.run_log.events("start")) == 1
    blocked.run_log.let_bodies_end()
    blocked.run_log.wait_for("end", 2)
    assert ended(first).state == "SUCCESS"


def test_the_same_id_published_twice_is_skipped_and_stores_nothing(blocked, holder):
    first = holder(tasks.skip)
    blocked.publish(tasks.skip, task_id=first.id)
    wait_until(lambda: f"{first.id}] is skipped" in blocked.log)
    wait_until(lambda: f"[{first.id}] ignored" in blocked.log, message="Celery has stored no result")
    assert app.AsyncResult(first.id).state in ("PENDING", "STARTED")
    blocked.run_log.let_bodies_end()
    assert ended(first).result == f"ran {first.id}"
    assert len(blocked.run_log.events("start")) == 1


def test_a_crowd_on_few_keys(worker_pools, pool):
    """Many messages of few keys at once, of every policy that may wait: nothing overlaps and every id ends."""
    queues = [
        (TaskQueue(worker_pools.of(pool)), task)
        for task in (tasks.refuse, tasks.reschedule, tasks.wait)
        for _ in range(2)
    ]
    # A retry waits for longer than Celery may take to store RETRY, which would cover that the retry was refused
    # meanwhile.
    chance = random.Random(20261121)
    results = []
    for _ in range(45):
        task_queue, task = chance.choice(queues)
        results.append(task_queue.publish(task, chance.choice(["return", "return", "fail", "retry after a second"])))
    for result in results:
        ended(result, timeout=90)
    for task_queue, _ in queues:
        assert task_queue.run_log.events("overlap") == []
        assert len(task_queue.run_log.events("start")) == len(task_queue.run_log.events("end")) > 0
