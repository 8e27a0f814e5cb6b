from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, Self

import pytest
import redis
from redis.crc import key_slot

from .clients import CLUSTER, client_at
from .servers import RedisServer, free_port
from .waiting import wait_until

SLOTS = 16384
ON_A_CLUSTER = bool(os.environ.get("REDISLOCK_TEST_CLUSTER"))
"""Whether the tests of the lock and of its tasks are run with their locks on a Cluster."""


def leave_out(config: pytest.Config, items: list[pytest.Item], folder: str, why: dict[str, str]) -> None:
    """If the tests are run on a Cluster, leave out those whose folder, file or name is among the keys of `why`."""
    left_out = [
        item
        for item in items
        if ON_A_CLUSTER
        and item.nodeid.startswith(f"{folder}/")
        and not why.keys().isdisjoint((item.path.parent.name, item.path.name, getattr(item, "originalname", item.name)))
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


class OneNode(RedisServer):
    """A Cluster of one node, which can do what a server can."""

    def __init__(self, **options: str) -> None:
        super().__init__(cluster_enabled="yes", cluster_port=str(free_port()), **options)

    def _start(self, port: int) -> None:
        super()._start(port)
        with redis.Redis(unix_socket_path=str(self.unix_socket)) as client:
            if client.execute_command("CLUSTER INFO")["cluster_slots_assigned"] == "0":
                client.execute_command("CLUSTER ADDSLOTSRANGE", 0, SLOTS - 1)
            wait_until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


class OneNodeOfLocks(OneNode):
    """A Cluster of one node whose clients are those of a Cluster."""

    @property
    def url(self) -> str:
        return f"{CLUSTER}127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:
        return client_at(self.url, **options)


class Cluster:
    """The nodes of a real Cluster: so many primaries, each with so many replicas. Use it in a with statement.

    Options are those of `RedisServer`: ``Cluster(replicas=1, cluster_node_timeout="1000")`` fails over within seconds.
    A function, as in ``tls_port=free_port``, is called for each node.
    """

    def __init__(self, primaries: int = 3, replicas: int = 0, **options: Any) -> None:
        self._primaries = primaries
        self._replicas = replicas
        self._options = options
        self._stack = ExitStack()
        self._clients: dict[RedisServer, redis.Redis] = {}
        self.nodes: list[RedisServer] = []
        """The primaries, then the replicas of the first one, of the second one, …, as they were in the beginning."""

    def __enter__(self) -> Self:
        with self._stack as stack:
            for _ in range(self._primaries * (1 + self._replicas)):
                own = {name: str(value()) if callable(value) else value for name, value in self._options.items()}
                options = own | {"cluster_enabled": "yes", "cluster_port": str(free_port())}
                self.nodes.append(stack.enter_context(RedisServer(**options)))
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _join(self) -> None:
        first, primaries = self.nodes[0], self.nodes[: self._primaries]
        for number, node in enumerate(primaries):
            start, end = (SLOTS * each // self._primaries for each in (number, number + 1))
            self.ask(node, "CLUSTER SET-CONFIG-EPOCH", number + 1)
            self.ask(node, "CLUSTER ADDSLOTSRANGE", start, end - 1)
        for node in self.nodes[1:]:
            self.ask(node, "CLUSTER MEET", "127.0.0.1", first.port, first.options["cluster_port"])
        wait_until(lambda: all(len(self.known_to(node)) == len(self.nodes) for node in self.nodes))
        for number, node in enumerate(self.nodes[self._primaries :]):
            self.ask(node, "CLUSTER REPLICATE", self.id_of(primaries[number // self._replicas]))
        self.wait_until_ok()

    @property
    def url(self) -> str:
        """The URL of one of the nodes."""
        return self.nodes[0].url

    def client(self, **options: Any) -> redis.RedisCluster:
        """Return a new client; close it, or use it in a with statement."""
        return redis.RedisCluster.from_url(next(node for node in self.nodes if node.process is not None).url, **options)

    def empty(self) -> None:
        """Delete everything on every primary."""
        for node in self.nodes:
            if node.process is not None and self.ask(node, "ROLE")[0] in (b"master", "master"):
                self.ask(node, "FLUSHALL")

    def ask(self, node: RedisServer, *command: Any) -> Any:
        """Return a node's reply to a command."""
        return self.client_of(node).execute_command(*command)

    def client_of(self, node: RedisServer) -> redis.Redis:
        """Return the client of one node. It is kept, because connecting takes much longer than a command."""
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = self._stack.enter_context(node.client())
        return client

    def id_of(self, node: RedisServer) -> str:
        """Return the id of a node in the Cluster."""
        return str(self.ask(node, "CLUSTER MYID").decode())

    def known_to(self, node: RedisServer) -> dict[str, dict[str, Any]]:
        """Return what a node knows of all nodes, by their addresses, without those that it has not met yet."""
        known: dict[str, dict[str, Any]] = self.ask(node, "CLUSTER NODES")
        return {address: each for address, each in known.items() if "handshake" not in each["flags"]}

    def owner_of(self, slot: int | str | bytes) -> RedisServer:
        """Return the node that has this slot, or the slot of this key."""
        number = slot if isinstance(slot, int) else key_slot(slot.encode() if isinstance(slot, str) else slot)
        for node in self.nodes:
            if node.process is not None:
                for address, each in self.known_to(node).items():
                    if any(int(part[0]) <= number <= int(part[-1]) for part in each["slots"]):
                        return next(found for found in self.nodes if address.endswith(f":{found.port}"))
                break
        raise AssertionError(f"nobody has slot {number}")

    def wait_until_ok(self) -> None:
        """Wait until the nodes that run agree that all slots are served, and all replicas follow their primaries."""

        def settled() -> bool:
            running = [node for node in self.nodes if node.process is not None]
            views = set()
            for node in running:
                if self.ask(node, "CLUSTER INFO")["cluster_state"] != "ok":
                    return False
                info = self.ask(node, "INFO", "replication")
                if info["role"] == "slave" and info["master_link_status"] != "up":
                    return False
                slots = {address: each["slots"] for address, each in self.known_to(node).items() if each["slots"]}
                views.add(repr(sorted((address, str(each)) for address, each in slots.items())))
            return len(views) == 1

        wait_until(settled, message="the nodes of the Cluster agree")

    def _epochs_are_known(self) -> bool:
        """Whether all nodes know the epochs of all primaries, of which no two are the same.

        A new owner takes the next epoch without asking the others. If another node has it already, one of the two takes
        a later one, and its claim to a slot that it is about to give away goes before the claim of the new owner.
        """
        views = set()
        for node in self.nodes:
            if node.process is not None:
                known = self.known_to(node).values()
                primaries = [each for each in known if "master" in each["flags"] and "fail" not in each["flags"]]
                views.add(tuple(sorted((int(each["epoch"]), each["node_id"]) for each in primaries)))
        return len(views) == 1 and all(len({epoch for epoch, _ in view}) == len(view) for view in views)

    def begin_move(self, slot: int, to: RedisServer) -> RedisServer:
        """Let a slot begin to move; return its owner. Both nodes answer for their part of its keys from now on."""
        wait_until(self._epochs_are_known, message="all nodes know the epochs of all primaries")
        owner = self.owner_of(slot)
        self.ask(to, "CLUSTER SETSLOT", slot, "IMPORTING", self.id_of(owner))
        self.ask(owner, "CLUSTER SETSLOT", slot, "MIGRATING", self.id_of(to))
        return owner

    def end_move(self, slot: int, owner: RedisServer, to: RedisServer) -> None:
        """Move the keys of the slot, and the slot itself."""
        while keys := self.ask(owner, "CLUSTER GETKEYSINSLOT", slot, 100):
            self.ask(owner, "MIGRATE", "127.0.0.1", to.port, "", 0, 10_000, "KEYS", *keys)
        for node in dict.fromkeys((to, owner, *self.nodes[: self._primaries])):  # as redis-cli does
            self.ask(node, "CLUSTER SETSLOT", slot, "NODE", self.id_of(to))

    def move(self, slot: int, to: RedisServer) -> None:
        """Move a slot with its keys to another node."""
        self.end_move(slot, self.begin_move(slot, to), to)


class ClusterOfLocks(Cluster):
    """A Cluster that takes the place of one server, in the tests that can be run on either."""

    @property
    def url(self) -> str:
        return f"{CLUSTER}127.0.0.1:{self.nodes[0].port}"

    def client(self, **options: Any) -> redis.RedisCluster:
        """Return a client whose answers about the whole server are those of all primaries together."""
        return client_at(self.url, **options)  # type: ignore[return-value]
