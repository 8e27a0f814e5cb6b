from __future__ import annotations

import os
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from celery.result import AsyncResult
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from django_redislock import get_client
from django_redislock.core import held_locks
from django_redislock.exceptions import TaskAlreadyRunning

from . import journal
from .reports import YEARS, Report, get_report
from .tasks import rebuild_report
from .transitions import zone_names

MOST_LOCKS = 10
"""Held locks on the card; the admin has all of them."""
STEP_MINUTES = 5
"""A rebuild is this thorough: it takes half a minute, so that one can look at its lock in the admin and release it."""
MONTHS = [datetime(2000, month, 1, tzinfo=UTC) for month in range(1, 13)]


@require_safe
def this_year(request: HttpRequest) -> HttpResponse:
    return redirect("report", datetime.now(UTC).year)


@require_safe
@never_cache
def report_page(request: HttpRequest, year: int) -> HttpResponse:
    started = time.perf_counter()
    report, role = get_report(check_year(year))
    seconds = time.perf_counter() - started
    query = request.GET.get("zone", "").strip()
    zones = [zone for zone in zone_names() if query.casefold().replace(" ", "_") in zone.casefold()]
    changing = {transition.zone for transition in report.transitions}
    shown = set(zones)
    locks = sorted(held_locks(get_client()), key=lambda lock: -lock.age)
    more_locks = max(0, len(locks) - MOST_LOCKS)
    rebuilds = [state_of(asked) for asked in asked_lately(request, year)]
    context = {
        "report": report,
        "role": role,
        "seconds": seconds,
        "milliseconds": 1000 * seconds,
        "finished_at": datetime.fromtimestamp(report.finished_at, UTC),
        "years": [y for y in range(year - 2, year + 3) if y in YEARS],
        "query": query,
        "transitions": [transition for transition in report.transitions if transition.zone in shown],
        "unchanging": [zone for zone in zones if zone not in changing],
        "changing_count": len(changing),
        "zone_count": len(zone_names()),
        "days": days_of(report),
        "months": MONTHS,
        "locks": locks[:MOST_LOCKS],
        "more_locks": more_locks,
        "journal": journal.lines(),
        "rebuilds": rebuilds,
        "work_goes_on": any(rebuild["state"] in ("PENDING", "STARTED") for rebuild in rebuilds),
    }
    return render(request, "clock_changes/report.html", context)


@require_safe
@never_cache
def report_json(request: HttpRequest, year: int) -> HttpResponse:
    """Answer with the report as it lies in the cache; headers tell what this request did for it."""
    report, role = get_report(check_year(year))
    body = {
        "year": report.year,
        "process": report.pid,
        "seconds": report.seconds,
        "transitions": [transition._asdict() for transition in report.transitions],
    }
    return JsonResponse(body, headers={"X-Report": role, "X-Process": str(os.getpid())})


@require_safe
@never_cache
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer Prometheus with the metrics of this process; a site that is no demo would not show them to everybody."""
    return HttpResponse(generate_latest(), content_type=CONTENT_TYPE_LATEST)


@require_POST
def rebuild(request: HttpRequest, year: int) -> HttpResponse:
    asked = {"id": rebuild_report.delay(check_year(year), step_minutes=STEP_MINUTES).id, "at": time.time()}
    request.session[f"rebuilds {year}"] = [asked, *asked_lately(request, year)][:4]
    return redirect("report", year)


def asked_lately(request: HttpRequest, year: int) -> list[dict[str, Any]]:
    """Return the rebuilds that this visitor asked for in the last ten minutes."""
    return [asked for asked in request.session.get(f"rebuilds {year}", []) if time.time() - asked["at"] < 600]


def state_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what became of a task: its result is a dict or, of a refused or failed one, the exception."""
    task = AsyncResult(asked["id"])
    refused = isinstance(task.result, TaskAlreadyRunning)
    return {"id": asked["id"], "state": task.state, "result": task.result, "refused": refused}


def check_year(year: int) -> int:
    if year not in YEARS:
        raise Http404(f"There are reports from {YEARS[0]} to {YEARS[-1]}.")
    return year


def days_of(report: Report) -> list[dict[str, Any]]:
    """Return the days with transitions, for the strip: where in the year (%), how many zones, which way."""
    days = Counter((t.instant.date(), t.shift > 0) for t in report.transitions if t.shift)
    most = max(days.values(), default=1)
    return [
        {
            "date": day,
            "zones": zones,
            "forward": forward,
            "left": 100 * (day.timetuple().tm_yday - 0.5) / 366,
            "height": 12 + 88 * zones / most,
        }
        for (day, forward), zones in sorted(days.items())
    ]
