"""Nodes that leave the Cluster and stay up, and clients that know different nodes of it."""

from __future__ import annotations

import math

import pytest
import redis.asyncio
from redis.asyncio.cluster import ClusterNode

from django_redislock.core import Lock
from django_redislock.core.driver.registry import server_of
from tests.support import Cluster, RedisServer, free_port, wait_until
from tests.support.locks import RLock


def client_of(*ports: int, **options: object) -> redis.asyncio.RedisCluster:
    """A client that knows only these nodes, because it has asked none."""
    return redis.asyncio.RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", port) for port in ports], **options)


def remove(cluster: Cluster, node: RedisServer) -> None:
    """Do as ``redis-cli --cluster del-node``: the others forget the node, and it forgets the others."""
    gone = cluster.id_of(node)
    for other in cluster.nodes:
        if other is not node:
            cluster.ask(other, "CLUSTER FORGET", gone)
    cluster.ask(node, "CLUSTER RESET SOFT")
    wait_until(lambda: cluster.ask(node, "CLUSTER SLOTS") == [])


@pytest.mark.parametrize("slots", ["no slots", "some slots"])
def test_a_node_that_left_and_answers_with_less_than_is_known_changes_nothing(own_cluster, slots):
    left = own_cluster.nodes[-1]
    client = client_of(left.port)
    held = Lock(client, "held", expire=60)
    held.acquire()
    remove(own_cluster, left)
    if slots == "some slots":
        own_cluster.ask(left, "CLUSTER ADDSLOTSRANGE", 0, 9000)
    table = server_of(client).table
    for number in range(10):
        for node in table.nodes.values():  # it is asked first
            node.failed = 0.0 if node.address[1] != left.port else -math.inf
        table.outdated, table._next_reading = True, -math.inf
        with Lock(client, f"lock-{number}"):
            assert len(table.primaries) == 3
    held.extend()
    held.release()
    if slots == "no slots":
        new = client_of(left.port, own_cluster.nodes[0].port, socket_timeout=4.5)
        table = server_of(new).table  # which knows no owner of a slot
        for address in table.place.seeds | table.place.nodes:
            table.node_at(address).failed = 0.0 if address[1] != left.port else -math.inf
        assert Lock(new, "another").acquire(blocking=False)


@pytest.mark.processes
def test_clients_of_a_cluster_share_the_nodes_that_they_were_given():
    common, gone = free_port(), free_port()
    with Cluster(1) as cluster:
        first = client_of(gone, common)
        server = server_of(first)
        assert server_of(client_of(common, cluster.nodes[0].port)) is server
        with Lock(first, "a"):
            pass


@pytest.mark.processes
def test_asyncio_clients_of_different_nodes_are_recognised_as_those_of_one_cluster():
    with Cluster() as cluster:
        ports = [node.port for node in cluster.nodes]
        first, second = client_of(ports[0]), client_of(ports[1])
        assert server_of(first).place != server_of(second).place, "nobody has asked yet"
        with RLock(first, "a") as outer, RLock(second, "a", timeout=0) as inner:
            assert outer.id == inner.id
        assert server_of(client_of(ports[2])) in (server_of(first), server_of(second))
