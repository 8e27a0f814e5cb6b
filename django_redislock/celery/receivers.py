"""The receivers of Celery's signals: they release or mark the lock of a message that was revoked, was lost, or has
ended."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from celery import signals, states
from celery.exceptions import Reject, Retry, WorkerLostError

from ..core import events
from ..exceptions import LockBackendError
from .ending import is_requeued
from .execution_lock import confirm_published
from .main_process import end_from_outside, lock_by_headers, lock_of_job, lock_of_run, release, release_discarded, tell
from .message import KEY_HEADER, SCOPE_HEADER, header
from .publishing import PublishingMixin
from .running import SingleInstanceMixin


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
        release(sender._lock_of_message(request.id, header(request, KEY_HEADER), request))


@signals.task_rejected.connect
@signals.task_unknown.connect
def _on_discarded_message(message: Any = None, **kwargs: Any) -> None:
    """Release the lock of a message that its worker discards before there is a request: it does not have the task, or
    does not accept the content."""
    release_discarded(message)


@signals.task_retry.connect
def _on_retry_of_a_lost_process(sender: Any = None, request: Any = None, reason: Any = None, **kwargs: Any) -> None:
    """Let the message of a retry hold the lock of its job that was killed (`task_retry_on_worker_lost` of Celery 5.7).

    The worker's main process retries it. The lock of the killed child ended long before, and a duplicate ran between.
    """
    killed = isinstance(getattr(reason, "exc", None), WorkerLostError)
    if not killed or not isinstance(sender, SingleInstanceMixin) or sender._options.scope != "job":
        return
    with suppress(TypeError):  # without a key it had no lock
        lock = lock_of_run(sender, request)
        seconds = sender._life_of_retry(request, reason)

        def keep() -> None:
            holder = lock.owner()
            if holder is not None:
                lock.leave_to_message(holder, seconds)

        tell(keep, "The lock of %s does not last until its retry, because Redis does not answer: %s", lock.label)


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
        release(sender._lock_of_message(task_id, key, request))
        if isinstance(sender, SingleInstanceMixin) and sender._options.scope == "job":
            release(lock_of_job(sender, key, task_id))


@signals.task_postrun.connect
def _on_undecorated_task_end(sender: Any = None, state: str | None = None, **kwargs: Any) -> None:
    """Release the lock of a message whose task is not single-instance here, because this worker runs older code than
    the producer."""
    if isinstance(sender, PublishingMixin) or sender is None or state == states.RETRY:
        return
    request = sender.request_stack.top
    if request is not None:
        key, scope = header(request, KEY_HEADER), header(request, SCOPE_HEADER)
        release(lock_by_headers(sender.name, request.id, key, scope))


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
        release(None if keeps else sender._lock_of_message(request.id or "", key, request))
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
