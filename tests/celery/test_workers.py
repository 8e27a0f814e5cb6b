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
from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app
from tests.support.celery_site.forms import FORMS
from tests.support.celery_site.harness import (
    KINDS,
    POOLS,
    Stage,
    Workers,
    all_ended,
    beat,
    ended,
    events,
    on_stage,
    published,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_lock_is_left")]


@pytest.fixture(scope="module")
def crew(crew) -> Workers:
    crew.start_all()
    return crew


@pytest.fixture(params=POOLS)
def pool(request) -> str:
    return request.param


@pytest.fixture
def stage(crew, pool) -> Iterator[Stage]:
    yield from on_stage(Stage(crew.of(pool)))


@pytest.fixture
def gated(crew, pool) -> Iterator[Stage]:
    """A stage on which bodies wait at the gate."""
    yield from on_stage(Stage(crew.of(pool), gated=True))


only_prefork = pytest.mark.parametrize("pool", ["prefork"], indirect=True)


@only_prefork
@pytest.mark.parametrize("form", FORMS)
def test_every_order_and_form_runs_and_refuses_a_duplicate(gated, form):
    task = FORMS[form]
    first = gated.publish(task)
    gated.diary.wait_for("start")
    second = gated.publish(task)
    error = ended(second).result
    assert type(error) is TaskAlreadyRunning
    assert f"{task.name}[{first.id}] on " in error.holder
    gated.diary.open_gate()
    assert ended(first).result == "ran"
    assert len(gated.diary.events("start")) == 1
    assert ended(gated.publish(task)).result == "ran", "and then it can run again"


# The policies. In each test one run holds the lock, and then come a duplicate alone, one in a chain, one in a group and
# one in a chord.


def canvases(stage: Stage, task) -> dict:
    return {kind: published(kind, stage, task) for kind in KINDS}


def outcomes(results: dict) -> dict:
    """Wait until all has ended and tell how."""
    all_ended(list(results.values()))
    done = {name: result.result for name, result in results.items() if name != "group"}
    return done | {"group": [child.result for child in results["group"].results]}


@pytest.fixture
def holder(gated):
    """Start a run that holds the lock until the gate opens; return its result afterwards."""

    def start(task):
        result = gated.publish(task)
        gated.diary.wait_for("start")
        return result

    return start


def test_raise_ends_everything_at_once(gated, holder):
    first = holder(tasks.refuse)
    done = outcomes(canvases(gated, tasks.refuse))
    assert not first.ready(), "the duplicates did not wait for it"
    assert type(done["single"]) is type(done["chain"]) is TaskAlreadyRunning
    assert isinstance(done["chord"], ChordError)
    assert "TaskAlreadyRunning" in str(done["chord"])
    assert [type(one) for one in done["group"]] == [TaskAlreadyRunning, str]
    gated.diary.open_gate()
    assert ended(first).state == "SUCCESS"
    assert len(gated.diary.events("start")) == 1


def test_skip_ends_everything_at_once_with_its_result(gated, holder):
    first = holder(tasks.skip)
    done = outcomes(canvases(gated, tasks.skip))
    assert not first.ready()
    assert done == {"single": "skipped", "chain": "plain", "group": ["skipped", "plain"], "chord": 2}
    assert re.search(r"INFO.* is skipped, because the lock has been held for \d+\.\d s by \S*tasks\.skip\[", gated.log)
    gated.diary.open_gate()
    assert ended(first).state == "SUCCESS"
    assert len(gated.diary.events("start")) == 1


def test_a_callable_gives_the_result(gated, holder):
    first = holder(tasks.call)
    done = outcomes(canvases(gated, tasks.call))
    decided = ["decided", "TaskAlreadyRunning", tasks.call.name]
    assert done == {"single": decided, "chain": "plain", "group": [decided, "plain"], "chord": 2}
    gated.diary.open_gate()
    assert ended(first).state == "SUCCESS"


def all_ran(done: dict) -> None:
    assert done["single"].startswith("ran ")
    assert done["chain"] == "plain"
    assert done["group"][0].startswith("ran ")
    assert done["chord"] == 2


def test_wait_runs_one_after_the_other(gated, holder):
    first = holder(tasks.wait)
    results = canvases(gated, tasks.wait)
    wait_until(lambda: tasks.wait.lock_info(gated.name).waiting >= 1)
    gated.diary.open_gate()
    all_ran(outcomes(results))
    assert ended(first).state == "SUCCESS"
    assert len(gated.diary.events("start")) == 5


def test_wait_raises_after_its_time(gated, holder):
    holder(tasks.wait_shortly)
    assert type(ended(gated.publish(tasks.wait_shortly)).result) is TaskAlreadyRunning


def test_reschedule_runs_later_under_the_same_id_without_a_retry(gated, holder):
    """The task allows no retry at all."""
    first = holder(tasks.reschedule)
    results = canvases(gated, tasks.reschedule)
    wait_until(lambda: results["single"].state == "RETRY")
    gated.diary.open_gate()
    done = outcomes(results)
    all_ran(done)
    assert done["single"] == f"ran {results['single'].id}"
    assert ended(first).state == "SUCCESS"
    assert len(gated.diary.events("start")) == 5


@pytest.fixture
def watched(crew) -> Iterator[Stage]:
    """A stage whose worker sends events."""
    worker = crew.start("prefork", 0, "--task-events", name="events", concurrency=2)
    yield from on_stage(Stage([worker.wait_ready()], gated=True))


def kinds(heard, result):
    return [event["type"] for event in heard[result.id]]


def test_flower_is_told_that_a_rescheduled_task_waits_again(watched):
    """From its worker's events, where a task that is merely ignored runs for ever. The result stays the successor's."""
    with events() as heard:
        first = watched.publish(tasks.reschedule)
        watched.diary.wait_for("start")
        later = watched.publish(tasks.reschedule)
        wait_until(lambda: "task-retried" in kinds(heard, later), 30, lambda: f"a retry is told of; there are {heard}")
        watched.diary.open_gate()
        assert ended(later).result == f"ran {later.id}"
        wait_until(lambda: kinds(heard, later)[-2:] == ["task-started", "task-succeeded"], 30)
        assert ended(first).state == later.state == "SUCCESS"
        assert "task-retried" not in kinds(heard, first)


def test_reschedule_ends_with_its_limit(gated, holder):
    holder(tasks.reschedule_shortly)
    result = gated.publish(tasks.reschedule_shortly)
    assert type(ended(result).result) is TaskAlreadyRunning
    assert f"reschedule_shortly[{result.id}] is published again, to start in " in gated.log


def test_reschedule_ends_with_its_message(gated, holder):
    """By default, whatever the lock does."""
    holder(tasks.reschedule)
    result = gated.publish(tasks.reschedule, expires=1)
    assert ended(result).state == "REVOKED"
    assert f"reschedule[{result.id}] is published again, to start in " in gated.log


# Every way to end


def test_the_lock_is_free_before_the_next_of_a_chain_and_before_the_result_is_seen(stage):
    one = tasks.refuse.si(stage.name).set(queue=stage.queue)
    assert ended(chain(one, one, one).apply_async()).state == "SUCCESS"
    linked = stage.publish(tasks.refuse, link=one)
    assert ended(linked).state == "SUCCESS"
    stage.diary.wait_for("end", 5)
    wait_until(lambda: tasks.refuse.lock_info(stage.name) is None)  # the linked one's result nobody waits for
    for _ in range(10):
        assert ended(stage.publish(tasks.refuse)).state == "SUCCESS"


@pytest.mark.parametrize(
    ("how", "events"),
    [("return", 1), ("fail", 1), ("retry", 3), ("ignore", 1), ("reject", 1), ("replace", 1)],
)
def test_the_lock_is_released_however_a_task_ends(stage, how, events):
    """Its life of ten minutes is longer than any patience here."""
    stage.publish(tasks.refuse, how)
    stage.diary.wait_for("end", events)
    wait_until(lambda: tasks.refuse.lock_info(stage.name) is None)
    assert ended(stage.publish(tasks.refuse)).state == "SUCCESS"


def test_a_retried_run_competes_again(stage):
    result = stage.publish(tasks.refuse, "retry")
    assert ended(result).result == 2
    assert {event["id"] for event in stage.diary.events("start")} == {result.id}


def test_recursion_is_one_run(stage):
    """Directly and by apply(); the first has the id of the outer run, the second its own."""
    result = stage.publish(tasks.nested)
    direct, applied = ended(result).result
    assert direct == f"ran {result.id}"
    assert applied.startswith("ran ")


def test_the_errback_of_a_duplicate_is_called(gated, holder):
    holder(tasks.refuse)
    errback = tasks.note_error.s(name=gated.name).set(queue=gated.queue)
    gated.publish(tasks.refuse, link_error=errback)
    assert gated.diary.wait_for("errback")["error"] == "TaskAlreadyRunning"


def test_a_conflict_is_not_retried_by_autoretry(gated, holder):
    """The body is, and each of its runs competes again."""
    first = holder(tasks.autoretry)
    duplicate = ended(gated.publish(tasks.autoretry))
    assert type(duplicate.result) is TaskAlreadyRunning
    assert f"autoretry[{duplicate.id}] retry" not in gated.log
    gated.diary.open_gate()
    assert ended(first).result == 2


def test_a_duplicate_is_logged_at_info_without_a_traceback(gated, holder):
    first = holder(tasks.refuse)
    duplicate = ended(gated.publish(tasks.refuse))
    lines = wait_until(lambda: [line for line in gated.log.splitlines() if f"{duplicate.id}] raised" in line])
    (line,) = lines
    assert "INFO" in line
    assert f"raised expected: TaskAlreadyRunning('celery:{tasks.refuse.name}:{gated.name}'" in line
    assert f"{tasks.refuse.name}[{first.id}] on " in line
    after = gated.log[gated.log.index(line) + len(line) :]
    assert not after.lstrip("\n").startswith("Traceback")


# Whoever publishes


def test_a_producer_without_the_code_of_the_task_makes_the_same_key(gated, holder):
    first = holder(tasks.refuse)
    with app.connection_for_write() as connection:
        for kwargs in ({"name": gated.name}, {"name": gated.name, "how": "return"}):
            foreign = app.send_task(tasks.refuse.name, kwargs=kwargs, queue=gated.queue, connection=connection)
            assert f"[{first.id}]" in ended(foreign).result.holder


@only_prefork
def test_of_a_body_longer_than_its_period_beat_starts_one_at_a_time(gated, tmp_path):
    with beat(tmp_path, 0.2, tasks.skip, gated):
        first = gated.diary.wait_for("start", timeout=60)
        wait_until(
            lambda: len(re.findall(rf"{tasks.skip.name}\[.* by {tasks.skip.name}\[{first['id']}", gated.log)) >= 3
        )
        assert len(gated.diary.events("start")) == 1
        gated.diary.open_gate()
        gated.diary.wait_for("start", 3)


@only_prefork
def test_workers_of_two_versions_of_the_signature_have_one_lock(crew, gated):
    """The new code has one argument more, and would by itself come to another key."""
    new = Stage([crew.start("solo", name="new-code", concurrency=1, env={"REDISLOCK_TEST_NEW_CODE": "1"}).wait_ready()])
    gated.publish(tasks.deployed)
    gated.diary.wait_for("start")
    new.name = gated.name
    assert type(ended(new.publish(tasks.deployed)).result) is TaskAlreadyRunning
    gated.diary.open_gate()
    wait_until(lambda: tasks.deployed.lock_info(gated.name) is None)
    assert ended(new.publish(tasks.deployed)).state == "SUCCESS"


def test_the_key_of_the_message_wins_over_the_workers_own(gated, holder):
    holder(tasks.refuse)
    headers = {"single_instance_key": gated.name}
    other_arguments = app.send_task(tasks.refuse.name, ("another",), queue=gated.queue, headers=headers)
    assert type(ended(other_arguments).result) is TaskAlreadyRunning


def test_the_same_id_delivered_twice_is_neither_dropped_nor_run_beside_itself(gated, holder):
    first = holder(tasks.refuse)
    gated.publish(tasks.refuse, task_id=first.id)
    wait_until(lambda: f"{first.id}] is published again" in gated.log)
    assert len(gated.diary.events("start")) == 1
    gated.diary.open_gate()
    gated.diary.wait_for("end", 2)
    assert ended(first).state == "SUCCESS"


def test_the_same_id_published_twice_is_skipped_and_stores_nothing(gated, holder):
    first = holder(tasks.skip)
    gated.publish(tasks.skip, task_id=first.id)
    wait_until(lambda: f"{first.id}] is skipped" in gated.log)
    wait_until(lambda: f"[{first.id}] ignored" in gated.log, message="Celery has stored no result")
    assert app.AsyncResult(first.id).state in ("PENDING", "STARTED")
    gated.diary.open_gate()
    assert ended(first).result == f"ran {first.id}"
    assert len(gated.diary.events("start")) == 1


def test_a_crowd_on_few_keys(crew, pool):
    """Many messages of few keys at once, of every policy that may wait: nothing overlaps and every id ends."""
    stages = [(Stage(crew.of(pool)), task) for task in (tasks.refuse, tasks.reschedule, tasks.wait) for _ in range(2)]
    # A retry waits for longer than Celery may take to store RETRY, which would cover that the retry was refused
    # meanwhile.
    chance = random.Random(20261121)
    results = []
    for _ in range(45):
        stage, task = chance.choice(stages)
        results.append(stage.publish(task, chance.choice(["return", "return", "fail", "retry after a second"])))
    for result in results:
        ended(result, timeout=90)
    for stage, _ in stages:
        assert stage.diary.events("overlap") == []
        assert len(stage.diary.events("start")) == len(stage.diary.events("end")) > 0
