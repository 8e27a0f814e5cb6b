"""Which database a client leads to, however it is told to get there."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


def place_of(pool: Any) -> Hashable:
    """Return what is equal for redis-py's connection pools of the same database, whatever their other settings.

    That is host, port and number of the database, or the path of the socket, or Sentinel's name of the service and where the
    Sentinels are. Names of hosts are taken as they are written.
    """
    options = pool.connection_kwargs
    database = str(options.get("db") or 0)
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None:
        sentinels = frozenset(place_of(sentinel.connection_pool) for sentinel in manager.sentinels)
        return pool.service_name, bool(pool.is_master), sentinels, database
    path = options.get("path")
    if path:
        return str(path), database
    return str(options.get("host") or "localhost"), str(options.get("port") or 6379), database
