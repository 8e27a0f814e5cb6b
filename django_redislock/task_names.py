"""What the name and the record of a lock say of its task. Without Celery: who looks at locks may not have it."""

from __future__ import annotations

from .core import LockInfo
from .core.handover import waiting_id

KINDS = ("celery", "celery-queue", "celery-message")
"""What the names of the locks of tasks begin with: of runs and jobs, of what waits, of the runs of one message."""


def escaped(task: str) -> str:
    """Return the task as the name of a lock has it, so that no task's key reads as a part of another's name."""
    return task.replace("%", "%25").replace(":", "%3A")


def task_of(name: str) -> str | None:
    """Return the task that the name of a lock tells of; None for the lock of something else."""
    kind, _, rest = name.partition(":")
    task = rest.partition(":")[0]
    return task.replace("%3A", ":").replace("%25", "%") or None if kind in KINDS else None


def key_of(name: str) -> str:
    """Return the key in the name of a task's lock; it is empty where the task has one lock."""
    return name.partition(":")[2].partition(":")[2]


def is_waiting(info: LockInfo) -> bool:
    """Tell whether the lock of a task is that of a message which waits: in a queue, for its retry, or for nobody any more."""
    task_id = info.label.removeprefix(f"{task_of(info.name)}[").removesuffix("]")
    return task_id != info.label and info.id == waiting_id(task_id)
