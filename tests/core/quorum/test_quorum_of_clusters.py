"""A Cluster as one of the servers of a quorum lock."""

from __future__ import annotations

import asyncio

import pytest
import redis
import redis.asyncio

from django_redislock.core import AsyncQuorumLock, Lock, QuorumLock
from django_redislock.exceptions import LockBackendError
from tests.support import Cluster, key_of, until, wait_until
from tests.support.locks import held_on

SERVERS = 3
OPTIONS = {"socket_timeout": 5}
NAMES = [f"lock-{number}" for number in range(12)]


@pytest.fixture
def nodes(cluster):
    with cluster.client(**OPTIONS) as nodes:
        yield nodes


def test_it_is_held_on_the_node_of_its_slot_and_on_the_servers(nodes, clients):
    for name in NAMES:
        with QuorumLock([nodes, *clients[:2]], name) as lock:
            assert sum(held_on([nodes, *clients[:2]], name)) >= 2
            assert lock.extend(60)
            assert not QuorumLock([nodes, *clients[:2]], name).acquire(blocking=False)
        wait_until(lambda name=name: held_on([nodes, *clients[:2]], name) == [0, 0, 0])


@pytest.mark.parametrize("kind", [redis.RedisCluster, redis.asyncio.RedisCluster])
async def test_tasks_hold_it_and_wait_for_it_too(cluster, nodes, clients, kind, calls):
    mixed = [kind.from_url(cluster.url, **OPTIONS), *clients[:2]]
    async with AsyncQuorumLock(mixed, "a") as held:
        before = calls()
        waiter = asyncio.create_task(AsyncQuorumLock(mixed, "a").acquire(timeout=20))
        await until(lambda: calls() > before)
        assert not waiter.done()
        held.raise_if_lost()
    assert await waiter


def test_the_cluster_counts_as_one_server_and_its_lock_is_renewed(nodes, clients):
    with Lock(nodes, "a", expire=60), Lock(clients[0], "a", expire=60):
        assert not QuorumLock([nodes, *clients[:2]], "a").acquire(timeout=0.2)
    held = QuorumLock([nodes, *clients[:2]], "a", expire=1.2)
    assert held.acquire()
    wait_until(lambda: held_on([nodes, *clients[:2]]) == [1, 1, 1])
    first = nodes.get(key_of("a"))
    wait_until(lambda: nodes.pttl(key_of("a")) < 900)
    wait_until(lambda: nodes.pttl(key_of("a")) > 1000, message="it was renewed")
    assert nodes.get(key_of("a")) == first
    held.release()


@pytest.mark.slow
def test_without_the_node_of_its_slot_the_others_suffice(clients):
    with Cluster(cluster_require_full_coverage="no", cluster_node_timeout="60000") as cluster:
        nodes = redis.asyncio.RedisCluster.from_url(cluster.url, **OPTIONS)
        held = QuorumLock([nodes, *clients[:2]], "a", expire=20)
        with held:
            cluster.owner_of(key_of("a")).kill()
            assert held.extend(30)
        with QuorumLock([nodes, *clients[:2]], "a"):
            pass
        clients[1].connection_pool.disconnect()
        with pytest.raises(LockBackendError):
            Lock(nodes, "a").acquire(timeout=0.2)


def test_the_same_cluster_counts_once(cluster, clients):
    ports = [node.port for node in cluster.nodes]
    one, other = (redis.asyncio.RedisCluster(host="127.0.0.1", port=port) for port in ports[:2])
    everything = cluster.client()
    with everything, pytest.raises(ValueError, match="at least three different servers"):
        QuorumLock([one, everything, *clients[:2]], "a")
    with cluster.nodes[0].client() as node, pytest.raises(ValueError, match="at least three different servers"):
        QuorumLock([one, node, *clients[:2]], "a")
    assert QuorumLock([one, *clients[:2]], "a")
    assert other
