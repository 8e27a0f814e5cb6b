"""Celery tasks of which one instance runs at a time.

Put ``@single_instance`` under ``@shared_task`` or ``@app.task``, or derive a task from `SingleInstanceTask`. The lock
is taken around the whole execution and released before callbacks run and before the result is stored, however the task
ends.
"""

from __future__ import annotations

import celery

if celery.VERSION < (5, 4):
    raise ImportError(
        f"django_redislock.celery needs Celery 5.4 or newer, and {celery.__version__} is installed: "
        "pip install -U 'django-redislock[celery]'."
    )

from . import receivers  # noqa: F401 - it connects them
from .decorator import single_instance
from .execution_lock import Execution
from .message import DuplicateResult
from .options import SingleInstanceOptions
from .running import SingleInstanceMixin, SingleInstanceTask

__all__ = [
    "DuplicateResult",
    "Execution",
    "SingleInstanceMixin",
    "SingleInstanceOptions",
    "SingleInstanceTask",
    "single_instance",
]
