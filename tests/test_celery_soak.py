"""Workers whose children are killed at random: nothing overlaps, no lock is left, every id ends.

For a minute; for five with REDISLOCK_SOAK_SECONDS=300 and pytest's ``-o faulthandler_timeout=600``.
"""

from __future__ import annotations

import os
import random
import time

import psutil
import pytest
from celery import states
from celery.result import AsyncResult

from django_redislock.core import held_locks
from tests.celery_site import tasks
from tests.celery_site.harness import Stage, ended, workers
from tests.support import wait_until

pytestmark = pytest.mark.processes

SECONDS = float(os.environ.get("REDISLOCK_SOAK_SECONDS", "60"))
KEYS = 20
TASKS = [tasks.mortal, tasks.mortal_queued, tasks.mortal_job, tasks.late, tasks.late_queued, tasks.late_job]
"""Every scope that excludes, acknowledged early and late."""
BACKLOG = 30


def test_children_killed_at_random(server, client, tmp_path):
    chance = random.Random()
    with workers(server, tmp_path) as crew:
        crowd = [crew.start("prefork", number, concurrency=3) for number in range(2)]
        stages = [(Stage([worker.wait_ready() for worker in crowd]), TASKS[n % len(TASKS)]) for n in range(KEYS)]
        results: dict[str, AsyncResult] = {}
        open_ones: list[AsyncResult] = []
        killed = 0
        end, next_kill = time.monotonic() + SECONDS, 0.0
        while time.monotonic() < end:
            open_ones = [result for result in open_ones if result.state not in states.READY_STATES]
            if len(open_ones) < BACKLOG:
                stage, task = chance.choice(stages)
                result = stage.publish(task, "brief")
                if results.setdefault(result.id, result) is result:
                    open_ones.append(result)
            children = psutil.Process(chance.choice(crowd).pid).children()
            if children and time.monotonic() > next_kill:
                chance.choice(children).kill()
                killed += 1
                next_kill = time.monotonic() + chance.uniform(0.2, 1)
        for result in results.values():
            ended(result, timeout=90)
        wait_until(lambda: not list(held_locks(client)), 15, "no lock is left")
        starts, ends, overlaps = (
            [event for stage, _ in stages for event in stage.diary.events(name)] for name in ("start", "end", "overlap")
        )
        print(f"{SECONDS:.0f} s: {len(results)} ids, {len(starts)} starts, {len(ends)} ends, {killed} children killed")
        assert overlaps == []
        assert len(starts) > len(ends) > 0, "no run was cut off"
