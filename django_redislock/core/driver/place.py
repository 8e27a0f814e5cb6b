"""The database that a client leads to, however the address was given."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from .connection_kinds import settings_of


def place_of(pool: Any) -> Hashable:
    """Return the identity of the pool's database. It is equal for two pools of one database with different settings.

    It contains the number of the database and either host and port, or the path of the socket, or the service's name
    and the places of its Sentinels. Host names are compared as they are written.
    """
    options = settings_of(pool)
    database = str(options.get("db") or 0)
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None:
        sentinels = frozenset(place_of(sentinel.connection_pool) for sentinel in manager.sentinels)
        return pool.service_name, bool(pool.is_master), sentinels, database
    path = options.get("path")
    if path:
        return str(path), database
    return str(options.get("host") or "localhost"), str(options.get("port") or 6379), database
