"""What a worker learns outside of a run: receivers of Celery's signals, and the requests of the worker's main process.

They release or mark the lock of a message that was revoked, was lost, or has ended. The main process alone knows that a
hard time limit has ended a run, and how the arguments were serialized.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from celery import signals, states
from celery.exceptions import Reject, Retry, WorkerLostError
from celery.utils.imports import symbol_by_name
from kombu.exceptions import DecodeError

from .. import conf
from ..core import events
from ..core.clock import monotonic
from ..exceptions import LockBackendError
from ..task_names import waiting_id
from . import options as options_of
from .ending import is_requeued
from .execution_lock import ExecutionLock, confirm_published
from .key import waiting_name
from .message import CONTENT_TYPE, KEY_HEADER, NOT_LEFT, SCOPE_HEADER, header
from .publishing import PublishingMixin
from .running import SingleInstanceMixin

SILENT_FOR = 10.0
"""Seconds for which Redis is not asked here after it kept a call waiting. A worker's main process receives nothing
meanwhile, and messages often expire or are revoked by the hundred."""
SILENCE = 1.0
"""Seconds after which a call that failed counts as kept waiting; a refused connection costs nothing."""
_silent_until = 0.0


def _tell(call: Callable[[], object], otherwise: str, whom: str) -> bool:
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


def _release(lock: ExecutionLock | None) -> None:
    """Release the lock of a message that will not start."""
    if lock is not None and not _tell(lock.release_given_id, NOT_LEFT, lock.label):
        lock.release_later()


@signals.worker_process_shutdown.connect
def _on_child_exit(**kwargs: Any) -> None:
    """Confirm the messages that a child of a worker has published: it ends without Python's exit."""
    confirm_published()


@signals.task_revoked.connect
def _on_task_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **kwargs: Any) -> None:
    """Release the lock of a message that was revoked or expired before its start; a terminated message is not delivered
    again."""
    if isinstance(sender, SingleInstanceMixin) and terminated:
        end_from_outside(sender, request)
    elif isinstance(sender, PublishingMixin) and request is not None:
        _release(sender._lock_of_message(request.id, header(request, KEY_HEADER), request))


def _lock_by_headers(task: object, id: object, key: object, scope: object) -> ExecutionLock | None:
    """Return the lock that a message holds by its headers, without the code of its task; None if it holds none."""
    if not (isinstance(task, str) and isinstance(id, str) and isinstance(key, str) and isinstance(scope, str)):
        return None
    name = waiting_name(task, key, scope)
    return options_of.complete({}, conf.get()).lock.with_name(name, label=f"{task}[{id}]", id=waiting_id(id))


@signals.task_rejected.connect
@signals.task_unknown.connect
def _on_discarded_message(message: Any = None, **kwargs: Any) -> None:
    """Release the lock of a message that its worker discards before there is a request: it does not have the task, or
    does not accept the content."""
    headers = message.headers or {}
    names = ("task", "id", KEY_HEADER, SCOPE_HEADER)
    _release(_lock_by_headers(*map(headers.get, names)))


def noting_decode_errors(strategy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a worker's strategy for a task that also releases the lock of a message that cannot be decoded.

    Celery acknowledges such a message and sends no signal: amid a deploy, a worker lacked a class in a pickle, and the
    message that nobody had any more held its lock for an hour.
    """

    def handle(message: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return strategy(message, *args, **kwargs)
        except DecodeError:
            _on_discarded_message(message)
            raise

    return handle


def _lock_of_run(task: SingleInstanceMixin, request: Any) -> ExecutionLock:
    """Return the lock of a run in another process. Raises TypeError when its arguments have no key."""
    name = task._name_of_run(task._key_of(request.args, request.kwargs, request))
    return task._running_lock(name, task._options, request, (), {})


def end_from_outside(task: SingleInstanceMixin, request: Any) -> None:
    """Let no lock remain of a message whose run is ended from outside of its process, and which does not come again.

    The child may leave the lock of a job to its message before or after this: it finds the marker, or is released.
    """
    if task._options.scope == "job" and task.acks_late:
        with suppress(TypeError):  # without a key it had no lock
            lock = _lock_of_run(task, request)
            _tell(
                partial(lock.mark_processed, task._marker_expire),
                "Could not record that %s was terminated, so its lock may stay until it expires: %s",
                request.id,
            )
            _release(_lock_of_job(task, task._key_of(request.args, request.kwargs, request), request.id))
    _release(task._lock_of_message(request.id, header(request, KEY_HEADER), request))


def _lock_of_job(task: SingleInstanceMixin, key: str, id: str) -> ExecutionLock:
    """Return the lock that a job leaves to its message: of one that was published without us, or in another scope, the
    lock of the message itself is none, or another one."""
    return task._options.lock.with_name(task._name_of_run(key), label=f"{task.name}[{id}]", id=waiting_id(id))


@signals.task_retry.connect
def _on_retry_of_a_lost_process(sender: Any = None, request: Any = None, reason: Any = None, **kwargs: Any) -> None:
    """Let the message of a retry hold the lock of its job that was killed (`task_retry_on_worker_lost` of Celery 5.7).

    The worker's main process retries it. The lock of the killed child ended long before, and a duplicate ran between.
    """
    killed = isinstance(getattr(reason, "exc", None), WorkerLostError)
    if not killed or not isinstance(sender, SingleInstanceMixin) or sender._options.scope != "job":
        return
    with suppress(TypeError):  # without a key it had no lock
        lock = _lock_of_run(sender, request)
        seconds = sender._life_of_retry(request, reason)

        def keep() -> None:
            holder = lock.owner()
            if holder is not None:
                lock.leave_to_message(holder, seconds)

        _tell(keep, "The lock of %s does not last until its retry, because Redis does not answer: %s", lock.label)


@signals.task_failure.connect
def _on_worker_lost(
    sender: Any = None, task_id: str = "", exception: Any = None, args: Any = (), kwargs: Any = None, **more: Any
) -> None:
    """Release the lock of a message whose process was killed, or whose body ended by a CancelledError in a child.

    The worker's main process sends this signal when it has acknowledged the message, which does not come again then.
    """
    is_told_here_only = isinstance(exception, WorkerLostError) or not isinstance(exception, Exception)
    if is_told_here_only and isinstance(sender, PublishingMixin):
        # Celery 5.6 passes no request here, so the key of the producer is unknown.
        request = sender.request_stack.top
        key = sender._key_of(args, kwargs or {}, request)
        _release(sender._lock_of_message(task_id, key, request))
        if isinstance(sender, SingleInstanceMixin) and sender._options.scope == "job":
            _release(_lock_of_job(sender, key, task_id))


@signals.task_postrun.connect
def _on_undecorated_task_end(sender: Any = None, state: str | None = None, **kwargs: Any) -> None:
    """Release the lock of a message whose task is not single-instance here, because this worker runs older code than
    the producer."""
    if isinstance(sender, PublishingMixin) or sender is None or state == states.RETRY:
        return
    request = sender.request_stack.top
    if request is not None:
        key, scope = header(request, KEY_HEADER), header(request, SCOPE_HEADER)
        _release(_lock_by_headers(sender.name, request.id, key, scope))


@signals.task_postrun.connect
def _on_task_end(sender: Any = None, state: str | None = None, retval: Any = None, **kwargs: Any) -> None:
    """Mark the message as processed, because its result is stored and its callbacks are sent.

    The lock of one that ended before its task was called, by `before_start` or a derived `__call__`, is released.
    """
    if not isinstance(sender, SingleInstanceMixin) or state is None or is_requeued(retval):
        return
    request = sender.request_stack.top
    if request is None or request.is_eager:
        return
    key = header(request, KEY_HEADER)
    if not request.get("single_instance_called") and isinstance(key, str):
        # The message of a retry has the same id, and the same lock unless it has another key.
        keeps = isinstance(retval, Retry) and sender._has_key(retval, sender._name_of_run(key))
        _release(None if keeps else sender._lock_of_message(request.id or "", key, request))
    lock = getattr(request, "single_instance_lock", None)
    # After the body, too: by `on_success`, or because the result cannot be stored or the next step be published.
    error = sys.exc_info()[1] or (retval if state == states.FAILURE else None)
    if lock is None or isinstance(retval, Reject) or sender._is_rejected(error):
        return
    try:
        lock.mark_processed(sender._marker_expire)
    except LockBackendError as error:
        events.log.warning(
            "Could not record that %s completed (%s): if its message is delivered again, it runs again.",
            lock.label,
            error,
        )


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
