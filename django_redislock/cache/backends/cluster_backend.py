"""The backend for a Redis or Valkey Cluster, on django-redis's; import it from `django_redislock.cache`.

It is the backend of one server with another client: redis-py's `RedisCluster` finds the node of each key. That client
asks a node when it is made. So leases and locks take their settings from redis-py's asyncio client, which does not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import cached_property
from django_redis.client import DefaultClient  # type: ignore[import-untyped]
from django_redis.exceptions import ConnectionInterrupted  # type: ignore[import-untyped]
from redis import RedisCluster
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode, RedisCluster as AsyncRedisCluster
from redis.cluster import REDIS_ALLOWED_KEYS, ClusterNode
from redis.connection import parse_url
from redis.exceptions import ClusterError, ConnectionError, RedisClusterException, RedisError, ResponseError

from ...core.driver.kinds import find_new_addresses, identity
from ...core.driver.process import after_in_child, notice_fork
from .django_redis_backend import RedisCache

F = TypeVar("F", bound=Callable[..., Any])

CLIENT_OPTIONS = frozenset(inspect.signature(RedisCluster.__init__).parameters) | set(REDIS_ALLOWED_KEYS)
ASYNC_OPTIONS = frozenset(inspect.signature(AsyncRedisCluster.__init__).parameters) - {"retry"}
OF_ONE_SERVER = (
    *("CLIENT_CLASS", "CONNECTION_FACTORY", "CONNECTION_POOL_CLASS", "REDIS_CLIENT_CLASS", "PARSER_CLASS"),
    *("SENTINELS", "SENTINEL_KWARGS", "REPLICA_READ_ONLY"),
)
"""Options of django-redis that choose the client or the servers."""


class ClusterCache(RedisCache):
    """django-redis's backend for a Redis or Valkey Cluster, with a `get_or_set` that computes once.

    ``LOCATION`` is the URL of one node, or a list of URLs of which one must answer; the first one's user, password and
    TLS are used for all nodes. ``OPTIONS`` are those of django-redis and, in lower case, those of `redis.RedisCluster`.

    Raises ImproperlyConfigured for wrong URLs and options, and at the first use when a URL leads to no Cluster.
    """

    more_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, server: Any, params: dict[str, Any]) -> None:
        super().__init__(server, params)
        self._client_cls = NodesClient

    def check_settings(self) -> None:
        """Raise ImproperlyConfigured for wrong URLs and options; open no connection."""
        self.client.get_unconnected_client()

    def _client_for(self, redis_key: str, write: bool = True) -> Any:
        return self.client.get_unconnected_client()

    def _clients_to_scan(self) -> list[Any]:
        try:
            return [self.client.get_client()]
        except ConnectionInterrupted as error:
            raise error.__cause__ from None


class NodesClient(DefaultClient):  # type: ignore[misc]
    """django-redis's client class, over one `RedisCluster` for all threads of the process."""

    def __init__(self, server: Any, params: dict[str, Any], backend: Any) -> None:
        given = params.get("OPTIONS", {})
        options = {**given, "CONNECTION_FACTORY": "django_redis.pool.ConnectionFactory"}  # it is not used
        super().__init__(server, {**params, "OPTIONS": options}, backend)
        nodes = Nodes([url.strip() for url in self._server], given)
        self.nodes = _known.setdefault(nodes.identity, nodes)

    def get_client(self, write: bool = True, tried: object = None) -> RedisCluster:
        """Return the client, which connects when it is made."""
        try:
            return self.nodes.client()
        except RedisError as error:
            raise ConnectionInterrupted(connection=None) from error

    def get_client_with_index(self, write: bool = True, tried: object = None) -> tuple[RedisCluster, int]:
        """Return the client, and the number of its server as django-redis counts them."""
        return self.get_client(), 0

    def get_unconnected_client(self) -> AsyncRedisCluster:
        """Return a client that is not connected. Locks take the addresses and the settings of the nodes from it."""
        return self.nodes.unconnected

    def do_close_clients(self) -> None:
        """Close the connections after a request, with CLOSE_CONNECTION."""
        if self.nodes.connected is not None:
            self.nodes.connected.disconnect_connection_pools()  # type: ignore[no-untyped-call]


class Nodes:
    """The addresses and options of a Cluster, and the clients that find its nodes: one for each process.

    `options` are those of the cache. Raises ImproperlyConfigured for wrong URLs and options.
    """

    def __init__(self, urls: list[str], options: dict[str, Any]) -> None:
        senseless = [name for name in OF_ONE_SERVER if name in options]
        if senseless:
            raise ImproperlyConfigured(
                f"ClusterCache has no option {senseless[0]!r}, because redis.RedisCluster finds its servers itself. "
                "Remove it; options of redis.RedisCluster are given in lower case."
            )
        credentials = ("USERNAME", "PASSWORD", "SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT")
        own = {name.lower(): options[name] for name in credentials if options.get(name)}
        own |= options.get("CONNECTION_POOL_KWARGS", {}) | options.get("REDIS_CLIENT_KWARGS", {})
        own |= {name: value for name, value in options.items() if name.islower()}
        unknown = own.keys() - CLIENT_OPTIONS
        if unknown:
            raise ImproperlyConfigured(f"redis.RedisCluster has no option {min(unknown)!r}.")
        self._url = urls[0]
        self._addresses = [_address_of(url) for url in urls]
        self._options = own
        self.identity = identity([urls, own])
        self.connected: CacheCluster | None = None

    def client(self) -> CacheCluster:
        """Return the client that has asked one of the nodes for all nodes of the Cluster.

        Raises ConnectionError when none answers, and ImproperlyConfigured when one refuses to name the nodes.
        """
        notice_fork()
        if self.connected is not None:
            return self.connected
        others = [ClusterNode(*address) for address in self._addresses[1:]]  # type: ignore[no-untyped-call]
        try:
            client = CacheCluster(url=self._url, startup_nodes=others, **self._options)
            find_new_addresses(client, self._addresses)
            self.connected = client
            return client
        except RedisClusterException as error:
            refusal = next((each for each in _chain(error) if isinstance(each, ResponseError)), None)
            if refusal is None:
                raise ConnectionError(str(error)) from error
            asked = ", ".join(f"{host}:{port}" for host, port in self._addresses)
            raise ImproperlyConfigured(
                f"ClusterCache asked {asked} for the nodes of a Cluster, and the answer was: {refusal}. If it is no "
                "Cluster, use the backend 'django_redislock.cache.RedisCache'. If it is one, let the user run CLUSTER "
                "SLOTS."
            ) from error

    @cached_property
    def unconnected(self) -> AsyncRedisCluster:
        """A client for asyncio with the same settings, which is never connected."""
        parts = parse_url(self._url)  # type: ignore[no-untyped-call]
        options = self._options | {name: value for name, value in parts.items() if name not in ("host", "port", "db")}
        options["ssl"] = "connection_class" in parts  # of a rediss URL
        known = {name: value for name, value in options.items() if name in ASYNC_OPTIONS}
        return AsyncRedisCluster(
            startup_nodes=[AsyncClusterNode(host, port) for host, port in self._addresses], **known
        )


def _address_of(url: str) -> tuple[str, int]:
    try:
        parts = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ImproperlyConfigured(f"The LOCATION of a ClusterCache has a wrong URL: {error}") from error
    if parts.get("db") or not parts.get("host"):
        raise ImproperlyConfigured(
            "A URL in the LOCATION of a ClusterCache must name the host of a node, and no database but 0, because a "
            "Cluster has only that one. Keep applications apart by KEY_PREFIX."
        )
    return parts["host"], parts.get("port", 6379)


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    """Yield the error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def as_redis_error(function: F) -> F:
    """Return the function; it raises ConnectionError in place of an error of redis-py that is no RedisError."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ResponseError:
            raise
        except (RedisClusterException, ClusterError) as error:
            raise ConnectionError(str(error)) from error

    return call  # type: ignore[return-value]


class CacheCluster(RedisCluster):
    """redis-py's client of a Cluster, with the commands that django-redis sends for keys of several slots."""

    execute_command = as_redis_error(RedisCluster.execute_command)

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> Any:
        """Return a pipeline without a transaction: a Cluster has none over several slots."""
        pipeline: Any = super().pipeline()  # type: ignore[no-untyped-call]
        pipeline.execute = as_redis_error(pipeline.execute)
        return pipeline

    def mget(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the values of keys in any slots."""
        return self.mget_nonatomic(keys, *args)

    def keys(self, pattern: Any = "*", **kwargs: Any) -> Any:
        """Return the keys of all primaries."""
        return super().keys(pattern, target_nodes=RedisCluster.PRIMARIES)


_known: dict[Any, Nodes] = {}
"""The nodes by URLs and options, because Django makes a backend for every thread and task."""
_inherited: list[CacheCluster | None] = []
"""The parent's clients. A thread of the parent may hold one of their locks, so they are not even destroyed."""


def _after_fork() -> None:
    for nodes in _known.values():
        _inherited.append(nodes.connected)
        nodes.connected = None


after_in_child("cluster clients", _after_fork)
