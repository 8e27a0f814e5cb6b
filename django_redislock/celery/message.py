"""A message: its headers, how long it holds its lock, its arguments as text, and the result of a duplicate of it.

Headers identify it, because a broker may deliver it several times, and in any order: it delivers a message
to another worker when it was not acknowledged for too long. The first worker may still have its copy in memory, and
start it at any time.
"""

from __future__ import annotations

import inspect
import logging
import os
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import celery
from celery import Celery, states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601, maybe_make_aware
from django.db.models import Model
from django.utils.timezone import get_default_timezone
from django.views.debug import get_default_exception_reporter_filter
from kombu import serialization
from kombu.exceptions import ContentDisallowed, DecodeError

from ..core import events
from ..core.clock import monotonic
from ..core.validation import MAX_SECONDS
from ..exceptions import LockBackendError, LockError, LockLost, NotAcquired
from ..name_template import by_name
from ..task_names import waiting_id
from .execution_lock import Delivery, ExecutionLock

KEY_HEADER = "single_instance_key"
"""The key of a message, so that producers and workers of different versions agree."""
SCOPE_HEADER = "single_instance_scope"
"""The scope of a message that holds a lock while it waits. A worker without the decorator needs it to free the lock."""
MESSAGE_HEADER = "single_instance_message"
"""Identifies a message and its copies among all messages of the same task id."""
REDELIVERED_HEADER = "single_instance_again"
"""Set when a message without `MESSAGE_HEADER` may be a copy of one that is being processed."""
VERSION_HEADER = "single_instance_version"
"""How often the message was published again, for any reason."""
COPY_FENCE_HEADER = "single_instance_seen"
"""The fence of the execution that a copy found running, when the copy is published again."""
RESCHEDULED_HEADER = "single_instance_rescheduled"
"""How often the message was rescheduled because of a conflict."""
FIRST_CONFLICT_HEADER = "single_instance_since"
"""The time of the first of these conflicts, in seconds since 1970 on the clock of the server."""
WAITED_HEADER = "single_instance_waited"
"""Seconds from that time to the start of the message: for a conflict at which the time of the server is unknown."""
REFUSED_HEADER = "single_instance_refused"
"""The holder of the lock when a message with a given id was published; the message is to be skipped."""
PLACELESS_HEADER = "single_instance_placeless"
"""Whether another message held the lock when a message with a given id was published, so that this one holds none."""
ARGUMENTS_HEADER = "single_instance_arguments"
"""The arguments as they may be shown, if the publisher gave Celery an `argsrepr` or a `kwargsrepr`."""
CONTENT_TYPE = "single_instance_content_type"
"""The content type of a message, noted by the worker that received it; no header."""
_OF_FORMER_MESSAGE = {
    VERSION_HEADER,
    COPY_FENCE_HEADER,
    SCOPE_HEADER,
    RESCHEDULED_HEADER,
    FIRST_CONFLICT_HEADER,
    WAITED_HEADER,
    REFUSED_HEADER,
    PLACELESS_HEADER,
}
"""Headers that a retry does not inherit from its message."""
MAX_NEWEST = 64 * 1024
"""Most bytes of the newest arguments: each list of locks reads them with the record of the waiting message."""
MARKER_EXPIRE = 3600.0
"""Least seconds for which a message is known to be processed: as long as a Redis broker waits for the
acknowledgement."""


def new_message(headers: Mapping[str, Any] | None, key: str, scope: str) -> dict[str, Any]:
    """Return the headers of a new message, which may be a retry with the headers of the one before."""
    ours = {KEY_HEADER: key, MESSAGE_HEADER: os.urandom(4).hex()}
    if scope != "run":
        ours[SCOPE_HEADER] = scope
    return (
        with_ours({name: headers[name] for name in headers if name not in _OF_FORMER_MESSAGE}, ours)
        if headers
        else ours
    )


def with_ours(headers: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers with ours added, also within the nested headers that some tracers send."""
    nested = headers.get("headers")
    return {**headers, **ours} | ({"headers": {**nested, **ours}} if isinstance(nested, Mapping) else {})


def header(request: Context | None, name: str) -> Any:
    """Return this header of the message, or None.

    ``request.headers`` of Celery contains only the headers within the headers; the others are attributes of the
    request.
    """
    if request is None:
        return None
    outer = request.get(name)
    return (request.headers or {}).get(name) if outer is None else outer


def delivery_of(request: Context) -> Delivery:
    """Return the delivery of the message of this request."""
    id = waiting_id(request.id or "")
    if request.is_eager:
        return Delivery(id)
    message = header(request, MESSAGE_HEADER) or _brokers_id(request) or ""
    again = redelivered(request) or header(request, REDELIVERED_HEADER)
    version = header(request, VERSION_HEADER)
    common = f"{id}:{request.retries}:{waiting_id(str(message)) if message else ''}"
    return Delivery(id, common, bool(message or again), version if isinstance(version, int) else 0)


def _brokers_id(request: Context) -> Any:
    """Return what identifies a message that was published without us, and its copies: kombu's delivery tag, or the id
    of SQS, whose tag is another one at each delivery. RabbitMQ has neither; it flags copies."""
    properties = request.properties or {}
    of_sqs = (properties.get("delivery_info") or {}).get("sqs_message") or {}
    return of_sqs.get("MessageId") or properties.get("delivery_tag")


def redelivered(request: Context) -> bool:
    """Return whether the broker says that it delivered the message before."""
    return bool((request.delivery_info or {}).get("redelivered"))


def published_again(request: Context, delivery: Delivery, **more: Any) -> dict[str, Any]:
    """Return the headers of the same message when it is published again."""
    names = [KEY_HEADER, SCOPE_HEADER, MESSAGE_HEADER, REDELIVERED_HEADER]
    names += [RESCHEDULED_HEADER, FIRST_CONFLICT_HEADER, WAITED_HEADER]
    ours = {name: value for name in names if (value := header(request, name)) is not None}
    ours |= {VERSION_HEADER: delivery.version + 1, **more}
    if MESSAGE_HEADER not in ours:
        tag = _brokers_id(request)
        ours |= {MESSAGE_HEADER: tag} if tag else {REDELIVERED_HEADER: delivery.known}
    return with_ours(request.as_execution_options()["headers"], ours)


def pack_arguments(args: Any, kwargs: Any, serializer: str) -> bytes:
    """Return the arguments of a duplicate as bytes. The message that waits runs with them.

    Raises ValueError when they are longer than `MAX_NEWEST`.
    """
    content_type, encoding, body = serialization.dumps((tuple(args or ()), kwargs or {}), serializer)
    packed = f"{content_type} {encoding}\n".encode() + (body.encode() if isinstance(body, str) else body)
    if len(packed) > MAX_NEWEST:
        raise ValueError(
            f"on_duplicate='replace' takes arguments of {MAX_NEWEST:,} bytes at most, and these have {len(packed):,}: "
            "store the data, and give the task a key to it"
        )
    return packed


def unpack_arguments(
    packed: bytes, request: Context | None, app: Celery, label: str
) -> tuple[Any, Any] | tuple[None, None]:
    """Return the arguments that were packed, and put them into the request: a retry and the hooks of the task get them.

    A duplicate that this worker cannot decode, or whose serializer it does not accept, changes nothing: a WARNING says
    so, and the answer is None twice.
    """
    kind, _, body = packed.partition(b"\n")
    content_type, encoding = kind.decode().split()
    accepted = serialization.prepare_accept_content(app.conf.accept_content)
    try:
        args, kwargs = serialization.loads(body, content_type, encoding, accept=accepted)
    except (ContentDisallowed, DecodeError) as error:
        # The message itself was accepted, so it must not fail because of another one.
        events.log.warning(
            "%s runs with its message's own arguments, because this worker cannot read the newest ones: %s: %s. "
            "Publish with a serializer of accept_content.",
            label,
            type(error).__name__,
            error,
        )
        return None, None
    if request is not None:
        own: Any = request
        if isinstance(own.args, list):  # in place, because the tracer gives the same objects to hooks and to signals
            own.args[:] = args
        else:  # pickle keeps a tuple
            own.args = args
        own.kwargs.clear()
        own.kwargs.update(kwargs)
    return args, kwargs


LATER = "which is released when Redis answers, or else ends by its expiry"


def release_quietly(lock: ExecutionLock) -> None:
    """Release the lock if it is held; log an error of Redis instead of raising it."""
    try:
        lock.release()
    except NotAcquired:
        pass  # a duplicate, or Redis did not answer at the start
    except LockLost:
        pass  # reported when it was noticed; the body's outcome stands
    except LockBackendError as error:
        events.log.warning(f"%s could not release its lock, {LATER}: %s", lock.label, error)
    except BaseException:  # a soft time limit, in the middle of it
        with suppress(LockError):
            lock.release()
        raise


NOT_LEFT = f"%s could not release the lock of its message, {LATER}: %s"


def leave_place(place: ExecutionLock | None, later: bool = True) -> ExecutionLock | None:
    """Release the lock under which a message waited; return it when Redis did not answer.

    `later`: then it is released as soon as Redis answers, because the message has ended.
    """
    if place is not None:
        try:
            place.release_given_id(later)
        except LockBackendError as error:
            events.log.warning(NOT_LEFT, place.label, error)
            return place
    return None


def warn_lost_place(lock: ExecutionLock, request: Context | None, options: TaskOptions) -> None:
    """Warn that a message has lost the lock under which it waits, if duplicates may have given it arguments."""
    had_none = header(request, SCOPE_HEADER) is None or header(request, PLACELESS_HEADER)
    if options.on_duplicate == "replace" and not had_none:
        events.log.warning(
            "%s held no lock any more: it expired, was force-released, was lost by Redis, or another message had it. "
            "The task runs with the message's own arguments; those of later duplicates may be lost.",
            lock.label,
        )


def marker_expire(app: Celery, queue_life: float) -> float:
    """Return for how many seconds a message is known to be processed: as long as a copy of it may still be
    delivered."""
    return max(MARKER_EXPIRE, queue_life, _patience_of_broker(app))


def longest_delay(app: Celery) -> float:
    """Return for how many seconds a copy that asks again and again is delayed at most.

    Beyond the broker's visibility timeout the delayed copy itself would be delivered twice, and both would ask again:
    one message became ten within 20 seconds.
    """
    return _patience_of_broker(app) / 3


def _patience_of_broker(app: Celery) -> float:
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout", MARKER_EXPIRE))


MAX_ARGUMENTS_LENGTH = 300
"""Most characters of the description of the arguments."""


if TYPE_CHECKING:
    from .options import TaskOptions

    _AsyncResult = AsyncResult[Any]
else:
    _AsyncResult = AsyncResult  # Celery 5.6 defines no type arguments for it


class DuplicateResult(_AsyncResult):
    """The result of the task that holds the lock, in place of one that was not published.

    With ``rpc://``, whose results go to the process that published the task, ``get()`` raises NotImplementedError
    elsewhere.
    """

    elsewhere = False
    """Whether another process holds the lock."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the result, as `celery.result.AsyncResult.get` does."""
        if self.elsewhere and not self.ignored and self.backend.as_uri() == "rpc://":
            raise NotImplementedError(
                f"rpc:// gives the result of {self.id} only to the process that published the task"
            )
        return super().get(*args, **kwargs)

    def __del__(self) -> None:
        """Cancel the wait for this result, and none for the original.

        Celery before 5.7 knows one waiter for each id, and any result of that id ended its wait: when a duplicate was
        dropped, the `get` of the original hung for ever.
        """
        known = getattr(self.backend, "_pending_results", ())
        if celery.VERSION >= (5, 7) or any(waiters.get(self.id) is self for waiters in known):
            super().__del__()


def duplicate_like(result: AsyncResult[Any]) -> DuplicateResult:
    """Return the duplicate of a result whose task has results of its own kind, such as those that can be aborted."""
    return _restore(type(result), result.__reduce_args__())


def _restore(kind: type[AsyncResult[Any]], args: tuple[Any, ...]) -> DuplicateResult:
    def reduce(self: Any) -> tuple[Any, ...]:
        return _restore, (kind, self.__reduce_args__())

    made = type("DuplicateResult", (DuplicateResult, kind), {"__module__": __name__, "__reduce__": reduce})
    return made(*args)  # type: ignore[no-any-return]


def waiting_expire(app: Celery, queue_life: float, countdown: object, eta: object, expires: object) -> float:
    """Return for how many seconds a message holds its lock: until it should have started, at most until the message
    expires."""
    begins = countdown if countdown is not None else _seconds_until(app, eta)
    seconds = queue_life + max(0.0, begins if isinstance(begins, (int, float)) else 0.0)
    ends = _seconds_until(app, expires)
    if ends is not None:
        seconds = min(seconds, max(0.001, ends))
    return min(seconds, MAX_SECONDS)


def has_ended(backend: Any, task_id: str, since: datetime) -> bool:
    """Return whether a final state of the task was stored after this time; False when no results are kept."""
    # The backend rpc:// gives its states to one reader only.
    if isinstance(backend, DisabledBackend) or backend.as_uri() == "rpc://":
        return False
    try:
        meta = backend.get_task_meta(task_id, cache=False)
        stored = meta.get("date_done")
        ended = maybe_iso8601(stored) if isinstance(stored, str) else stored
        if ended is not None and ended.tzinfo is None:
            # With USE_TZ=False, Django's database has its local time; the backends of Celery itself have UTC.
            local = type(backend).__module__.startswith("django_celery_results.")
            ended = ended.replace(tzinfo=get_default_timezone() if local else UTC)
        after = since + timedelta(milliseconds=1)  # the time of a lock is in whole milliseconds
        return meta["status"] in states.READY_STATES and (ended is None or ended >= after)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # each result backend has its own errors
        # Once a minute: with django-db in a coroutine, for example, no duplicate can read it.
        events.log.log(
            log_level_of(f"state of {task_id}"),
            "The state of task %s could not be read (%s: %s); the task is treated as not ended.",
            task_id,
            type(error).__name__,
            error,
        )
        return False


def warn_dropped_callbacks(task: str, holder: str, options: Mapping[str, Any]) -> None:
    """Report the callbacks of a message that is not published: Celery cannot add them to a published message."""
    dropped = [name for name in ("link", "link_error") if options.get(name)]
    if dropped:
        events.log.warning(
            "%s is not published, and its %s will not be called: Celery cannot add callbacks to task %s, which already "
            "waits or runs. A message with a task_id of its own is always published.",
            task,
            " and ".join(dropped),
            holder,
        )


def warn_foreign(task: str, scope: str, request: Context | None) -> None:
    """Warn once that a message has none of our headers, so it held no lock while it waited."""
    if request is None or request.is_eager or header(request, KEY_HEADER) is not None or task in _warned_foreign:
        return
    _warned_foreign.add(task)
    events.log.warning(
        "%s[%s] was published without its lock: the publishing program does not have the task's code, or something "
        "removed the headers of its message. For such messages the scope %r begins at their start.",
        task,
        request.id,
        scope,
    )


_warned_foreign: set[str] = set()
"""Tasks for which the warning about a message without our headers was logged."""


def log_level_of(name: str) -> int:
    """Return the log level for a message that is not published under this lock: WARNING once a minute, else lower.

    Usually a duplicate is expected. But if no worker releases the lock, because its code has no decorator, nothing is
    published any more.
    """
    minute = int(monotonic() // 60)
    if _warned_in.get(name) == minute:
        return logging.INFO
    if len(_warned_in) >= MAX_REMEMBERED:
        _warned_in.clear()
    _warned_in[name] = minute
    return logging.WARNING


_warned_in: dict[str, int] = {}
"""By lock: the minute of the last warning."""
MAX_REMEMBERED = 1000
"""Most locks in `_warned_in`."""


def _seconds_until(app: Celery, when: object) -> float | None:
    """Return the seconds until a time, or None when it is no time; Celery raises the error for that."""
    if when is None:
        return None
    if isinstance(when, (int, float)):
        return float(when)
    try:
        moment = maybe_iso8601(when) if isinstance(when, str) else when
    except ValueError:
        return None
    if not isinstance(moment, datetime):
        return None
    return (maybe_make_aware(moment, app.timezone) - app.now()).total_seconds()


class _Shortened(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Model):  # its own repr() may ask the database
            return f"{x._meta.label}:{x.pk}"
        return super().repr_instance(x, level)


_shortened = _Shortened()


def describe_arguments(bound: inspect.BoundArguments) -> str:
    """Return the arguments as text: shortened, with the values hidden that Django's error pages hide."""
    cleanse = get_default_exception_reporter_filter().cleanse_setting
    parts = []
    for name, value in by_name(bound).items():
        try:
            hidden = cleanse(name, dict(value) if isinstance(value, Mapping) else value)
            parts.append(f"{name}={_shortened.repr(hidden)}")
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # repr() of an argument failed
            parts.append(f"{name}=?")
    text = ", ".join(parts)
    return text if len(text) <= MAX_ARGUMENTS_LENGTH else f"{text[: MAX_ARGUMENTS_LENGTH - 1]}…"
