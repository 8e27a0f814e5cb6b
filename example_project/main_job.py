"""The main job: what the locks are for, done for real and measured.

It is imported when Django is set up and all processes run.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, NamedTuple

import psutil
from django.core.cache import cache

from clock_changes import journal
from clock_changes.reports import cache_key
from clock_changes.tasks import rebuild_report, send_report
from django_redislock import LockLost, TaskAlreadyRunning, lock
from django_redislock.core import LockInfo
from processes import Failed, Process, wait_until

YEAR = datetime.now(UTC).year


class Outcome(NamedTuple):
    """What a step came to: whether it held, what was expected, and lines that say what came."""

    held: bool
    expected: str
    lines: list[str]


def migrations(processes: list[Process]) -> Outcome:
    logs = [process.log.read_text() for process in processes]
    migrated, done = (sum(text in log for log in logs) for text in ("Applying ", "Done already"))
    ended = sum(process.status == 0 for process in processes)
    return Outcome(
        (migrated, done, ended) == (1, len(processes) - 1, len(processes)),
        f"migrated: 1, found it done: {len(processes) - 1}, succeeded: {len(processes)}",
        [f"migrated: {migrated}, found it done: {done}, succeeded: {ended}"],
    )


def clients_on_a_cold_report(addresses: list[tuple[str, int]]) -> Outcome:
    def ask(number: int) -> tuple[str, str, bytes, float]:
        started = time.perf_counter()
        connection = http.client.HTTPConnection(*addresses[number % len(addresses)], timeout=120)
        connection.request("GET", f"/{YEAR}.json")
        response = connection.getresponse()
        body = response.read()
        connection.close()
        if response.status != 200:
            raise Failed(f"the site answered {response.status} {response.reason}")
        return response.headers["X-Report"], response.headers["X-Process"], body, time.perf_counter() - started

    before = journal.runs(YEAR, "page")
    reports, processes, bodies, seconds = zip(*at_once(40, ask), strict=True)
    computed = journal.runs(YEAR, "page") - before
    roles, servers, values, report = Counter(reports), len(set(processes)), len(set(bodies)), json.loads(bodies[0])
    return Outcome(
        computed == roles["computed"] == values == 1 and servers == 2,
        "computed: 1, different values: 1, over 2 processes",
        [
            (
                f"computed: {computed}, waited: {roles['waited']}, came later: {roles['cached']}, "
                f"different values: {values}"
            ),
            f"computation {report['seconds']:.2f} s, slowest client {max(seconds):.2f} s, site processes: {servers}",
        ],
    )


def simultaneous_publishes() -> Outcome:
    before = journal.runs(YEAR, "task")
    tasks = at_once(20, lambda number: rebuild_report.delay(YEAR))
    results = {task.id: task.get(timeout=60, propagate=False) for task in tasks}
    computed = journal.runs(YEAR, "task") - before
    ran = [id for id, result in results.items() if isinstance(result, dict)]
    refused = [result for result in results.values() if isinstance(result, TaskAlreadyRunning)]
    named = [refusal for refusal in refused if f"rebuild_report[{ran[0] if ran else None}]" in refusal.holder]
    return Outcome(
        len(ran) == computed == 1 and len(named) == 19,
        "ran: 1, refused: 19, all naming the task that ran",
        [f"ran: {computed}, refused: {len(refused)}, naming the one that ran: {len(named)}"]
        + [f"each one names {refusal.holder}" for refusal in named[:1]],
    )


def limited_task(children: int) -> Outcome:
    for task in [send_report.delay(number) for number in range(20)]:
        task.get(timeout=60, propagate=False)
    return judge_limit(journal.sendings(), messages=20, limit=2, children=children)


def judge_limit(notes: list[tuple[str, int]], messages: int, limit: int, children: int) -> Outcome:
    """Tell from the notes of the runs whether each message ran once, never more than the limit at once, and in order.

    A worker gives the messages to its children in order, and each child asks for a slot by itself. So a message may be
    passed by those that the other children have at that moment, but by no more: who asks first is served first.
    """
    begun, ended = ([number for what, number in notes if what == wanted] for wanted in ("begun", "ended"))
    ran = sum(begun.count(number) == ended.count(number) == 1 for number in range(messages))
    most = max(accumulate(1 if what == "begun" else -1 for what, _ in notes), default=0)
    passed = max((sum(later > number for later in begun[:n]) for n, number in enumerate(begun)), default=0)
    in_order = passed < children
    return Outcome(
        (ran, len(begun), most) == (messages, messages, limit) and in_order,
        f"messages: {messages}, ran once: {messages}, most at once: {limit}, in order: yes",
        [
            f"messages: {messages}, ran once: {ran}, most at once: {most}, in order: {'yes' if in_order else 'no'}",
            f"{children} children ask, each by itself: no message was passed by more than {passed} later ones",
        ],
    )


def killed_worker(worker: int) -> Outcome:
    task = rebuild_report.delay(YEAR)
    holder = running_holder()
    if psutil.Process(holder.pid).ppid() != worker:
        raise Failed(f"the holder, process {holder.pid}, is no child of the worker, process {worker}")
    os.kill(holder.pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: rebuild_report.lock_info(YEAR) is None, 60, "the lock of the killed worker is free")
    seconds = time.monotonic() - killed
    first = task.get(timeout=60, propagate=False)
    following = rebuild_report.delay(YEAR).get(timeout=60, propagate=False)
    succeeded = isinstance(following, dict)
    return Outcome(
        seconds <= holder.expire + 2 and isinstance(first, Exception) and succeeded,
        f"free within its expiry of {holder.expire:g} s, and the next run succeeds",
        [
            f"lock free after {seconds:.1f} s (its expiry: {holder.expire:g} s), next run: "
            + ("succeeded" if succeeded else repr(following)),
            f"process {holder.pid} was killed; its task ended as {type(first).__name__}",
        ],
    )


def force_release() -> Outcome:
    task = rebuild_report.delay(YEAR, step_minutes=10)  # the more thorough, the longer
    holder = running_holder()
    released = lock(holder.name).reset(fence=holder.fence)  # as the admin's action does
    started = time.monotonic()
    result = task.get(timeout=60, propagate=False)
    seconds = time.monotonic() - started
    told = isinstance(result, LockLost) and result.record.fence == holder.fence
    return Outcome(
        released and told,
        "the holder is told (LockLost) and stops",
        [f"holder notified after {seconds:.1f} s, and stopped: {type(result).__name__}", f"“{result}”"],
    )


def beat_at_work() -> Outcome:
    following = YEAR + 1  # beat's year: nothing else here asks for it
    report = wait_until(lambda: cache.get(cache_key(following)), 60, f"beat has the report of {following} rebuilt")
    return Outcome(
        report.asked_by == "task",
        "a task computed it",
        [f"process {report.pid} rebuilt the report of {following} in {report.seconds:.2f} s"],
    )


def running_holder() -> LockInfo:
    """Return who runs the task, once it is in the middle of it."""

    def holder() -> LockInfo | None:
        info = rebuild_report.lock_info(YEAR)
        return info if info is not None and info.age > 0.3 else None

    return wait_until(holder, 60, "a worker runs the task")


def at_once(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Call the function in so many threads at the same time, each with a number, and return what they returned."""
    barrier, results, errors = threading.Barrier(count), [], []

    def call(number: int) -> None:
        barrier.wait()
        try:
            results.append(function(number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=[number], daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
