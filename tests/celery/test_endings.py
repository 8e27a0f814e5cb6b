"""What remains in Redis when the body of a task has ended: a row for each way to end."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import pytest
from celery import Task
from celery.exceptions import Ignore, Reject

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


@pytest.mark.parametrize("scope", ["run", "queued", "queued+run", "job"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.ends_by)
def test_what_remains_after_a_body_has_ended(client, app, make, row, late, scope):
    keep_for = {"keep_for": 60} if row.kept and scope != "queued" else {}
    bodies = []

    def body(self, a=1):
        bodies.append(1)
        end(self, row.ends_by)

    task = make(body, scope=scope, key="{a}", task_options=message_options(row, late), **keep_for)
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
