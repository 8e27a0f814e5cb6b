"""What is done about a lock when Celery tells of its message: that it was revoked, has died, or has ended."""

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
from .message import KEY_HEADER, SCOPE_HEADER, header, marker_expire
from .publishing import PublishingMixin
from .running import SingleInstanceMixin, is_requeued


@signals.task_revoked.connect
def _on_task_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **kwargs: Any) -> None:
    """Free the lock of a message that was revoked, or expired, before its start; one that is terminated comes no more."""
    if not isinstance(sender, PublishingMixin) or request is None:
        return
    if terminated and sender._options.scope == "job" and sender.acks_late:
        try:
            name = lock_name(sender.name, sender._key_of(request.args, request.kwargs, request))
            lock = sender._running_lock(name, sender._options, request, (), {})
            lock.mark_processed(marker_expire(sender.app, sender._options.queue_life))
        except (LockBackendError, TypeError) as error:
            events.log.warning("The lock of %s may stay after its end: %s", request.id, error)
    sender._withdraw(request.id, header(request, KEY_HEADER))


@signals.task_failure.connect
def _on_worker_lost(
    sender: Any = None, task_id: str = "", exception: Any = None, args: Any = (), kwargs: Any = None, **more: Any
) -> None:
    """Free the lock of a message whose process was killed before its body began; the worker's main process tells of that."""
    if isinstance(exception, WorkerLostError) and isinstance(sender, PublishingMixin):
        # Celery 5.6 tells of no request, so of no key that the producer had computed.
        sender._withdraw(task_id, sender._key_of(args, kwargs or {}, sender.request_stack.top))


@signals.task_postrun.connect
def _on_undecorated_task_end(sender: Any = None, state: str | None = None, **kwargs: Any) -> None:
    """Free the lock of a message whose task is not single-instance in this worker: it runs older code than the producer."""
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
    """Note that the result of a message that may come again is stored and that its callbacks are sent."""
    if not isinstance(sender, SingleInstanceMixin) or state is None or is_requeued(retval):
        return
    request = sender.request_stack.top
    lock = getattr(request, "single_instance_lock", None)
    if request is None or lock is None:
        return
    try:
        lock.mark_processed(marker_expire(sender.app, sender._options.queue_life))
    except LockBackendError as error:
        events.log.warning("Nobody will know that %s was processed: %s", lock.label, error)
