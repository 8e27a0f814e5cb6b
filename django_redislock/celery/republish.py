"""A message that is published again: because of a conflict, or because a copy of it runs."""

from __future__ import annotations

import math
import random
import time
from contextlib import suppress
from typing import Any, NoReturn

from celery.app import trace
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.quorum_queues import detect_quorum_queues
from kombu.serialization import registry  # type: ignore[attr-defined]

from ..core import events
from ..exceptions import LockBackendError, LockError
from .execution_lock import ExecutionLock
from .message import (
    CONTENT_TYPE,
    COPY_FENCE_HEADER,
    FIRST_CONFLICT_HEADER,
    RESCHEDULED_HEADER,
    delivery_of,
    header,
    longest_delay,
    marker_expire,
    published_again,
)
from .options import TaskOptions
from .publishing import PublishingMixin

MARGIN = 0.1
"""Seconds between the expiry of a lock or a processed marker and the next try."""

GROWTH = 0.1
"""The delay of a rescheduled task is at least this part of the time waited so far."""
LONGEST_DELAY = 300.0
"""Longest delay by this growth in seconds, on average. A broker gives a message to another worker much later."""


HIDES_IGNORED_RETRIES = hasattr(trace, "get_actual_ignore_result")
"""Whether Celery stores no RETRY when the message has `ignore_result`; before 5.6.3 it asks the task only."""


class HandledElsewhere(Ignore):
    """A copy of the message is processed elsewhere, or it was published again. This copy ends and stores nothing."""


class RepublishingMixin(PublishingMixin):
    """A task whose messages are published again."""

    def _reschedule(
        self,
        lock: ExecutionLock,
        error: LockError,
        options: TaskOptions,
        request: Context | None,
        limit: float | None,
        queued: ExecutionLock | None,
        *,
        silent: bool = False,
    ) -> NoReturn:
        """Publish the same message again for later, or raise the error where that cannot be done.

        Works like `Task.retry`, but spends none of the task's retries, and stores the state before the message is
        published: Celery stores the state of a Retry afterwards, perhaps over the result of a faster successor.
        `silent`: another run of the same id goes on, and its state stays.
        """
        before, now = header(request, RESCHEDULED_HEADER) or 0, time.time()
        since = header(request, FIRST_CONFLICT_HEADER) or now
        waited = max(0.0, now - since)
        if request is None or request.is_eager or (limit is not None and waited >= limit):
            raise error
        if not isinstance(error, LockBackendError):
            self._claim_message(lock, request, options, final=False)
        delay = max(options.reschedule_delay, min(waited * GROWTH, LONGEST_DELAY))
        delay *= random.uniform(0.5, 1.5)  # noqa: S311
        if limit is not None:
            delay = min(delay, limit - waited)
        if queued is not None:  # the message waits again, and keeps its lock
            with suppress(LockBackendError):
                queued._copy(expire=queued.expire + delay).acquire(blocking=False)
        try:
            if not (silent or self.ignore_result or request.ignore_result):
                self.backend.mark_as_retry(request.id or "", error, request=request)
            self._publish_again(
                lock, request, options, delay, {RESCHEDULED_HEADER: before + 1, FIRST_CONFLICT_HEADER: since}
            )
        except Exception as failure:
            raise error from failure
        events.emit(
            "rescheduled",
            "%s[%s] is published again, to start in %.1f s.",
            self.name,
            request.id,
            delay,
            name=lock.name,
            task=self.name,
            task_id=request.id,
            delay=delay,
            often=before + 1,
        )
        if silent or self.store_errors_even_if_ignored or not HIDES_IGNORED_RETRIES:
            raise HandledElsewhere(f"published again: {error}")
        request.update(ignore_result=True)
        raise Retry(f"published again, to start in {delay:.1f} s: {error}", error)

    def _end_if_copy(self, lock: ExecutionLock, request: Context | None, options: TaskOptions) -> None:
        """End here and store nothing when the lock was refused because of a copy of the message.

        The copy runs, or its process has died; the expiry of its lock shows which. So the message is published once
        more, to start then. If the copy runs, and the message was acknowledged at its start, nothing else is needed. A
        message that is acknowledged late stays with the broker until it is processed. But a broker that redelivered it
        may delete it when this copy is acknowledged. So one message checks again, as long as the copy runs.
        """
        if lock.processed:
            events.log.info("%s was processed before; this copy of its message is dropped.", lock.label)
            raise HandledElsewhere("processed")
        if lock.retry_in is None or request is None:
            return
        holder, delay = None, lock.retry_in
        if self.acks_late:  # it asks on; another one looks once, and only at the expiry it can see who has died
            delay = min(delay, longest_delay(self.app))
        with suppress(LockBackendError):
            holder = lock.owner()
        fence = holder.fence if holder is not None and lock.is_copy(holder) else None
        if fence is not None and fence == header(request, COPY_FENCE_HEADER) and not self.acks_late:
            events.log.info("%s is running; this copy of its message is dropped.", lock.label)
            raise HandledElsewhere("a copy runs")
        try:
            self._publish_again(lock, request, options, delay + MARGIN, {COPY_FENCE_HEADER: fence}, alone=False)
        except Exception as failure:
            raise Reject(failure, requeue=True) from failure
        events.log.info(
            "%s is running, or its worker has died; this copy of its message starts again in %.1f s.", lock.label, delay
        )
        raise HandledElsewhere("a copy runs, or has died")

    def _claim_message(
        self, lock: ExecutionLock, request: Context | None, options: TaskOptions, *, final: bool
    ) -> None:
        """Mark a message that is refused (`final`) or published again now, unless a copy of it runs or was
        processed."""
        done = final and not self.acks_late
        try:
            lock.claim(
                marker_expire(self.app, options.queue_life) if done else options.expire, "done" if done else "ending"
            )
        except LockBackendError as error:
            events.log.warning("Could not mark the message of %s, so its copies may run: %s", lock.label, error)
            return
        self._end_if_copy(lock, request, options)
        if final and not done and request is not None:
            request.update(single_instance_lock=lock)

    def _delayed_by_exchanges(self) -> bool:
        """Whether Celery delays messages by exchanges of RabbitMQ: in whole seconds, of which it refuses 0."""
        found, _ = detect_quorum_queues(self.app, self.app.connection_for_write().transport.driver_type)
        return found

    def _publish_again(
        self,
        lock: ExecutionLock,
        request: Context,
        options: TaskOptions,
        delay: float,
        headers: dict[str, Any],
        *,
        alone: bool = True,
    ) -> None:
        """Publish the same message for later, and mark its copies as outdated."""
        delivery = lock.delivery or delivery_of(request)
        more: dict[str, Any] = {} if alone else {"expires": None}  # a message that started in time has not expired
        serializer = registry.type_to_name.get(request.get(CONTENT_TYPE))
        if serializer is not None:  # what was pickled cannot be written as JSON
            more["serializer"] = serializer
        message = self.signature_from_request(
            request,
            countdown=math.ceil(delay) if self._delayed_by_exchanges() else delay,
            retries=request.retries,
            headers=published_again(request, delivery, **headers),
            **more,
        )
        # Published by Celery's own method, so that the message keeps its key.
        super(PublishingMixin, self).apply_async(message.args, message.kwargs, **message.options)
        try:
            if delivery.known:
                lock.mark_processed(marker_expire(self.app, options.queue_life), delivery.version + 1, alone=alone)
        except LockBackendError as error:
            events.log.warning(
                "Could not mark the message of %s, so its copies may be published again: %s", lock.label, error
            )
