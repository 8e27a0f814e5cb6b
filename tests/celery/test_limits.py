"""At most so many runs of a task for each key, and of a group of tasks: `limit` and `group`. With real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import DuplicateResult, SingleInstanceTask
from django_redislock.celery.execution_lock import AfterRelease, Delivery, ExecutionLock
from django_redislock.celery.key import lock_name
from django_redislock.core import Semaphore, held_locks
from django_redislock.core.keys import another_id, with_slot
from django_redislock.exceptions import LockBackendError
from django_redislock.task_names import key_of, task_of
from tests.support import BUSY, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app as workers_app
from tests.support.celery_site.harness import POOLS, TaskQueue, ended

LIFE = 2
"""Seconds that a slot of the mortal tasks lives without its holder."""


@pytest.fixture(params=["prefork"])
def pool(request) -> str:
    return request.param


@pytest.fixture
def task_queue(worker_pools, pool, no_lock_is_left) -> Iterator[TaskQueue]:
    task_queue = TaskQueue(worker_pools.of(pool))
    yield task_queue
    assert task_queue.run_log.at_once() <= 2


@pytest.fixture
def blocked(worker_pools, pool, no_lock_is_left) -> Iterator[TaskQueue]:
    task_queue = TaskQueue(worker_pools.of(pool), blocked=True)
    yield task_queue
    task_queue.run_log.let_bodies_end()
    assert task_queue.run_log.at_once() <= 2


def slots_of(client, name: str) -> list[tuple[int | None, int | None]]:
    return sorted((info.slot, info.limit) for info in held_locks(client) if info.name == name)


# Two at once


@pytest.mark.processes
@pytest.mark.parametrize("pool", POOLS, indirect=True)
def test_two_run_and_the_third_is_refused_until_one_has_ended(blocked, client):
    first, second = (blocked.publish(tasks.two) for _ in range(2))
    blocked.run_log.wait_for("start", 2)
    assert slots_of(client, f"celery:{tasks.two.name}:{blocked.name}") == [(1, 2), (2, 2)]
    if blocked.workers[0].pool != "solo":  # both of its workers are busy
        third = blocked.publish(tasks.two)
        assert type(ended(third).result) is TaskAlreadyRunning
        assert tasks.two.lock_info(blocked.name).label in [f"{tasks.two.name}[{each.id}]" for each in (first, second)]
    blocked.run_log.let_bodies_end()
    assert {ended(first).state, ended(second).state} == {"SUCCESS"}
    assert blocked.run_log.at_once() == 2
    assert ended(blocked.publish(tasks.two)).state == "SUCCESS"


@pytest.mark.processes
def test_those_that_wait_run_two_at_a_time_as_slots_become_free(blocked):
    results = [blocked.publish(tasks.two_wait) for _ in range(4)]
    blocked.run_log.wait_for("start", 2)
    wait_until(lambda: tasks.two_wait.lock_info(blocked.name).waiting == 2)
    assert len(blocked.run_log.events("start")) == 2
    blocked.run_log.let_bodies_end()
    assert {ended(each).result for each in results} == {f"ran {each.id}" for each in results}


@pytest.mark.processes
def test_of_queued_and_run_two_run_and_one_waits(blocked):
    first = blocked.publish(tasks.two_queued)
    blocked.run_log.wait_for("start")
    second = blocked.publish(tasks.two_queued)
    blocked.run_log.wait_for("start", 2)
    third = blocked.publish(tasks.two_queued)
    wait_until(lambda: f"{third.id}] is published again" in blocked.log)
    fourth = blocked.publish(tasks.two_queued)
    assert (type(fourth), fourth.id) == (DuplicateResult, third.id)
    blocked.run_log.let_bodies_end()
    assert {ended(each).state for each in (first, second, third)} == {"SUCCESS"}


@pytest.mark.processes
def test_the_tasks_of_a_group_share_their_slots(blocked, client):
    group = [tasks.of_group, tasks.of_group_too]
    first, second = (blocked.publish(task) for task in group)
    blocked.run_log.wait_for("start", 2)
    others = [blocked.publish(task) for task in group]
    wait_until(lambda: all(f"{each.id}] is published again" in blocked.log for each in others))
    assert slots_of(client, f"celery:crm:{blocked.name}") == [(1, 2), (2, 2)]
    blocked.run_log.let_bodies_end()
    assert {ended(each).result for each in (first, second, *others)} == {
        f"ran {each.id}" for each in (first, second, *others)
    }


@pytest.mark.processes
def test_a_callable_gives_the_limit_at_each_start(blocked, client):
    task, name = tasks.of_given_limit, f"celery:{tasks.of_given_limit.name}:{blocked.name}"
    running = []
    for number in (1, 2):
        running.append(blocked.publish(task))
        blocked.run_log.wait_for("start", number)
    assert type(ended(blocked.publish(task)).result) is TaskAlreadyRunning, "two is its limit"
    running.append(blocked.publish(task, "return", 4))
    blocked.run_log.wait_for("start", 3)
    assert slots_of(client, name) == [(1, 2), (2, 2), (3, 4)]
    for how, error in ("zero", ValueError), ("no limit", ZeroDivisionError):
        refused = ended(blocked.publish(task, how))
        assert type(refused.result) is error
        wait_until(lambda: not blocked_by_a_message(client, blocked))
    assert "the limit of" in str(ended(blocked.publish(task, "zero")).result)
    blocked.run_log.let_bodies_end()
    assert {ended(each).state for each in running} == {"SUCCESS"}
    assert len(blocked.run_log.events("start")) == 3
    blocked.run_log = type(blocked.run_log)("three ran, and one of them under a limit of four")


def blocked_by_a_message(client, task_queue: TaskQueue) -> bool:
    return any(f"celery-queue:{tasks.of_given_limit.name}" in info.name for info in held_locks(client))


# Each event of a message's life


@pytest.mark.processes
def test_the_slot_of_a_killed_child_is_free_after_its_expiry_and_the_other_one_stays(task_queue):
    other = task_queue.publish(tasks.two_mortal, "once killed")
    task_queue.run_log.wait_for("start")
    killed = task_queue.publish(tasks.two_mortal, "sleep")
    task_queue.kill_child(task_queue.run_log.wait_for("start", 2))
    third = task_queue.publish(tasks.two_mortal)
    assert ended(killed).state == "FAILURE"
    assert ended(third).state == "SUCCESS"
    assert other.state in ("PENDING", "STARTED")
    os.kill(task_queue.run_log.events("start")[0]["pid"], signal.SIGKILL)
    wait_until(lambda: tasks.two_mortal.lock_info(task_queue.name) is None, LIFE + BUSY)


@pytest.mark.processes
def test_a_revoked_message_that_waits_for_a_slot_does_not_run_and_the_next_one_does(blocked):
    running = [blocked.publish(tasks.two_mortal) for _ in range(2)]
    blocked.run_log.wait_for("start", 2)
    revoked = blocked.publish(tasks.two_mortal)
    wait_until(lambda: f"{revoked.id}] is published again" in blocked.log)
    workers_app.control.revoke(revoked.id)
    blocked.run_log.let_bodies_end()
    assert {ended(each).state for each in running} == {"SUCCESS"}
    assert ended(revoked).state == "REVOKED"
    assert ended(blocked.publish(tasks.two_mortal)).state == "SUCCESS"
    assert len(blocked.run_log.events("start")) == 3


@pytest.mark.parametrize("policy", ["raise", "run"])
def test_when_redis_does_not_answer_the_option_decides(make, settings, policy):
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1"}
    result = make(lambda self: "ran", key=[], limit=2, on_backend_error=policy).apply().result
    assert type(result) is LockBackendError if policy == "raise" else result == "ran"


def test_with_enabled_false_it_runs(make, settings):
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    assert make(lambda self: self.single_instance.lock.fence > 0, key=[], limit=2).apply().get() is True


@pytest.mark.parametrize("now", [lambda: 1, lambda: 1 // 0], ids=["lower", "raises"])
def test_unlock_frees_slots_above_a_lowered_limit_and_does_not_ask_for_it(make, client, now):
    """An operator unlocks when something is wrong: perhaps what the limit is made of."""
    limits = [lambda: 3]
    task = make(lambda self: None, key=[], limit=lambda: limits[-1]())
    runs = [Semaphore(client, lock_name(task.name, ""), 3, label="a run") for _ in range(3)]
    for each in runs:
        assert each.acquire(blocking=False)
    for each in runs[:2]:
        each.release()
    limits.append(now)
    assert task.lock_info().slot == 3
    assert task.unlock()
    assert task.lock_info() is None


def test_keep_for_keeps_the_slot_and_unlock_frees_all_slots(make, client):
    task = make(lambda self: "ran", key=[], limit=2, keep_for=60)
    assert [type(task.apply().result) for _ in range(3)] == [str, str, TaskAlreadyRunning]
    name = lock_name(task.name, "")
    assert slots_of(client, name) == [(1, 2), (2, 2)]
    assert task.unlock()
    assert slots_of(client, name) == []
    assert task.apply().result == "ran"


def test_direct_calls_take_slots_and_a_task_within_itself_takes_no_second_one(make, client):
    def body(self, depth=0):
        held.append(len(slots_of(client, lock_name(self.name, ""))))
        return self(depth + 1) if depth < 2 else None

    held: list[int] = []
    task = make(body, key=[], limit=2, lock_direct_calls=True)
    task()
    assert held == [1, 1, 1]
    slots = [Semaphore(client, lock_name(task.name, ""), 2) for _ in range(2)]
    with slots[0], slots[1], pytest.raises(TaskAlreadyRunning):
        task()


# The lock itself


@pytest.fixture
def slot(client):
    general = ExecutionLock(client, "celery", kind="celery", expire=60)

    def slot(message: str, limit: int = 2, version: int = 0) -> ExecutionLock:
        delivery = Delivery(message, f"{message}:0:x", True, version)
        return general.with_name("name", limit=limit, label=message, delivery=delivery)

    return slot


@pytest.mark.parametrize("lowered", [False, True])
def test_copies_of_a_message_are_found_in_every_slot_also_above_a_lowered_limit(slot, lowered):
    others = [slot(f"other {number}", 3) for number in (1, 2)]
    first, copy = slot("a", 3), slot("a", 2 if lowered else 3)
    for each in (*others, first):
        assert each.acquire(blocking=False)
    others[0].release()
    assert not copy.acquire(blocking=False)
    assert copy.retry_in > 50
    assert not copy.claim(30, "done")
    first.ending = AfterRelease("done", 30)
    first.release()
    assert not copy.acquire(blocking=False)
    assert copy.processed


def test_a_copy_that_waits_for_a_slot_learns_that_its_message_was_processed_and_leaves_the_queue(slot, client):
    holders = [slot(f"other {number}", 2) for number in (1, 2)]
    for each in holders:
        assert each.acquire(blocking=False)
    copy, late = slot("a"), slot("a")
    copy.mark_processed(30)
    assert not late.acquire(timeout=30), "it is refused at once"
    assert late.processed
    assert not client.exists(late._keys.queue)


@pytest.mark.slow
def test_a_slot_that_no_replica_confirmed_is_given_back(client):
    general = ExecutionLock(client, "celery", kind="celery", expire=60, min_replicas=2)
    delivery = Delivery("a", "a:0:x", known=True)
    with pytest.raises(LockBackendError, match="of 2 replicas"):
        general.with_name("name", limit=2, delivery=delivery).acquire(blocking=False)
    wait_until(lambda: slots_of(client, "name") == [])  # a thread gives it back


def test_the_holder_that_is_named_is_a_copy_or_the_same_task_or_the_oldest(slot):
    first, second = slot("first"), slot("second")
    assert first.acquire(blocking=False)
    wait_until(lambda: first.owner().age > 0.01)
    assert second.acquire(blocking=False)
    assert slot("third").owner().label == "first"
    assert slot("second").owner().label == "second"


def test_another_id_has_the_same_message_in_front_and_the_same_limit_behind():
    assert another_id("task:0:x:abc/3").startswith("task:0:x:")
    assert another_id("task:0:x:abc/3").endswith("/3")
    assert another_id("task:0:x:abc").rpartition(":")[0] == "task:0:x"
    assert not {":", "/"} & set(another_id("abc"))


def test_the_task_and_the_key_are_found_in_the_listed_name_of_a_slot():
    for key in ("", "x:y"):
        listed = with_slot(lock_name("shop.tasks.sync", key), 2)
        assert (task_of(listed), key_of(listed)) == ("shop.tasks.sync", key)


# Bad options


@pytest.mark.parametrize(("limit", "error"), [(0, ValueError), (-1, ValueError), (10**9, ValueError)])
@pytest.mark.parametrize("given", [False, True], ids=["a number", "from a callable"])
def test_a_limit_that_no_semaphore_has_is_refused(make, limit, error, given):
    if given:
        with pytest.raises(error, match=r"limit of .* must be from 1 to 100"):
            make(lambda self: None, key=[], limit=lambda: limit).apply(throw=True)
    else:
        with pytest.raises(error, match="limit must be from 1 to 100"):
            make(lambda self: None, limit=limit)


@pytest.mark.parametrize(
    ("option", "error", "said"),
    [
        *(({"limit": limit}, TypeError, "limit must be a whole number") for limit in (1.5, True, "3", [2])),
        *(({"group": group}, TypeError, "group must") for group in (1, b"crm")),
        ({"group": ""}, ValueError, "group must"),
    ],
)
def test_what_is_no_number_or_no_name_is_refused(make, option, error, said):
    with pytest.raises(error, match=said):
        make(lambda self: None, **option)


@pytest.mark.parametrize("option", [{"limit": 2}, {"group": "crm"}])
@pytest.mark.parametrize("scope", ["queued", "job"])
def test_scopes_whose_lock_begins_with_publishing_take_no_limit_and_no_group(make, option, scope, app, settings):
    (name,) = option
    with pytest.raises(ValueError, match=rf"{name} is about runs, so it needs scope='run' or .*, not '{scope}'"):
        make(lambda self: None, scope=scope, **option)

    @app.task(name=f"base of {name} {scope}", base=SingleInstanceTask, single_instance=option, lazy=False)
    def base(a): ...

    with pytest.raises(ValueError, match="is about runs"):
        type("Derived", (type(base),), {"single_instance": {"scope": scope}})
    settings.DJANGO_REDISLOCK = {"CELERY": {"SCOPE": scope}}
    with pytest.raises(ValueError, match="is about runs"):
        base.apply(("a",), throw=True)
