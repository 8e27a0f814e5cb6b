"""Receivers of Celery's signals: they release or mark the lock of a message that was revoked, was lost, or has
ended."""

from __future__ import annotations

from typing import Any

from celery import signals, states
from celery.exceptions import WorkerLostError

from .. import conf
from ..core import events
from ..exceptions import LockBackendError
from ..task_names import waiting_id
from . import options as options_of
from .execution import leave_queue
from .key import lock_name
from .message import KEY_HEADER, SCOPE_HEADER, header
from .publishing import PublishingMixin
from .running import SingleInstanceMixin, is_requeued


@signals.task_revoked.connect
def _on_task_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **kwargs: Any) -> None:
    """Release the lock of a message that was revoked or expired before its start; a terminated message is not delivered
    again."""
    if not isinstance(sender, PublishingMixin) or request is None:
        return
    if terminated and sender._options.scope == "job" and sender.acks_late:
        try:
            name = lock_name(sender.name, sender._key_of(request.args, request.kwargs, request))
            lock = sender._running_lock(name, sender._options, request, (), {})
            lock.mark_processed(sender._marker_expire)
        except (LockBackendError, TypeError) as error:
            events.log.warning(
                "Could not record that %s was terminated, so its lock may stay until it expires: %s", request.id, error
            )
    sender._withdraw(request.id, header(request, KEY_HEADER))


@signals.task_failure.connect
def _on_worker_lost(
    sender: Any = None, task_id: str = "", exception: Any = None, args: Any = (), kwargs: Any = None, **more: Any
) -> None:
    """Release the lock of a message whose process was killed before its body began. The worker's main process sends
    this signal."""
    if isinstance(exception, WorkerLostError) and isinstance(sender, PublishingMixin):
        # Celery 5.6 passes no request here, so the key of the producer is unknown.
        sender._withdraw(task_id, sender._key_of(args, kwargs or {}, sender.request_stack.top))


@signals.task_postrun.connect
def _on_undecorated_task_end(sender: Any = None, state: str | None = None, **kwargs: Any) -> None:
    """Release the lock of a message whose task is not single-instance here, because this worker runs older code than
    the producer."""
    if isinstance(sender, PublishingMixin) or sender is None or state == states.RETRY:
        return
    request = sender.request_stack.top
    scope, key = header(request, SCOPE_HEADER), header(request, KEY_HEADER)
    if scope is None or not isinstance(key, str):
        return
    name = lock_name(sender.name, key, "celery" if scope == "job" else "celery-queue")
    leave_queue(options_of.complete({}, conf.get()).lock.with_name(name, label=name, id=waiting_id(request.id)))


@signals.task_postrun.connect
def _on_task_end(sender: Any = None, state: str | None = None, retval: Any = None, **kwargs: Any) -> None:
    """Mark the message as processed, because its result is stored and its callbacks are sent."""
    if not isinstance(sender, SingleInstanceMixin) or state is None or is_requeued(retval):
        return
    request = sender.request_stack.top
    lock = getattr(request, "single_instance_lock", None)
    if request is None or lock is None:
        return
    try:
        lock.mark_processed(sender._marker_expire)
    except LockBackendError as error:
        events.log.warning(
            "Could not record that %s completed (%s): if its message is delivered again, it runs again.",
            lock.label,
            error,
        )
