"""What remains in Redis when the body of a task has ended: the marker of its message, and who holds its lock then."""

from __future__ import annotations

from typing import Literal, NamedTuple

from celery.exceptions import Ignore, Reject, Retry


class Remains(NamedTuple):
    """What an execution leaves behind."""

    marker: Literal["keep", "done", "ending"]
    """What is told of its message (marker.lua): "ending" until it is acknowledged, "keep" if a copy of it may run."""
    holder: Literal["", "message", "nobody"]
    """Who holds the lock from now on: in a job the message of its retry or its redelivery, with `keep_for` nobody for
    so long; "": the lock is released."""


REMAINS = {
    # How the body ended: with a message that is acknowledged early, and late
    "returned": (Remains("done", "nobody"), Remains("ending", "nobody")),
    "failed": (Remains("done", "nobody"), Remains("ending", "nobody")),
    "retried": (Remains("done", "message"), Remains("ending", "message")),
    "ignored": (Remains("done", ""), Remains("ending", "")),
    # A queue for dead letters may bring the message back, and then it must run.
    "rejected": (Remains("keep", ""), Remains("keep", "")),
    "failed and rejected": (Remains("keep", "nobody"), Remains("keep", "nobody")),
    # By Reject with requeue, or as the process ends: then the message comes again if it was not acknowledged.
    "unended": (Remains("keep", ""), Remains("keep", "message")),
}


def outcome_of(error: BaseException | None, rejected: bool) -> str:
    """Return how a body ended with this error, or without one; `rejected`: the broker is told that its message was not
    processed."""
    if is_requeued(error) or (error is not None and not isinstance(error, Exception)):
        return "unended"
    if isinstance(error, Retry):
        return "retried"
    if isinstance(error, Ignore):
        return "ignored"
    if isinstance(error, Reject):
        return "rejected"
    if error is None:
        return "returned"
    return "failed and rejected" if rejected else "failed"


def is_requeued(error: object) -> bool:
    """Return whether the broker is asked to deliver the message again."""
    return isinstance(error, Reject) and bool(getattr(error, "requeue", False))
