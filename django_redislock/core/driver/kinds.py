"""redis-py's clients and connections: what our connections inherit from a client, the same settings for threads and for
asyncio, and all private parts of redis-py that we use.

Our own code on redis-py's sockets is clearly faster than redis-py's, and only our own can be interrupted by signal
handlers without harm. A new version of redis-py may rename a private part: then only the functions at the end of this
module change.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Hashable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from redis import RedisCluster, cluster, connection as for_threads, sentinel
from redis._parsers import BaseParser
from redis.asyncio import connection as for_asyncio, sentinel as async_sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import ConnectionError, RedisClusterException, RedisError, TimeoutError

from ...exceptions import is_interruption

OURS = frozenset(
    {
        *("retry", "retry_on_error", "retry_on_timeout", "health_check_interval"),
        *("socket_timeout", "socket_connect_timeout"),
        *("decode_responses", "encoding", "encoding_errors", "protocol", "legacy_responses"),
        *("maint_notifications_config", "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler"),
        *("maintenance_state", "maintenance_notification_hash", "event_dispatcher", "himport_registry"),
        *("orig_host_address", "orig_socket_timeout", "orig_socket_connect_timeout"),
        *("driver_info", "lib_name", "lib_version"),  # Django's own backend makes another one for every thread
    }
)
"""Settings that our connections do not inherit, as of redis-py 8.1."""


def inherited_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a client that our connections inherit."""
    return {key: value for key, value in settings.items() if key not in OURS}


def identity(value: Any) -> Any:
    """Return a hashable value that is equal for equal settings; objects are compared by their own ``==``."""
    if isinstance(value, dict):
        return "dict", frozenset((key, identity(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(identity, value))
    try:
        hash(value)
    except TypeError:
        return "object", id(value)  # the id stays unique, because the server keeps the object
    return value


def is_fake(kind: type) -> bool:
    """Return whether connections of this class are those of fakeredis, for tests."""
    return any(base.__module__.partition(".")[0] == "fakeredis" for base in kind.__mro__)


_NAMES = ("Connection", "SSLConnection", "UnixDomainSocketConnection")
_THREADS = {getattr(for_asyncio, name): getattr(for_threads, name) for name in _NAMES}
_ASYNCIO = {of_threads: of_asyncio for of_asyncio, of_threads in _THREADS.items()} | {
    sentinel.SentinelManagedConnection: async_sentinel.SentinelManagedConnection,
    sentinel.SentinelManagedSSLConnection: async_sentinel.SentinelManagedSSLConnection,
}
_ONE_KIND_ONLY = frozenset({"parser_class", "command_packer"})
"""Settings that have a meaning for connections of one kind only."""


def sync_connection_kind(kind: type, settings: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """Return the class and the settings of connections for threads that correspond to these asyncio connections.

    Raises TypeError when redis-py has no such class, or a function for asyncio prepares them.
    """
    if kind not in _THREADS:
        _refuse_fake(kind)
        raise TypeError(
            f"client makes connections of {kind.__module__}.{kind.__qualname__}, which have no counterpart for "
            "threads; give the synchronous client of the same server instead: asyncio connections of its own will be "
            "made"
        )
    _check_connect_func(settings, of_asyncio=False)
    return _THREADS[kind], {key: value for key, value in settings.items() if key not in _ONE_KIND_ONLY}


def new_async_connection(kind: type, settings: dict[str, Any]) -> Any:
    """Return a new asyncio connection, not connected yet, that corresponds to these connections for threads.

    Raises TypeError when redis-py has no such class, or a function for threads prepares them.
    """
    if kind not in _ASYNCIO:
        _refuse_fake(kind)
        raise TypeError(
            f"client makes connections of {kind.__module__}.{kind.__qualname__}, which have no counterpart for "
            "asyncio; use a redis.asyncio.Redis, or connections of redis-py's own classes"
        )
    _check_connect_func(settings, of_asyncio=True)
    async_kind = _ASYNCIO[kind]
    known = _parameters_of(async_kind)
    options = {key: value for key, value in settings.items() if key not in _ONE_KIND_ONLY and (key in known or value)}
    if "connection_pool" in options:
        options["connection_pool"] = _SentinelPool(options["connection_pool"])
    # Without a name, a connection that the server refuses can still read the error.
    return async_kind(**options, **nameless(async_kind), retry=Retry(NoBackoff(), 0))


def _refuse_fake(kind: type) -> None:
    if is_fake(kind):
        raise TypeError(
            f"client uses connections of {kind.__module__}.{kind.__qualname__}, which have no socket: with fakeredis "
            "only locks for threads work. Use a real server for asyncio, or switch the locks off with "
            "DJANGO_REDISLOCK = {'ENABLED': False}"
        )


def _check_connect_func(settings: dict[str, Any], of_asyncio: bool) -> None:
    """Refuse a function of the client that prepares connections of the other kind.

    redis-py called it all the same, and awaited nothing: the connection of a task had not sent the password, nor the
    number of its database, so tasks and threads had their locks in two databases.
    """
    function = settings.get("redis_connect_func")
    if function is not None and inspect.iscoroutinefunction(function) is not of_asyncio:
        has, needs = ("threads", "asyncio") if of_asyncio else ("asyncio", "threads")
        raise TypeError(
            f"client has a redis_connect_func for connections of {has}, and this use of locks needs one of {needs}: "
            "other settings of the client, such as credential_provider, are for both"
        )


@lru_cache
def nameless(kind: type) -> dict[str, None]:
    """Return the settings with which a connection of redis-py does not send the name of its library.

    The replies are not needed, and they take two of the three round trips of connecting.
    """
    if not kind.__module__.startswith("redis."):
        return {}
    return {"driver_info": None} if "driver_info" in _parameters_of(kind) else {"lib_name": None, "lib_version": None}


def _parameters_of(kind: type) -> set[str]:
    """Return the names of the parameters with which a connection may be made."""
    # `object.__init__` is no function; to read its signature took a quarter of the CPU of a first miss.
    makers = [base.__init__ for base in kind.__mro__ if inspect.isfunction(base.__init__)]  # type: ignore[misc]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


class _SentinelPool:
    """The pool that redis-py's asyncio connection asks for the primary's address; a thread asks Sentinel meanwhile."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.is_master = True
        self.check_connection = False

    async def get_master_address(self) -> Any:
        return await asyncio.to_thread(self._pool.get_master_address)


# The private parts of redis-py. tests/project/private_names.py names each of them.


def settings_of(pool: Any) -> dict[str, Any]:
    """Return the settings with which a connection pool makes its connections."""
    return pool.connection_kwargs  # type: ignore[no-any-return]


def socket_of(connection: Any) -> socket.socket | None:
    """Return the socket of a connection for threads, None when it is not connected."""
    return connection._sock  # type: ignore[no-any-return]


def transport_of(connection: Any) -> asyncio.Transport:
    """Return the transport of an asyncio connection that is connected."""
    return connection._writer.transport  # type: ignore[no-any-return]


def is_at_end(connection: Any) -> bool:
    """Whether the server has closed an asyncio connection that was connected."""
    return connection._reader.at_eof()  # type: ignore[no-any-return]


def close_at_once(connection: Any) -> None:
    """Close an asyncio connection, connected or not, without waiting."""
    writer = connection._writer
    if writer is not None:
        connection._writer = connection._reader = None
        writer.close()


def end_transport(transport: Any) -> None:
    """Close the socket of a transport whose event loop is closed: asyncio leaves it to the garbage collector."""
    end = getattr(transport, "_call_connection_lost", None)
    with suppress(RuntimeError, OSError):
        if end is not None:
            end(None)
        else:  # with TLS, the server at least is told
            transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def is_of_provider(error: BaseException, connection: Any) -> bool:
    """Whether it is an error of a function that provides the password, such as a token service, and no time limit.

    redis-py passes it on as it is: it came out of a commit that had succeeded, and ended leaders, pages and scrapes,
    which all expect redis-py's errors.
    """
    provides = getattr(connection, "credential_provider", None) or getattr(connection, "redis_connect_func", None)
    return bool(provides) and not isinstance(error, RedisError) and not is_interruption(error)


def forced_host(manager: Any) -> str | None:
    """Return the host that takes the place of the one that Sentinels name, if their client was given one."""
    return getattr(manager, "_force_master_ip", None)  # redis-py 5.0 has no such option


def nodes_of(client: Any) -> tuple[type, dict[str, Any], list[tuple[str, int]], Any]:
    """Return how the client of a Cluster connects to nodes: the class and the settings of connections for threads, the
    addresses of the nodes that it knows, and its function `address_remap` or None.
    """
    manager = client.nodes_manager
    nodes = [*manager.startup_nodes.values(), *manager.nodes_cache.values()]
    addresses = list(dict.fromkeys((node.host, int(node.port)) for node in nodes))
    pools = [node.redis_connection.connection_pool for node in nodes if getattr(node, "redis_connection", None)]
    if pools:
        kind, settings = pools[0].connection_class, dict(settings_of(pools[0]))
        connect = client.user_on_connect_func
        settings["max_connections"] = pools[0].max_connections
    else:  # for asyncio
        connect, own = None, {"redis_connect_func": None}  # redis-py's, which asks for replicas
        kind, settings = sync_connection_kind(nodes[0].connection_class, nodes[0].connection_kwargs | own)
        settings["max_connections"] = nodes[0].max_connections
    for name in ("host", "port", "redis_connect_func"):  # redis-py's own one asks for replicas, and keeps the client
        settings.pop(name, None)
    if connect is not None:
        settings["redis_connect_func"] = partial(_connect, connect)
    return kind, settings, addresses, manager.address_remap


def _connect(then: Any, connection: Any) -> None:
    connection.on_connect()
    then(connection)


def find_new_addresses(client: RedisCluster, addresses: list[tuple[str, int]]) -> None:
    """Have the client ask the nodes at these addresses again, when it reaches none of the nodes that it knows.

    It forgets those that it was given as soon as it knows others. After a restart all pods may have new addresses.
    """
    manager: Any = client.nodes_manager
    initialize = manager.initialize

    def initialize_or_begin_anew(*args: Any, **options: Any) -> None:
        try:
            initialize(*args, **options)
        except RedisClusterException as error:
            if not isinstance(error.__cause__, (ConnectionError, TimeoutError, OSError)):
                raise
            nodes = [ClusterNode(*address) for address in addresses]  # type: ignore[no-untyped-call]
            manager.startup_nodes = {node.name: node for node in nodes}
            initialize()

    manager.initialize = initialize_or_begin_anew


# Before redis-py 6.0 only this class knows the errors of a Cluster; later it is gone.
_Parser: Any = getattr(cluster, "ClusterParser", BaseParser)


def parse_error(line: str) -> RedisError:
    """Return the exception for an error reply, by its first word."""
    return _Parser.parse_error(line)  # type: ignore[no-any-return]


def place_of(pool: Any) -> Hashable:
    """Return the identity of the pool's database. It is equal for two pools of one database with different settings.

    It contains the number of the database and either host and port, or the path of the socket, or the service's name
    and the places of its Sentinels. Host names are compared as they are written.
    """
    options = settings_of(pool)
    database = str(options.get("db") or 0)
    if options.get("server") is not None:  # an object of fakeredis, of which each client has a host name at random
        return "fakeredis", id(options["server"]), database
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None:
        sentinels = frozenset(place_of(sentinel.connection_pool) for sentinel in manager.sentinels)
        return pool.service_name, bool(pool.is_master), sentinels, database
    path = options.get("path")
    if path:
        return str(path), database
    return str(options.get("host") or "localhost"), str(options.get("port") or 6379), database
