"""Refused messages that are parked: who releases the lock publishes the first of them at once. With real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app as workers_app
from tests.support.celery_site.harness import TaskQueue, ended

pytestmark = pytest.mark.processes


@pytest.fixture
def blocked(worker_pools, no_lock_is_left) -> Iterator[TaskQueue]:
    task_queue = TaskQueue(worker_pools.of("prefork"), blocked=True)
    yield task_queue
    task_queue.run_log.let_bodies_end()


def parked(task_queue, task, **options):
    result = task_queue.publish(task, **options)
    wait_until(lambda: f"{result.id}] is published again" in task_queue.log)
    return result


@pytest.mark.parametrize("task", [tasks.parked, tasks.parked_late, tasks.parked_queued], ids=lambda task: task.name)
def test_a_parked_message_starts_when_the_lock_is_free(blocked, client, task):
    first = blocked.publish(task)
    blocked.run_log.wait_for("start")
    second = parked(blocked, task)
    blocked.run_log.let_bodies_end()
    assert [ended(each).result for each in (first, second)] == [f"ran {each.id}" for each in (first, second)]
    assert len(blocked.run_log.events("start")) == 2
    wait_until(lambda: client.keys("*:parked:*") == [])


def test_each_release_wakes_the_next_one_in_the_order_of_the_conflicts(blocked):
    first = blocked.publish(tasks.parked)
    blocked.run_log.wait_for("start")
    others = [parked(blocked, tasks.parked) for _ in range(4)]
    blocked.run_log.let_bodies_end()
    assert {ended(each).state for each in (first, *others)} == {"SUCCESS"}
    assert [each["id"] for each in blocked.run_log.events("start")] == [each.id for each in (first, *others)]


def test_a_message_of_another_task_of_the_group_is_woken(blocked):
    first = blocked.publish(tasks.parked_group)
    blocked.run_log.wait_for("start")
    others = [parked(blocked, tasks.parked_group_too), parked(blocked, tasks.parked_group)]
    blocked.run_log.let_bodies_end()
    assert {ended(each).state for each in (first, *others)} == {"SUCCESS"}


def test_a_revoked_message_that_is_woken_wakes_the_next_one(blocked):
    first = blocked.publish(tasks.parked)
    blocked.run_log.wait_for("start")
    revoked, last = parked(blocked, tasks.parked), parked(blocked, tasks.parked)
    workers_app.control.revoke(revoked.id)
    wait_until(lambda: f"{revoked.id}" in blocked.log.partition("revoked")[2])
    blocked.run_log.let_bodies_end()
    assert [ended(each).state for each in (first, revoked, last)] == ["SUCCESS", "REVOKED", "SUCCESS"]


def test_a_message_whose_holder_was_killed_starts_by_its_own_copy(blocked):
    blocked.publish(tasks.parked_briefly)
    run = blocked.run_log.wait_for("start")
    others = [parked(blocked, tasks.parked_briefly) for _ in range(2)]
    blocked.kill_child(run[0] if isinstance(run, list) else run)
    blocked.run_log.let_bodies_end()
    assert {ended(each).state for each in others} == {"SUCCESS"}


def test_a_large_message_is_not_parked(blocked, client):
    first = blocked.publish(tasks.parked_briefly)
    blocked.run_log.wait_for("start")
    second = parked(blocked, tasks.parked_briefly, headers={"large": "x" * 70_000})
    assert client.keys("*:parked:*") == []
    blocked.run_log.let_bodies_end()
    assert {ended(each).state for each in (first, second)} == {"SUCCESS"}
