"""What a worker's main process tells Redis of a message whose run it knows from outside only, or that has none.

It alone knows that a hard time limit has ended a run, that a message cannot be decoded, and how the arguments were
serialized.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from celery.utils.imports import symbol_by_name
from kombu.exceptions import DecodeError

from .. import conf
from ..core import events
from ..core.clock import monotonic
from ..exceptions import LockBackendError
from ..task_names import waiting_id
from . import options as options_of
from .execution_lock import ExecutionLock
from .key import waiting_name
from .message import CONTENT_TYPE, KEY_HEADER, NOT_LEFT, SCOPE_HEADER, header
from .publishing import PublishingMixin

SILENT_FOR = 10.0
"""Seconds for which Redis is not asked here after it kept a call waiting. A worker's main process receives nothing
meanwhile, and messages often expire or are revoked by the hundred."""
SILENCE = 1.0
"""Seconds after which a call that failed counts as kept waiting; a refused connection costs nothing."""
_silent_until = 0.0


def tell(call: Callable[[], object], otherwise: str, whom: str) -> bool:
    """Tell Redis something, and return whether it was asked; log `otherwise`, with whom it is about and why, when it
    does not answer."""
    global _silent_until
    began = monotonic()
    if began < _silent_until:
        events.log.warning(otherwise, whom, "Redis was silent a moment ago, so it was not asked")
        return False
    try:
        call()
    except LockBackendError as error:
        if monotonic() - began > SILENCE:
            _silent_until = monotonic() + SILENT_FOR
        events.log.warning(otherwise, whom, error)
    return True


def release(lock: ExecutionLock | None) -> None:
    """Release the lock of a message that will not start."""
    if lock is not None and not tell(lock.release_given_id, NOT_LEFT, lock.label):
        lock.release_later()


def lock_by_headers(task: object, id: object, key: object, scope: object) -> ExecutionLock | None:
    """Return the lock that a message holds by its headers, without the code of its task; None if it holds none."""
    if not (isinstance(task, str) and isinstance(id, str) and isinstance(key, str) and isinstance(scope, str)):
        return None
    name = waiting_name(task, key, scope)
    return options_of.complete({}, conf.get()).lock.with_name(name, label=f"{task}[{id}]", id=waiting_id(id))


def release_discarded(message: Any) -> None:
    """Release the lock of a message that its worker discards before there is a request."""
    headers = message.headers or {}
    names = ("task", "id", KEY_HEADER, SCOPE_HEADER)
    release(lock_by_headers(*map(headers.get, names)))


def noting_decode_errors(strategy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a worker's strategy for a task that also releases the lock of a message that cannot be decoded.

    Celery acknowledges such a message and sends no signal: amid a deploy, a worker lacked a class in a pickle, and the
    message that nobody had any more held its lock for an hour.
    """

    def handle(message: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return strategy(message, *args, **kwargs)
        except DecodeError:
            release_discarded(message)
            raise

    return handle


def lock_of_run(task: PublishingMixin, request: Any) -> ExecutionLock:
    """Return the lock of a run in another process. Raises TypeError when its arguments have no key."""
    key = task._key_of(request.args, request.kwargs, request)
    return task._running_lock(key, task._options, request, (), {})


def end_from_outside(task: PublishingMixin, request: Any) -> None:
    """Let no lock remain of a message whose run is ended from outside of its process, and which does not come again.

    The child may leave the lock of a job to its message before or after this: it finds the marker, or is released.
    """
    if task._options.scope == "job" and task.acks_late:
        with suppress(TypeError):  # without a key it had no lock
            lock = lock_of_run(task, request)
            tell(
                partial(lock.mark_processed, task._marker_expire),
                "Could not record that %s was terminated, so its lock may stay until it expires: %s",
                request.id,
            )
            release(lock_of_job(task, task._key_of(request.args, request.kwargs, request), request.id))
    release(task._lock_of_message(request.id, header(request, KEY_HEADER), request))


def lock_of_job(task: PublishingMixin, key: str, id: str) -> ExecutionLock:
    """Return the lock that a job leaves to its message: of one that was published without us, or in another scope, the
    lock of the message itself is none, or another one."""
    return task._options.lock.with_name(task._name_of_run(key), label=f"{task.name}[{id}]", id=waiting_id(id))


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
