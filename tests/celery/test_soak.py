"""Workers whose children are killed at random: nothing overlaps, no lock is left, every id ends, no message runs twice.

For some seconds; for five minutes each with REDISLOCK_SOAK_SECONDS=300 and pytest's ``-o faulthandler_timeout=600``.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psutil
import pytest
from celery import states
from celery.result import AsyncResult

from django_redislock import TaskAlreadyRunning
from django_redislock.core import held_locks
from tests.celery.test_copies import nothing_is_left, redelivering
from tests.support import wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import app
from tests.support.celery_site.harness import TaskQueue, ended, workers

pytestmark = pytest.mark.processes

SECONDS = float(os.environ.get("REDISLOCK_SOAK_SECONDS", "10"))
KEYS = 20
TASKS = [tasks.mortal, tasks.mortal_queued, tasks.mortal_job, tasks.late, tasks.late_queued, tasks.late_job]
"""Every scope that excludes, acknowledged early and late."""
TWO = [(tasks.two_mortal,), (tasks.of_group, tasks.of_group_too), (tasks.dying_two,)]
"""By key, of which two run at once: a task, a group of tasks, and a task that is acknowledged late."""
BACKLOG = 30
BRIEFLY: list[tuple[str, dict[str, float]]] = [("brief", {})] * 8
BRIEFLY += [("sleep", {"soft_time_limit": 1}), ("sleep", {"time_limit": 1}), ("deaf", {"time_limit": 1})]
"""How a body lasts, and which limit ends it."""


class Reaper:
    """Kills a child of these workers now and then."""

    def __init__(self, workers: Iterable[Any], pause: tuple[float, float]) -> None:
        self._workers = list(workers)
        self._pause = pause
        self._next = time.monotonic() + random.uniform(*pause)
        self.killed: list[int] = []

    def pass_by(self) -> None:
        """Kill one, if it is time; leave the processors to the workers for a moment."""
        time.sleep(0.02)
        if time.monotonic() < self._next:
            return
        children = psutil.Process(random.choice(self._workers).pid).children()
        if children:
            child = random.choice(children)
            with suppress(psutil.NoSuchProcess):  # its worker may have killed it since, at a time limit
                child.kill()
                self.killed.append(child.pid)
            self._next = time.monotonic() + random.uniform(*self._pause)


@pytest.mark.long
@pytest.mark.parametrize(("limit", "keys"), [(1, [(TASKS[n % len(TASKS)],) for n in range(KEYS)]), (2, TWO)])
def test_children_killed_at_random(server, client, tmp_path, limit, keys):
    with workers(server, tmp_path) as worker_pools:
        crowd = [worker_pools.start("prefork", number, concurrency=6) for number in range(2)]
        queues = [(TaskQueue([worker.wait_ready() for worker in crowd]), of_key) for of_key in keys]
        results: dict[str, AsyncResult] = {}
        open_ones: list[AsyncResult] = []
        reaper = Reaper(crowd, (0.1, 0.5))
        end = time.monotonic() + SECONDS / limit
        while time.monotonic() < end:
            open_ones = [result for result in open_ones if result.state not in states.READY_STATES]
            for _ in range(BACKLOG - len(open_ones)):
                task_queue, of_key = random.choice(queues)
                how, ends = random.choice(BRIEFLY)
                result = task_queue.publish(random.choice(of_key), how, **ends)
                if results.setdefault(result.id, result) is result:
                    open_ones.append(result)
            reaper.pass_by()
        for result in results.values():
            ended(result, timeout=90)
        wait_until(lambda: not list(held_locks(client)), 15, "no lock is left")
        starts, ends = (
            [event for task_queue, _ in queues for event in task_queue.run_log.events(name)]
            for name in ("start", "end")
        )
        print(
            f"{SECONDS:.0f} s: {len(results)} ids, {len(starts)} starts, {len(ends)} ends, {len(reaper.killed)} killed"
        )
        assert max(task_queue.run_log.at_once() for task_queue, _ in queues) == limit
        assert len(starts) > len(ends) > 0, "no run was cut off"


@pytest.mark.long
def test_redelivered_messages_run_once_or_again_when_a_kill_hit_the_run(server, client, tmp_path):
    """The broker gives out a copy of what waits or runs for more than a second.

    Every policy is there, acknowledged early and late.
    """
    with workers(server, tmp_path) as worker_pools, redelivering(worker_pools, "soak") as crowd:
        queues = [(TaskQueue(crowd.workers), task) for task in tasks.SOAKED for _ in range(2)]
        published: dict[str, AsyncResult] = {}
        open_ones: list[AsyncResult] = []
        reaper = Reaper(crowd.workers, (0.3, 0.9))
        end = time.monotonic() + SECONDS / 2
        while time.monotonic() < end:
            open_ones = [result for result in open_ones if result.state not in states.READY_STATES]
            for _ in range(2 * BACKLOG - len(open_ones)):
                task_queue, task = random.choice(queues)
                how, countdown = random.choice([("brief", None)] * 5 + [("brief", 2), ("brief", 4), ("slow", None)])
                result = task_queue.publish(task, how, countdown=countdown)
                if published.setdefault(result.id, result) is result:
                    open_ones.append(result)
            reaper.pass_by()
        for result in published.values():
            ended(result, timeout=90)
        nothing_is_left([task_queue for task_queue, _ in queues])
        wait_until(lambda: not list(held_locks(client)), 15, "no lock is left")
        events = [event for task_queue, _ in queues for event in task_queue.run_log.events()]
        # In the order of time: a killed child had also run tasks of other queues, and its last event was none of them.
        events.sort(key=lambda event: event["at"])
        found = [Found(id, events, reaper.killed) for id in published]
        print(f"{len(found)} ids, {len(reaper.killed)} killed: {Counter(one.verdict for one in found)}")
        wrong = [one for one in found if one.verdict == "wrong"]
        assert not wrong, "\n".join(map(repr, wrong))
        assert " was processed before; this copy of its message is dropped" in crowd.log, "there were copies"


class Found:
    """What became of one id."""

    def __init__(self, id: str, events: list[dict[str, Any]], killed: list[int]) -> None:
        self.id = id
        self.starts, self.ends = (
            [one for one in events if (one.get("id"), one["event"]) == (id, kind)] for kind in ("start", "end")
        )
        over = {one["run"] for one in self.ends}
        last = {one["pid"]: one for one in events}  # what each process noted last
        self.cut_off = [one for one in self.starts if one["run"] not in over and one["pid"] in killed]
        self.unconfirmed = [one for one in self.ends if one["pid"] in killed and last[one["pid"]] is one]
        result = app.AsyncResult(id)  # one that was asked before keeps what it has seen
        self.state, self.result = result.state, result.result

    @property
    def verdict(self) -> str:
        """Say in a word what became of it."""
        refused = (
            isinstance(self.result, TaskAlreadyRunning) or self.result == "skipped" or "decided" in str(self.result)
        )
        if self.state not in states.READY_STATES or len(self.ends) > 1 + len(self.unconfirmed):
            return "wrong"
        if self.cut_off or self.unconfirmed or type(self.result).__name__ == "WorkerLostError":
            return "hit"
        if refused:
            return "wrong" if self.starts else "refused"
        return "ran" if len(self.starts) == 1 and self.result == f"ran {self.id}" else "wrong"

    def __repr__(self) -> str:
        return f"{self.id}: {self.state} {self.result!r}, {self.starts}, {self.ends}"
