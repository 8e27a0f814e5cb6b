"""Tasks of Django's own framework, for the process of a test and for its workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from django.tasks import task

from django_redislock import held_locks, locked


@task
@locked("report:{customer}")
def report(customer: str) -> list[str]:
    return [held.name for held in held_locks()]


@task
@locked("report:{customer}", on_conflict="raise")
async def areport(customer: str) -> list[str]:
    return [held.name for held in held_locks()]


@task(takes_context=True)
@locked("report:{customer}", on_conflict="skip")
def report_in_context(context: Any, customer: str) -> list[Any]:
    return [context.attempt, *(held.name for held in held_locks())]


@task
@locked("export")
def export() -> None:
    """Write when it began and when it ended, for the test to see whether two overlapped."""
    with Path(os.environ["EXPORT_RUN_LOG"]).open("a") as run_log:
        run_log.write("begin\n")
        run_log.flush()
        time.sleep(0.1)
        run_log.write("end\n")
