"""One call about many locks, or one for each slot where the server runs a script for one slot only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from redis.crc import key_slot
from redis.exceptions import ClusterCrossSlotError

from ....exceptions import LockBackendError
from ... import events
from ..effects import Operation, ScriptCall, with_retries, with_retries_each
from ..server import Server
from .cluster import Cluster

T = TypeVar("T")

Missing = dict[str, str]
"""By node of a Cluster: why it did not answer."""


def is_crossing(error: BaseException | None, server: Server) -> bool:
    """Whether the server refused keys of several slots. If so, calls to it are split by slot from now on.

    So a server in cluster mode behind a plain client is recognised: a Cluster of one shard, a proxy, or a serverless
    service.
    """
    if not isinstance(error, ClusterCrossSlotError):
        return False
    if not server.splits:
        server.splits = True
        events.log.info(
            "The server is in cluster mode: from now on, calls about many locks or values are split by slot."
        )
    return True


def split(items: Iterable[T], key_of: Callable[[T], bytes]) -> dict[int, list[T]]:
    """Return the items by the slot of their key."""
    groups: dict[int, list[T]] = {}
    for item in items:
        groups.setdefault(key_slot(key_of(item)), []).append(item)
    return groups


def by_slot(
    server: Server,
    items: list[T],
    key_of: Callable[[T], bytes],
    call_for: Callable[[list[T]], ScriptCall],
    until: float,
    missing: Missing | None = None,
) -> Operation[list[tuple[list[T], Any]]]:
    """Run a script about all items, or one for the items of each slot; return the items and the reply of each call.

    `missing` gets the nodes that do not answer, as long as another one does; without it, LockBackendError is raised.
    """
    if not server.splits:
        try:
            _, reply = yield from with_retries("", call_for(items), until, server)
            return [(items, reply)]
        except LockBackendError as error:
            if not is_crossing(error.__cause__, server):
                raise
    groups = split(items, key_of)
    calls = [call_for(group) for group in groups.values()]
    replies = yield from with_retries_each("", calls, until, [server] * len(calls))
    answered, failure = [], None
    try:
        for (slot, group), reply in zip(groups.items(), replies, strict=True):
            if not isinstance(reply, LockBackendError):
                answered.append((group, reply))
                continue
            failure = failure or reply
            if missing is not None and isinstance(server, Cluster):
                missing[server.table.name_of_owner(slot)] = reply.cause
        if failure is not None and (missing is None or not answered):
            raise failure
        return answered
    finally:
        failure = reply = None  # an error refers to this frame
        del replies
