"""Reports in the cache: computed once, whoever asks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from django.core.cache import cache

from . import journal
from .transitions import Transition, find_all_transitions

YEARS = range(1970, 2101)
LIFE = 24 * 60 * 60


@dataclass(frozen=True)
class Report:
    """The transitions of a year, and where they come from."""

    year: int
    transitions: list[Transition]
    asked_by: str
    pid: int
    seconds: float
    finished_at: float


def get_report(year: int) -> tuple[Report, str]:
    """Return the report, and what this call did for it: "computed" it, "waited" for it, or had it "cached"."""
    computed = []

    def compute() -> Report:
        computed.append(True)
        return compute_report(year, "page")

    started_at = time.time()
    report = cache.get_or_set(cache_key(year), compute, LIFE)
    if computed:
        return report, "computed"
    if report.finished_at < started_at:
        return report, "cached"
    journal.count_waited(year, "page", time.time() - started_at)
    return report, "waited"


def cache_key(year: int) -> str:
    return f"report:{year}"


def compute_report(year: int, asked_by: str, **options: Any) -> Report:
    """Compute the report of a year; see `find_all_transitions` for the options."""
    journal.count(year, asked_by, "begun")  # first of all: a run that is killed was one too
    started = time.perf_counter()
    transitions = find_all_transitions(year, **options)
    report = Report(year, transitions, asked_by, os.getpid(), time.perf_counter() - started, time.time())
    journal.count_finished(year, asked_by, report.pid, report.seconds)
    return report
