"""Parked messages: a refused message, in the form in which who releases its lock publishes it at once.

Its own copy is published, too, for later. It is the safety net: a killed holder or releaser wakes nobody. What is woken
is the next version of the message, so copies of the former one are dropped like all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from kombu.serialization import dumps, loads, prepare_accept_content

from ..core import events
from .execution_lock import Delivery, ExecutionLock
from .message import VERSION_HEADER, marker_expire, with_ours
from .options import TaskOptions
from .publishing import PublishingMixin

MAX_PARKED = 65_536
"""Bytes of the largest message that is parked."""


class ParkingMixin(PublishingMixin):
    """A task whose refused messages are parked."""

    def _park(self, lock: ExecutionLock, options: TaskOptions, message: Signature[Any], since: float) -> None:
        """Park a message that was published for later."""
        of_task: dict[str, Any] = dict(message.options)
        of_task.pop("countdown", None)
        version = of_task["headers"][VERSION_HEADER] + 1
        of_task["headers"] = with_ours(of_task["headers"], {VERSION_HEADER: version})
        parked = {"task": self.name, "args": message.args, "kwargs": message.kwargs, "options": of_task}
        parked["copies"] = "" if lock.delivery is None else lock.delivery.message
        with _logged(lock):
            serializer = of_task.get("serializer") or self.serializer or self.app.conf.task_serializer
            content_type, encoding, body = dumps(parked, serializer)
            head = f"{content_type}\n{encoding}\n".encode()
            stored = head + (body.encode() if isinstance(body, str) else body)
            if len(stored) <= MAX_PARKED:
                expire = marker_expire(self.app, options.queue_life)
                self._publish_woken(lock, options, lock.park(since, stored, expire))

    def _wake(self, lock: ExecutionLock, options: TaskOptions, *, forget: bool = False) -> None:
        """Publish the next version of the first parked message, if the lock is free.

        `forget`: the message of this lock is not parked any more.
        """
        with _logged(lock):
            self._publish_woken(lock, options, lock.wake(forget=forget))

    def _publish_woken(self, lock: ExecutionLock, options: TaskOptions, woken: bytes | None) -> None:
        if woken is None:
            return
        content_type, encoding, body = woken.split(b"\n", 2)
        accept = prepare_accept_content(self.app.conf.accept_content)
        parked = loads(body, content_type.decode(), encoding.decode(), accept=accept)
        task, of_task = self.app.tasks.get(parked["task"]), parked["options"]
        if isinstance(task, PublishingMixin):  # so that the message keeps its key
            super(PublishingMixin, task).apply_async(parked["args"], parked["kwargs"], **of_task)
        else:
            self.app.send_task(parked["task"], parked["args"], parked["kwargs"], **of_task)
        of_message = lock.with_delivery(Delivery("", parked["copies"], True))
        of_message.mark_processed(marker_expire(self.app, options.queue_life), of_task["headers"][VERSION_HEADER])


@contextmanager
def _logged(lock: ExecutionLock) -> Iterator[None]:
    """Log what goes wrong with a parked message, because its own copy starts later in any case."""
    try:
        yield
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        events.log.warning("A message that waits for %s starts by its own copy only: %s", lock.label, error)
