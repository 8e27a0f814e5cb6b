"""Celery tasks of which one instance runs at a time.

Put ``@single_instance`` under ``@shared_task`` or ``@app.task``, or derive a task from `SingleInstanceTask`. The lock is taken
around the whole execution and released before callbacks run and before the result is stored, however the task ends.
"""

from __future__ import annotations

from . import receivers  # noqa: F401 - it connects them
from .execution import Execution
from .mark import single_instance
from .options import SingleInstanceOptions
from .publish import DuplicateResult
from .task import SingleInstanceMixin, SingleInstanceTask

__all__ = [
    "DuplicateResult",
    "Execution",
    "SingleInstanceMixin",
    "SingleInstanceOptions",
    "SingleInstanceTask",
    "single_instance",
]
