"""What the driver takes over from redis-py's clients of a Cluster."""

from __future__ import annotations

import gc
import weakref

import pytest
import redis
import redis.asyncio

from django_redislock.core import Lock
from django_redislock.core.driver.kinds import nodes_of
from django_redislock.core.driver.registry import server_of
from tests.support import wait_until
from tests.support.locks import RLock


def remap(address):
    return address


@pytest.mark.parametrize("kind", [redis.RedisCluster, redis.asyncio.RedisCluster])
def test_the_nodes_and_the_settings_of_a_client_are_taken_over(cluster, kind):
    client = kind.from_url(cluster.url, socket_timeout=3, client_name="mine", address_remap=remap)
    connection_class, settings, addresses, found = nodes_of(client)
    assert connection_class is redis.Connection
    assert (settings["socket_timeout"], settings["client_name"]) == (3, "mine")
    assert ("127.0.0.1", cluster.nodes[0].port) in addresses
    assert found is remap
    server = server_of(client)
    assert (server.timeout, server.settings["client_name"]) == (3, "mine")


def test_clients_that_know_different_nodes_of_one_cluster_hold_the_same_reentrant_lock(cluster):
    with cluster.client() as all_nodes, cluster.client() as without_one:
        del without_one.nodes_manager.nodes_cache[f"127.0.0.1:{cluster.nodes[1].port}"]
        with RLock(all_nodes, "a") as first, RLock(without_one, "a", timeout=0) as second:
            assert first.id == second.id


def test_a_client_that_reads_from_replicas_still_writes_to_primaries(cluster):
    strategies = getattr(redis.cluster, "LoadBalancingStrategy", None)  # of redis-py 5.3
    options = {"load_balancing_strategy": strategies.ROUND_ROBIN} if strategies else {"read_from_replicas": True}
    with redis.RedisCluster.from_url(cluster.url, **options) as client, Lock(client, "a"):
        assert Lock(client, "a").locked()


def test_a_function_that_prepares_each_connection_gets_it_as_the_settings_make_it(cluster):
    names = []

    def prepare(connection):
        connection.send_command("CLIENT", "GETNAME")
        names.append(connection.read_response())

    with redis.RedisCluster.from_url(cluster.url, client_name="mine", redis_connect_func=prepare) as client:
        names.clear()
        with Lock(client, "a"):
            assert set(names) == {b"mine"}
    server = weakref.ref(server_of(client))
    del client
    gc.collect()  # it is in a cycle, and until then the tasks of another test asked the Cluster over it
    wait_until(lambda: server() is None)
