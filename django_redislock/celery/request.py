"""The request of a message in a worker's main process.

It alone knows that a hard time limit has ended a run, and how the arguments were serialized.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from celery.utils.imports import symbol_by_name

from .message import CONTENT_TYPE
from .receivers import end_from_outside


@lru_cache
def request_class(base: Any) -> Any:
    """Return the class of requests `base`, a class or its path, that passes the content type on, and lets a job end
    with its hard time limit."""

    class SingleInstanceRequest(symbol_by_name(base)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.request_dict[CONTENT_TYPE] = self.content_type

        def on_timeout(self, soft: bool, timeout: float) -> None:
            """Do as Celery does; then release what the child has left, or is about to leave, for the next delivery.

            The child cannot know whether it is killed by its time limit or with its worker: in both cases it ends by
            SystemExit, and its message comes again in the second one only.
            """
            super().on_timeout(soft, timeout)
            # Celery 5.6 has one setting for failures and time limits.
            if not soft and getattr(self.task, "acks_on_timeout", self.task.acks_on_failure_or_timeout):
                end_from_outside(self.task, self._context)

    return SingleInstanceRequest
