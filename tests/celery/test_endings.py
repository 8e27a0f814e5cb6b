"""What remains in Redis when the body of a task has ended: a row for each way to end."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import pytest
from celery import Task
from celery.exceptions import Ignore, Reject

from django_redislock.core import Lock, Semaphore, held_locks
from tests.support import counting

from .deliveries import deliver, take


class Row(NamedTuple):
    """A way to end, and what remains when the message was acknowledged early, and late."""

    ends_by: str
    marked: tuple[bool, bool]
    """Whether copies of the message are dropped from now on."""
    job_holder: tuple[str, str] = ("", "")
    """Who holds the lock of a job."""
    kept: bool = False
    """Whether nobody gets the lock for `keep_for` seconds, in all scopes but "queued"."""


ROWS = (
    Row("a return", (True, True), kept=True),
    Row("an error", (True, True), kept=True),
    Row("an error that rejects the message", (True, False), kept=True),
    Row("a retry", (True, True), ("message", "message")),
    Row("a retry with another key", (True, True)),
    Row("Ignore", (True, True)),
    Row("Reject", (False, False)),
    Row("Reject with requeue", (False, False), ("", "message")),
    Row("SystemExit", (False, False), ("", "message")),
)


def end(task, way):
    if way == "a return":
        return
    if way.startswith("an error"):
        raise ValueError(way)
    if way.startswith("a retry"):
        task.retry(args=(2,) if "another" in way else (1,), countdown=60)
    if way == "Ignore":
        raise Ignore
    if way.startswith("Reject"):
        raise Reject(way, requeue="requeue" in way)
    raise SystemExit


def message_options(row, late):
    options = {"acks_late": late}
    if "rejects" in row.ends_by:
        names = {"acks_on_failure", "acks_on_failure_or_timeout"} & set(dir(Task))  # the first one of Celery 5.7
        options |= dict.fromkeys(names, False)
    return options


SCOPES = [("run", None), ("run", 2), ("queued", None), ("queued+run", None), ("queued+run", 2), ("job", None)]
"""Each with a limit, where it may have one."""


@pytest.mark.parametrize(("scope", "limit"), SCOPES)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.ends_by)
def test_what_remains_after_a_body_has_ended(client, app, make, row, late, scope, limit):
    keep_for = {"keep_for": 60} if row.kept and scope != "queued" else {}
    bodies = []

    def body(self, a=1):
        bodies.append(1)
        end(self, row.ends_by)

    given = keep_for if limit is None else keep_for | {"limit": limit}
    task = make(body, scope=scope, key="{a}", task_options=message_options(row, late), **given)
    first = task.delay(1)
    (message,) = take(app)
    with suppress(SystemExit):
        deliver(app, message)

    holder = task.lock_info(1) if scope != "queued" else None
    if keep_for:
        assert holder.id.endswith(":kept")
    elif scope == "job" and row.job_holder[late]:
        assert (holder.id, holder.label) == (first.id, f"{task.name}[{first.id}]")
    elif "retry" not in row.ends_by:  # its message waits, with the lock of its scope
        assert holder is None
    for key in client.scan_iter("*:lock:*"):  # so that only the marker can stop a copy
        client.delete(key)
    with suppress(SystemExit):
        deliver(app, message, redelivered=True)
    assert len(bodies) == (1 if row.marked[late] else 2)


# A message that ends, or is published again, without a run


class Refusal(NamedTuple):
    """What `on_conflict` does with a message that does not get the lock of its run."""

    on_conflict: object
    waits_on: bool = False
    """Whether the message keeps the lock under which it waits; its copies are outdated or refused in any case."""


REFUSALS = (
    Refusal("raise"),
    Refusal("skip"),
    Refusal("wait"),
    Refusal("reschedule", waits_on=True),
    Refusal(lambda task, error: "refused"),
)


@contextmanager
def runs_that_hold(client, task, limit):
    """Hold the lock of the runs, or all its slots."""
    (lock, *_) = task._locks((1,), {})
    with ExitStack() as held:
        for _ in range(limit or 1):
            own = Semaphore(client, lock.name, limit) if limit else Lock(client, lock.name)
            held.enter_context(own)
        yield


@pytest.mark.parametrize(("scope", "limit"), [each for each in SCOPES if each[0] in ("run", "queued+run")])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: str(row.on_conflict)[:10])
def test_what_remains_of_a_message_that_is_refused(client, app, make, row, late, scope, limit):
    bodies = []
    options = {"on_conflict": row.on_conflict, "wait": 0.05, "limit": limit}
    options = {name: value for name, value in options.items() if value is not None}
    task = make(lambda self, a=1: bodies.append(a), scope=scope, key="{a}", task_options={"acks_late": late}, **options)
    first = task.delay(1)
    (message,) = take(app)
    with runs_that_hold(client, task, limit):
        deliver(app, message)
        assert bodies == []
        *_, place = task._locks((1,), {})
        if scope == "queued+run":
            holder = place.owner()
            assert (holder and holder.id) == (first.id if row.waits_on else None)
    deliver(app, message, redelivered=True)
    assert bodies == []
    for again in take(app):
        deliver(app, again)
    assert bodies == ([1] if row.waits_on else [])
    assert list(held_locks(client)) == []


@pytest.mark.parametrize(("scope", "limit"), SCOPES)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_message_costs_one_command_to_publish_two_to_run_and_one_to_confirm(client, app, make, late, scope, limit):
    given = {} if limit is None else {"limit": limit}
    task = make(scope=scope, key="{a}", task_options={"acks_late": late}, **given)
    for number in (1, 2):  # at the first time, the server may not know the scripts
        with counting(client) as published:
            task.delay(number)
        (message,) = take(app)
        with counting(client) as ran:
            deliver(app, message)
    assert (published["evalsha"], ran["evalsha"]) == (0 if scope == "run" else 1, 3 if late else 2)
