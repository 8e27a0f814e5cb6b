"""From the URL of the settings to a redis-py client."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from redis import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url

CLUSTER_PORT = 6379


def client_from_url(url: str) -> Redis | RedisCluster:
    """Return a new client of the server at this URL, or of the Cluster; opens no connection.

    ``redis+cluster://user:password@host1:6379,host2:6379`` names nodes of a Cluster, of which one must answer, and
    ``rediss+cluster`` uses TLS. The options after a question mark are redis-py's. The client of a Cluster is one for
    asyncio, because redis-py's other one asks a node when it is made.

    Raises ValueError that says what is wrong, without the URL's password.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("redis+cluster", "rediss+cluster"):
        return Redis.from_url(url)
    place, _, query = rest.partition("?")
    netloc, _, database = place.partition("/")
    if database not in ("", "0"):
        raise ValueError(f"a Cluster has no database but 0, so there must be nothing after the hosts, not {database!r}")
    credentials, at, hosts = netloc.rpartition("@")
    nodes = [ClusterNode(*_host_and_port(host, CLUSTER_PORT, "a node")) for host in hosts.split(",")]
    options: dict[str, Any] = {**parse_url(f"redis://{credentials}{at}any?{query}")}
    del options["host"]
    try:
        return RedisCluster(startup_nodes=nodes, ssl=scheme == "rediss+cluster", **options)
    except TypeError as error:  # an unknown option
        raise ValueError(str(error)) from error


def _host_and_port(text: str, port: int, of: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.netloc == text:
            return parts.hostname, parts.port or port
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not host:port of {of}")
