"""Plain reads of stored values, as operations."""

from __future__ import annotations

from redis.exceptions import ClusterCrossSlotError

from ...core.clock import monotonic
from ...core.driver.effects import Operation, Pipeline
from ...core.driver.retry import with_retries
from ...core.driver.server import Server
from ...exceptions import LockBackendError
from .cluster_slots import is_clustered
from .request import lease_name


def read_value(key: str, with_ttl: bool) -> Operation[tuple[bytes | None, int]]:
    """Read a value and its time to live in milliseconds (-1: it never expires; -2: unknown, or it has just expired)."""
    commands = ((b"GET", key.encode()),) + (((b"PTTL", key.encode()),) if with_ttl else ())
    _, replies = yield from with_retries(lease_name(key), Pipeline(commands), monotonic())
    return replies[0], replies[1] if with_ttl else -2


def read_values(server: Server, keys: list[str]) -> Operation[list[bytes | None]]:
    """Read many values: by one command, or by one for each value if they are in several slots."""
    name, raw = lease_name(keys[0]), [key.encode() for key in keys]
    if not is_clustered(server):
        try:
            _, replies = yield from with_retries(name, Pipeline(((b"MGET", *raw),)), monotonic())
            return list(replies[0])
        except LockBackendError as error:
            if not isinstance(error.__cause__, ClusterCrossSlotError):
                raise
    _, replies = yield from with_retries(name, Pipeline(tuple((b"GET", key) for key in raw)), monotonic())
    return list(replies)
