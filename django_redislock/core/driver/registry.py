"""The servers of this process: one for all clients with the same settings, kept as long as one of them is used."""

from __future__ import annotations

import math
import weakref
from typing import Any
from weakref import ref

from redis import Redis, RedisCluster
from redis.asyncio import Redis as AsyncRedis, RedisCluster as AsyncRedisCluster

from .cluster.cluster import Cluster
from .kinds import identity
from .process import after_in_child, notice_fork
from .replicated import ReplicatedServer
from .server import Server, endpoint_of

Client = Redis | AsyncRedis | RedisCluster | AsyncRedisCluster

_by_pool: weakref.WeakKeyDictionary[Any, Server] = weakref.WeakKeyDictionary()
"""By connection pool, or by the client of a Cluster."""
_by_settings: dict[Any, ref[Server]] = {}


def server_of(client: Client | Server) -> Server:
    """Return the server, or the Cluster, that the client talks to.

    Raises TypeError for anything but a redis-py client with a connection pool or nodes.
    """
    if isinstance(client, Server):
        return client
    pool = getattr(client, "connection_pool", None)
    try:
        return _by_pool[pool]
    except (KeyError, TypeError):
        pass
    if isinstance(client, (RedisCluster, AsyncRedisCluster)):
        return _cluster_of(client)
    if not isinstance(client, (Redis, AsyncRedis)) or pool is None:
        raise TypeError(
            f"client must be a redis.Redis, not {type(client).__module__}.{type(client).__qualname__}: give one of a "
            "single server, or of a Sentinel's primary, or a redis.RedisCluster. redis-py speaks with Valkey, too: of "
            "another client, take the URL (redis.Redis.from_url)."
        )
    server = _by_pool[pool] = _shared(Server(endpoint_of(client)))
    return server


def replicated(server: Server, min_replicas: int) -> Server:
    """Return the server for locks that so many of its replicas must confirm; with 0 the server itself."""
    if not min_replicas or server.connection_class is None:  # a server in memory
        return server
    if isinstance(server, Cluster):
        return _shared_cluster(Cluster(server, min_replicas))
    return _shared(ReplicatedServer(server, min_replicas))


def _cluster_of(client: RedisCluster | AsyncRedisCluster) -> Server:
    try:
        return _by_pool[client]
    except KeyError:
        shared = _by_pool[client] = _shared_cluster(Cluster(client))
        return shared


def _shared_cluster(cluster: Cluster) -> Server:
    place = cluster.table.place  # a client that was made at another time may know more nodes, or fewer
    for known in living_servers():
        if isinstance(known, Cluster) and known.place == place:
            known.table.place.seeds |= place.seeds
            cluster.place = cluster.table.place = known.table.place
    return _shared(cluster, cluster.place, identity(cluster.remap))


def _shared(server: Server, *more: Any) -> Server:
    """Return the known server with the same settings, or this one. Takes no lock: a destructor may interrupt it."""
    key = server.connection_class, server.limit, identity(server.settings), server.min_replicas, *more

    def forget(gone: ref[Server]) -> None:
        if _by_settings.get(key) is gone:
            _by_settings.pop(key, None)

    reference = ref(server, forget)
    while True:
        found = _by_settings.setdefault(key, reference)
        shared = found()
        if shared is not None:
            return shared
        forget(found)


def living_servers() -> list[Server]:
    """Return the servers that are in use in this process."""
    return [server for server in [found() for found in list(_by_settings.values())] if server is not None]


def close_unused() -> None:
    """Close all connections that are not in use."""
    notice_fork()
    for server in living_servers():
        server.close_idle(math.inf, keep=0)


_inherited: list[Any] = []
"""The parent's views, kept because their destructors would disturb the parent's connections."""


def _after_fork() -> None:
    for server in living_servers():
        _inherited.append(server.views)
        server.forget_connections()


after_in_child("connections", _after_fork)
