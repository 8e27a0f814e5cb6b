from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter

import redis


def command_counts(client: redis.Redis | redis.RedisCluster) -> Counter[str]:
    """Return how often the servers ran each command (``"evalsha"``, ``"client|list"``), also those inside scripts."""
    counts: Counter[str] = Counter()
    for server in servers_of(client):
        stats = server.info("commandstats")
        counts.update({name.removeprefix("cmdstat_"): values["calls"] for name, values in stats.items()})
    return counts


def servers_of(client: redis.Redis | redis.RedisCluster) -> list[redis.Redis]:
    """Return the client, or a client of each primary of a Cluster."""
    if isinstance(client, redis.RedisCluster):
        return [node.redis_connection for node in client.get_primaries()]
    return [client]


def server_of_key(client: redis.Redis | redis.RedisCluster, key: str) -> redis.Redis:
    """Return the client, or a client of the primary that has the key."""
    if isinstance(client, redis.RedisCluster):
        return client.get_node_from_key(key).redis_connection
    return client


@contextmanager
def counting(client: redis.Redis | redis.RedisCluster) -> Iterator[Counter[str]]:
    """Give a counter that holds, after the block, how often each command ran within it.

    Commands inside scripts are counted too; ask for ``counts["evalsha"]``, or use `monitoring`.
    """
    difference: Counter[str] = Counter()
    before = command_counts(client)
    yield difference
    difference.update(command_counts(client) - before)
    del difference["info"]


@contextmanager
def monitoring(client: redis.Redis | redis.RedisCluster) -> Iterator[list[str]]:
    """Give a list that holds, after the block, each command line that clients sent in it, without those of scripts."""
    sent: list[str] = []
    timed: list[tuple[float, str]] = []
    with ExitStack() as stack:
        for server in servers_of(client):
            stack.enter_context(_monitoring(server, timed))
        yield sent
    sent += [command for _, command in sorted(timed, key=itemgetter(0))]


@contextmanager
def _monitoring(client: redis.Redis, timed: list[tuple[float, str]]) -> Iterator[None]:
    sent: list[tuple[float, str]] = []
    start, end = str(uuid.uuid4()), str(uuid.uuid4())
    with client.monitor() as monitor:

        def listen() -> None:
            for command in monitor.listen():
                if command["command"] == f"ECHO {start}":
                    sent.clear()
                elif command["command"] == f"ECHO {end}":
                    return
                elif command["client_type"] != "lua":
                    sent.append((command["time"], command["command"]))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        client.echo(start)  # may connect anew, for the monitor took a connection
        try:
            yield
        finally:
            client.echo(end)
            thread.join(timeout=10)
            timed += sent
        assert not thread.is_alive(), "the monitor has not seen the end of its own block"
