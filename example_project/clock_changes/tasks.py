from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from celery import Task, shared_task
from django.core.cache import cache
from django.dispatch import receiver

from django_redislock.celery import single_instance
from django_redislock.signals import lock_conflict

from . import journal
from .reports import LIFE, cache_key, compute_report


# The lock is renewed while the task runs; a worker that is killed is in the way of the next one for 5 s at most.
@shared_task(bind=True, name="rebuild_report")
@single_instance(key="{year}", expire=5)
def rebuild_report(self: Task, year: int, step_minutes: int = 60) -> dict[str, Any]:
    """Compute the report of a year anew; a second rebuild of the same year ends at once as TaskAlreadyRunning.

    When the lock is lost on the way, somebody else may rebuild by now: then this one stops and stores nothing.
    """
    step, still_mine = timedelta(minutes=step_minutes), self.single_instance.raise_if_lost
    report = compute_report(year, "task", step=step, before_each_zone=still_mine)
    still_mine()
    cache.set(cache_key(year), report, LIFE)
    return {"pid": report.pid, "seconds": report.seconds, "transitions": len(report.transitions)}


# The service that sends bears two at once, whichever worker asks; the others wait in their worker, first come, first
# served. The key is empty, because all subscribers share the limit.
@shared_task(name="send_report")
@single_instance(key=[], limit=2, on_conflict="wait")
def send_report(subscriber: int) -> None:
    """Send the report to a subscriber; what would take the time is only pretended."""
    journal.note_sending("begun", subscriber)
    time.sleep(0.2)
    journal.note_sending("ended", subscriber)


@receiver(lock_conflict)
def count_refusal(name: str, **data: object) -> None:
    task, _, year = name.rpartition(":")
    if task == "celery:rebuild_report":
        journal.count(int(year), "task", "refused")
