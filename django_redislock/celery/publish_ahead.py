"""A message that is made while Redis answers: the acquisition is sent, Celery makes the message, the answer is read.

That saves one round trip of two. When the lock is not acquired, an exception leaves Celery's functions, so this is done
only where they are Celery's own: a tracer that wraps them, as Sentry does, would record a failure. It does not reach a
producer of kombu, which would close its connection to the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FunctionType
from typing import Any

from celery import Celery
from celery.app import base as app_module, task as task_module

from .execution_lock import ExecutionLock


class NotPublished(BaseException):
    """The lock was not acquired, so the message is not published."""


class Gate:
    """Stands for the producer from Celery's pool, and opens when the lock is acquired.

    Celery asks it for its connection when the message is made, before the result backend and the receivers of signals
    are notified. Only then it takes a producer: one that waited for Redis would be missed by other threads.
    """

    acquired: bool | None = None
    """Whether the lock was acquired; None: there is no answer."""

    def __init__(self, pool: Any, answer: Callable[[], bool | None], until_published: ExitStack) -> None:
        self._pool = pool
        self._answer: Callable[[], bool | None] | None = answer
        self._until_published = until_published
        self._producer: Any = None

    def wait(self) -> None:
        """Wait for the answer, once."""
        answer, self._answer = self._answer, None
        if answer is not None:
            self.acquired = answer()

    def __getattr__(self, name: str) -> Any:
        if self._producer is None:
            self.wait()
            if not self.acquired:
                raise NotPublished
            self._producer = self._until_published.enter_context(self._pool.acquire(block=True))
        return getattr(self._producer, name)


def is_celerys_own(app: Celery, apply_async: Any) -> bool:
    """Return whether the functions that publish a task are Celery's own: neither wrapped nor overridden."""
    methods = (apply_async, task_module), (app.send_task, app_module)
    for method, module in methods:
        function = getattr(method, "__func__", None)
        if type(function) is not FunctionType or function.__globals__ is not vars(module):
            return False
    return True


def publish_ahead(app: Celery, lock: ExecutionLock, publish: Callable[..., Any]) -> tuple[Any, bool | None]:
    """Take the lock and publish. Return the result, or None, and whether the lock was acquired, or None.

    After any error but LockBackendError the lock may be held, because the acquisition was sent.
    """
    answer, result = lock.take_ahead(), None
    if answer is None:
        return None, None
    with ExitStack() as until_published:
        gate = Gate(app.producer_pool, answer, until_published)
        try:
            with suppress(NotPublished):
                result = publish(producer=gate)
        finally:
            gate.wait()
    return result, gate.acquired
