"""Clients by URL, of one server or of a Cluster; `redis+cluster://host:port` names a node of one.

So a test, and the programs that it starts, can be run with their locks on a Cluster.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio

CLUSTER = "redis+cluster://"


class Doors(NamedTuple):
    """The address remap of a client that goes through proxies: port by port."""

    ports: tuple[tuple[int, int], ...]

    def __call__(self, address: tuple[str, int]) -> tuple[str, int]:
        host, port = address
        return host, dict(self.ports).get(port, port)


class AllNodes(redis.RedisCluster):
    """The client of a Cluster whose answers about the whole server are those of all primaries together."""

    def keys(self, pattern: Any = "*", **options: Any) -> Any:
        return super().keys(pattern, target_nodes=self.PRIMARIES)

    def dbsize(self, **options: Any) -> Any:
        return sum(node.redis_connection.dbsize() for node in self.get_primaries())

    def info(self, *sections: str, **options: Any) -> Any:
        found = [node.redis_connection.info(*sections) for node in self.get_primaries()]
        if sections == ("commandstats",):
            calls: Counter[str] = Counter()
            for stats in found:
                calls.update({name: values["calls"] for name, values in stats.items()})
            return {name: {"calls": count} for name, count in calls.items()}
        return found[0] | {
            name: sum(each[name] for each in found) for name, value in found[0].items() if type(value) is int
        }

    def client_list(self, **options: Any) -> Any:
        lists = [(node, node.redis_connection.client_list(**options)) for node in self.get_primaries()]
        return [each | {"id": f"{node.name} {each['id']}"} for node, found in lists for each in found]

    def client_kill_filter(self, **options: Any) -> Any:
        return sum(node.redis_connection.client_kill_filter(**options) for node in self.get_primaries())

    def client_kill(self, address: str, **options: Any) -> Any:
        for node in self.get_primaries():
            with suppress(redis.ResponseError):  # that node has no such client
                node.redis_connection.client_kill(address)
        return True


def client_at(url: str, **options: Any) -> redis.Redis | redis.RedisCluster:
    """Return a new client for threads; close it, or use it in a with statement."""
    return AllNodes(**_of_cluster(url), **options) if url.startswith(CLUSTER) else redis.Redis.from_url(url, **options)


def async_client_at(url: str, **options: Any) -> redis.asyncio.Redis | redis.asyncio.RedisCluster:
    """Return a new client for asyncio; the locks connect by themselves, so there is nothing to close."""
    if url.startswith(CLUSTER):
        return redis.asyncio.RedisCluster(**_of_cluster(url), **options)
    return redis.asyncio.from_url(url, **options)


def _of_cluster(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    doors = parse_qs(parts.query).get("doors", [])
    pairs = [pair.split("-") for pair in "".join(doors).split(",") if pair]
    remap = {"address_remap": Doors(tuple((int(port), int(door)) for port, door in pairs))} if pairs else {}
    return {"host": parts.hostname, "port": parts.port, **remap}


def url_through(ports: dict[int, int]) -> str:
    """Return the URL of a Cluster whose nodes are reached through these ports of this machine."""
    doors = ",".join(f"{port}-{door}" for port, door in ports.items())
    return f"{CLUSTER}127.0.0.1:{next(iter(ports.values()))}?doors={doors}"


def nodes_at(url: str) -> list[int]:
    """Return the ports of the nodes of a Cluster."""
    with redis.RedisCluster(**_of_cluster(url)) as client:
        return [node.port for node in client.get_nodes()]
