"""The headers that identify a message, because a broker may deliver it several times, and in any order.

A broker delivers a message to another worker when it was not acknowledged for too long. The first worker may still have
its copy in memory, and start it at any time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.app.task import Context

from ..task_names import waiting_id
from .execution_lock import Delivery

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
"""The time of the first of these conflicts, in seconds since 1970."""
REFUSED_HEADER = "single_instance_refused"
"""The holder of the lock when a message with a given id was published; the message is to be skipped."""
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
    REFUSED_HEADER,
}
"""Headers that a retry does not inherit from its message."""
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
    # A message that was published without us is identified by kombu's delivery tag. RabbitMQ has none; it flags copies.
    message = header(request, MESSAGE_HEADER) or (request.properties or {}).get("delivery_tag") or ""
    again = (request.delivery_info or {}).get("redelivered") or header(request, REDELIVERED_HEADER)
    version = header(request, VERSION_HEADER)
    common = f"{id}:{request.retries}:{waiting_id(str(message)) if message else ''}"
    return Delivery(id, common, bool(message or again), version if isinstance(version, int) else 0)


def published_again(request: Context, delivery: Delivery, **more: Any) -> dict[str, Any]:
    """Return the headers of the same message when it is published again."""
    names = (KEY_HEADER, SCOPE_HEADER, MESSAGE_HEADER, REDELIVERED_HEADER, RESCHEDULED_HEADER, FIRST_CONFLICT_HEADER)
    ours = {name: value for name in names if (value := header(request, name)) is not None}
    ours |= {VERSION_HEADER: delivery.version + 1, **more}
    if MESSAGE_HEADER not in ours:
        tag = (request.properties or {}).get("delivery_tag")
        ours |= {MESSAGE_HEADER: tag} if tag else {REDELIVERED_HEADER: delivery.known}
    return with_ours(request.as_execution_options()["headers"], ours)


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
