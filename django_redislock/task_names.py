"""The task in the name and the record of a lock. This module does not import Celery, because the admin needs none."""

from __future__ import annotations

import hashlib
import re

from .core import LockInfo
from .core.keys import OF_MESSAGE, OF_RUN, OF_WAITING, split_slot


def escaped(task: str) -> str:
    """Return the task as it is in the name of a lock: without the separator, so that names of two tasks never mix."""
    return task.replace("%", "%25").replace(":", "%3A")


def task_of(name: str) -> str | None:
    """Return the task in the name of a lock; None for a lock that is not of a task."""
    kind, _, rest = split_slot(name)[0].partition(":")
    task = rest.partition(":")[0]
    return task.replace("%3A", ":").replace("%25", "%") or None if kind in (OF_RUN, OF_WAITING, OF_MESSAGE) else None


def key_of(name: str) -> str:
    """Return the key in the name of a task's lock; it is empty where the task has one lock."""
    kind, _, rest = split_slot(name)[0].partition(":")
    key = rest.partition(":")[2]
    return key.rsplit(":", 3)[0] if kind == OF_MESSAGE else key


_plain = re.compile(r"[\w.~-]{1,150}", re.ASCII).fullmatch
"""Matches the ids of tasks that can be owner ids unchanged."""


def waiting_id(task_id: str) -> str:
    """Return the owner id under which a task's message holds a lock."""
    return task_id if _plain(task_id) else hashlib.sha256(task_id.encode()).hexdigest()


def is_waiting(info: LockInfo) -> bool:
    """Return whether a waiting message holds the task's lock: it waits in a queue, or for its retry, or was purged."""
    task_id = info.label.removeprefix(f"{task_of(info.name)}[").removesuffix("]")
    return task_id != info.label and info.id == waiting_id(task_id)
