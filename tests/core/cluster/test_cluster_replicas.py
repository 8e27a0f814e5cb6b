"""`min_replicas` on a Cluster: the replicas of each node confirm the locks of its slots."""

from __future__ import annotations

import pytest
from redis.crc import key_slot

from django_redislock.core import Lock
from django_redislock.core.driver.registry import close_unused, replicated, server_of
from django_redislock.exceptions import LockBackendError
from tests.support import Cluster, begin_to_wait, counting, key_of, lived, servers_of, wait_until

pytestmark = pytest.mark.processes
NAMES = [f"lock-{number}" for number in range(12)]
TOO_FEW = r"0 of 1 replicas \(min_replicas\) confirmed it within 0.5 s"


@pytest.fixture(scope="module")
def pairs():
    """Two primaries, each with a replica."""
    options = {"cluster_node_timeout": "60000"}  # a paused node is no dead one
    with Cluster(primaries=2, replicas=1, **options) as cluster:
        yield cluster


@pytest.fixture
def cluster(pairs):
    pairs.wait_until_ok()
    pairs.empty()
    yield pairs
    for node in pairs.nodes:
        node.resume()
    close_unused()  # redis-py's clients of Clusters have cycles, and keep our connections until they are collected


@pytest.fixture
def client(cluster):
    with cluster.client() as client:
        for primary in servers_of(client):
            wait_until(lambda primary=primary: primary.execute_command("WAIT", 1, 100) == 1)
        yield client


def replica_of(cluster, name):
    return cluster.nodes[2 + cluster.nodes.index(cluster.owner_of(key_of(name)))]


def waits(client):
    return [primary.info("commandstats").get("cmdstat_wait", {"calls": 0})["calls"] for primary in servers_of(client)]


def test_each_acquisition_is_one_script_and_one_wait_at_the_node_of_the_lock(make_lock, client):
    locks = [make_lock(client, name, min_replicas=1) for name in NAMES]
    for lock in locks:  # so that the scripts are known
        with lock:
            pass
    before = waits(client)
    with counting(client) as ran:
        for lock in locks:
            with lock:
                assert lock.owned()
    assert (ran["evalsha"], ran["wait"]) == (3 * len(NAMES), len(NAMES))
    assert all(after > count for after, count in zip(waits(client), before, strict=True)), "both nodes have some"
    with counting(client) as ran, make_lock(client, "a"):
        pass
    assert ran["wait"] == 0, "without the option it costs nothing"


def test_a_waiter_gets_a_confirmed_lock(make_lock, client):
    with make_lock(client, "a", min_replicas=1):
        waiter = begin_to_wait(client, "a", make_lock(client, "a", min_replicas=1).acquire, timeout=20)
    assert waiter.result(30)


def test_without_the_replica_of_its_node_a_lock_is_given_back_and_others_are_acquired(make_lock, cluster, client):
    silent = replica_of(cluster, "lock-0")
    others = [name for name in NAMES if replica_of(cluster, name) is not silent]
    silent.pause()
    with pytest.raises(LockBackendError, match=TOO_FEW):
        make_lock(client, "lock-0", min_replicas=1).acquire()
    wait_until(lambda: not client.exists(key_of("lock-0")))
    assert others
    for name in others:
        with make_lock(client, name, min_replicas=1):
            pass


def test_renewals_are_confirmed_at_each_node_and_one_that_is_not_ends_at_the_deadline(make_lock, cluster, client):
    locks = {name: make_lock(client, name, expire=1.5, min_replicas=1) for name in NAMES}
    for lock in locks.values():
        assert lock.acquire()
    before = waits(client)
    lived(2.2)
    assert all(lock.lost is None for lock in locks.values())
    assert all(after > count for after, count in zip(waits(client), before, strict=True))
    silent = replica_of(cluster, "lock-0")
    silent.pause()
    concerned = {name for name in NAMES if replica_of(cluster, name) is silent}
    wait_until(lambda: {name for name, lock in locks.items() if lock.lost} == concerned, message="they are lost")
    lived(1.5)
    assert {name for name, lock in locks.items() if lock.lost} == concerned, "the others are renewed"
    assert "confirmed no renewal" in locks["lock-0"].lost.reason
    for name in set(NAMES) - concerned:
        locks[name].release()


def test_it_is_confirmed_by_the_next_owner_when_the_slot_has_moved(make_lock, cluster, client):
    with make_lock(client, "a", min_replicas=1) as lock:
        slot = key_slot(key_of("a"))
        to = next(node for node in cluster.nodes[:2] if node is not cluster.owner_of(slot))
        cluster.move(slot, to)
        lock.extend(20)
    with counting(client) as ran, make_lock(client, "a", min_replicas=1):
        pass
    assert ran["wait"], "also where a node that has not heard of the move is asked first"
    replica_of(cluster, "a").pause()
    with pytest.raises(LockBackendError, match=TOO_FEW):
        make_lock(client, "a", min_replicas=1).acquire()


def test_a_script_that_the_nodes_forgot_is_sent_with_its_text(make_lock, client):
    locks = [make_lock(client, name, expire=1.2, min_replicas=1) for name in NAMES]
    for forget in (True, False):
        if forget:
            client.script_flush()
        for lock in locks:
            lock.acquire()
        client.script_flush()
        lived(2)
        assert all(lock.lost is None for lock in locks)
        for lock in locks:
            lock.release()


def test_locks_of_equal_clients_and_numbers_share_a_cluster_of_their_own(client, cluster):
    with cluster.client() as other:
        one, two = Lock(client, "a", min_replicas=1), Lock(other, "b", min_replicas=1)
        assert one._server is two._server
        assert one._server is not server_of(client)
        assert replicated(server_of(client), 2) is not one._server
