"""Nodes that die, cannot be reached, or are no Cluster."""

from __future__ import annotations

import math
import time

import pytest
import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode

from django_redislock.core import Lock, held_locks, scripts
from django_redislock.core.driver import effects
from django_redislock.core.driver.cluster.routes import route_each
from django_redislock.core.driver.effects import ScriptCall
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.core.listing import contention, list_locks
from django_redislock.core.operations import count
from django_redislock.exceptions import LockBackendError
from tests.support import BUSY, Cluster, RedisServer, begin_to_wait, free_port, wait_until

NAMES = [f"lock-{number}" for number in range(40)]


def at_node(cluster: Cluster, node: RedisServer, names: list[str] = NAMES) -> list[str]:
    return [name for name in names if cluster.owner_of(lock_keys("redislock", name).lock) is node]


@pytest.mark.parametrize(("known", "asked"), [(False, 2), (True, 1)], ids=["cold", "known"])
def test_who_asks_where_a_slot_is_waits_for_two_silent_nodes_at_most_and_for_one_that_knows_an_owner(known, asked):
    """Each costs its caller a socket timeout, and a Cluster may have a hundred nodes."""
    table = server_of(
        redis.asyncio.RedisCluster(startup_nodes=[ClusterNode(f"of-{asked}", port) for port in range(1, 7)])
    ).table
    if known:
        table._owners[0] = table.node_at((f"of-{asked}", 1))
    table.outdated = True

    def ask():
        finding, nodes = table.find_owner(0), []
        with pytest.raises(StopIteration if known else redis.TimeoutError):
            nodes.append(next(finding).node)
            while True:
                nodes.append(finding.throw(redis.TimeoutError("silent")).node)
        return nodes

    first = ask()
    assert len(first) == asked
    table._next_reading = -math.inf
    assert not set(ask()) & set(first), "it begins with the others"


def test_a_killed_primary_delays_its_own_locks_only_and_loses_none_that_were_replicated(make_lock, own_cluster):
    with own_cluster.client() as client:
        primary = own_cluster.nodes[0]
        its_names = at_node(own_cluster, primary)
        locks = {name: make_lock(client, name, expire=30) for name in NAMES}
        for lock in locks.values():
            lock.acquire()
        replica = own_cluster.nodes[3]
        wait_until(lambda: held_at(replica) == held_at(primary) > 0)
        waiter = begin_to_wait(client, its_names[0], make_lock(client, its_names[0]).acquire, timeout=60)
        primary.kill()
        began = time.monotonic()
        for name, lock in locks.items():
            if name not in its_names:
                lock.extend(40)
        assert time.monotonic() - began < BUSY
        for name in its_names:
            locks[name].extend(40)  # after the failover
        assert all(lock.lost is None for lock in locks.values())
        locks[its_names[0]].release()
        assert waiter.result(1 + BUSY)
        for name in NAMES:
            if name != its_names[0]:
                locks[name].release()


def held_at(node: RedisServer) -> int:
    with node.client() as client:
        return sum(client.execute_command("CLUSTER COUNTKEYSINSLOT", slot) for slot in range(16384 // 3))


@pytest.mark.processes
def test_a_node_that_does_not_answer_is_named_and_the_locks_of_the_others_are_shown():
    with (
        Cluster(cluster_require_full_coverage="no", cluster_node_timeout="60000") as cluster,
        cluster.client() as client,
    ):
        for name in NAMES:
            Lock(client, name, expire=60).acquire()
        dead = cluster.nodes[1]
        lost = at_node(cluster, dead)
        dead.kill()
        missing: dict[str, str] = {}
        listed = [stored.name for stored in list_locks(client, "redislock", retry_for=0, missing=missing)]
        assert set(listed) == set(NAMES) - set(lost)
        assert list(missing) == [f"127.0.0.1:{dead.port}"]
        assert "refused" in missing[f"127.0.0.1:{dead.port}"]
        missing.clear()
        server = server_of(client)
        assert server.run(count(server, "redislock", 0, missing)).locks == len(listed)
        assert list(missing) == [f"127.0.0.1:{dead.port}"]
        missing.clear()
        contention(client, retry_for=0, missing=missing)
        assert list(missing) == [f"127.0.0.1:{dead.port}"]
        with pytest.raises(LockBackendError, match="refused"):
            list(list_locks(client, "redislock", retry_for=0))


def test_a_node_that_did_not_answer_lately_is_asked_last(client):
    for name in NAMES:
        with Lock(client, name):
            pass
    server = server_of(client)
    calls = tuple(ScriptCall(scripts.COUNT, (lock_keys("redislock", name).held,), ()) for name in NAMES)
    for node in server.table.primaries:
        before, node.failed = node.failed, math.inf
        asked = next(route_each(server.table, calls))
        assert len(asked.effects) == 3
        assert asked.effects[-1].node is node
        node.failed = before


@pytest.mark.slow
def test_nodes_with_addresses_that_nobody_can_reach_are_an_error_at_the_first_call_that_says_what_to_do():
    with Cluster() as cluster:
        ports = {node.port: free_port() for node in cluster.nodes}
        for node in cluster.nodes:
            cluster.ask(node, "CONFIG SET", "cluster-announce-port", ports[node.port])
        wait_until(lambda: all(set(known_ports(cluster, node)) == set(ports.values()) for node in cluster.nodes))
        nodes = redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port)
        began = time.monotonic()
        with pytest.raises(LockBackendError, match=r"none of them can be reached from here.*address_remap"):
            Lock(nodes, "a").acquire(blocking=False)
        assert time.monotonic() - began < BUSY
        back = {("127.0.0.1", announced): ("127.0.0.1", port) for port, announced in ports.items()}
        mapped = redis.asyncio.RedisCluster(
            host="127.0.0.1", port=cluster.nodes[0].port, address_remap=lambda address: back.get(address, address)
        )
        for name in NAMES:
            with Lock(mapped, name):
                pass


def known_ports(cluster: Cluster, node: RedisServer) -> list[int]:
    return [int(address.rpartition(":")[2]) for address in cluster.known_to(node)]


def test_a_server_that_is_no_cluster_is_an_error_that_says_so(own_server):
    nodes = redis.asyncio.RedisCluster(host="127.0.0.1", port=own_server.port)
    with pytest.raises(LockBackendError, match="cluster support disabled"):
        Lock(nodes, "a").acquire(blocking=False)


def test_no_node_at_all_is_an_error_within_the_time_for_retries(monkeypatch):
    monkeypatch.setattr(effects, "retry_for", 0.2)
    nodes = redis.asyncio.RedisCluster(host="127.0.0.1", port=free_port())
    with pytest.raises(LockBackendError, match="refused"):
        Lock(nodes, "a").acquire(blocking=False)
    with pytest.raises(LockBackendError, match="refused"):
        list(held_locks(nodes))


def test_an_unreachable_cluster_is_tried_for_longer_than_a_failover_takes(cluster):
    assert server_of(redis.asyncio.RedisCluster.from_url(cluster.url)).retry_for == 40


def test_a_client_of_one_node_is_told_to_use_one_of_the_cluster(cluster):
    with cluster.nodes[0].client() as client, pytest.raises(LockBackendError, match=r"use a redis\.RedisCluster"):
        for name in NAMES:
            Lock(client, name).acquire(blocking=False)
