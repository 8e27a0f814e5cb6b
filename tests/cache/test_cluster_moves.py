"""One value wanted by many processes on a Cluster: one computes it, also while its slot moves or its primary dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis.crc import key_slot

from tests.support import Cluster, cache_programs, wait_until
from tests.support.cache_programs import cache_at

SLOT = key_slot(b":1:k")


def another_node(cluster: Cluster, slot: int = SLOT):
    owner = cluster.owner_of(slot)
    return next(node for node in cluster.nodes if node is not owner)


def queued(client):
    queues = client.keys("*:queue:cache::1:k", target_nodes="primaries")
    return sum(client.zcard(queue) for queue in queues)


@pytest.fixture(params=[False, True], ids=["threads", "tasks"])
def asking(request, run_python):
    """``asking(cluster, 3)`` lets one process compute "k" and three others wait for it, and returns the four."""

    def start(cluster, others):
        processes = [
            run_python(cache_programs.ask, cluster.url, "ClusterCache", "k", f"by {number}", {}, None, request.param)
            for number in range(1 + others)
        ]
        for process in processes:
            process.wait_for(event="ready")
        processes[0].send("ask")
        processes[0].wait_for(event="computing")
        for process in processes[1:]:
            process.send("ask")
        with cluster.client() as client:
            wait_until(lambda: queued(client) == others)
        return processes

    return start


def all_have_the_value_of_the_first(processes):
    for process in processes:
        assert process.wait_for(event="got")["value"] == "by 0"
    computed = [line for process in processes for line in process.lines if line["event"] == "computing"]
    assert len(computed) == 1


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "moving"])
def test_a_value_that_is_computed_while_its_slot_moves_is_stored_once_and_sent_to_all(cluster, asking, moved):
    processes = asking(cluster, 3)
    to = another_node(cluster)
    owner = cluster.begin_move(SLOT, to)
    if moved:
        cluster.end_move(SLOT, owner, to)
    processes[0].send()
    if not moved:
        cluster.end_move(SLOT, owner, to)
    all_have_the_value_of_the_first(processes)
    assert cache_at(cluster.url, "ClusterCache").get("k") == "by 0"


@pytest.mark.parametrize("failed_over", [True, False], ids=["after the failover", "before it"])
def test_when_the_primary_of_the_value_dies_the_computation_goes_on_at_its_replica(own_cluster, asking, failed_over):
    """The value may be ready while no primary has its slot."""
    processes = asking(own_cluster, 3)
    owner = own_cluster.owner_of(SLOT)
    assert own_cluster.ask(owner, "WAIT", 1, 5000) == 1
    owner.kill()
    if failed_over:
        wait_until(lambda: own_cluster.owner_of(SLOT) is not owner)
    processes[0].send()
    all_have_the_value_of_the_first(processes)


KEYS = [f"k{number}" for number in range(20)]
VALUES = {key: f"v of {key}" for key in KEYS}
SLOT_OF_ONE = key_slot(b":1:k7")


@pytest.mark.parametrize("moved", [False, True], ids=["moving", "moved"])
def test_many_values_are_read_where_one_of_their_slots_moves_to(cluster, moved):
    cache = cache_at(cluster.url, "ClusterCache")
    cache.set_many(VALUES, 60)
    assert cache.get_or_set_many(KEYS, pytest.fail, 60) == VALUES
    to = another_node(cluster, SLOT_OF_ONE)
    owner = cluster.begin_move(SLOT_OF_ONE, to)
    if not moved:  # the value is already there, so the owner sends its reader on
        cluster.ask(owner, "MIGRATE", "127.0.0.1", to.port, ":1:k7", 0, 5000)
    else:
        cluster.end_move(SLOT_OF_ONE, owner, to)
    assert cache.get_or_set_many(KEYS, pytest.fail, 60) == VALUES
    if not moved:
        cluster.end_move(SLOT_OF_ONE, owner, to)


def test_to_read_many_values_fails_as_long_as_one_of_them_has_no_primary(own_cluster):
    """As the reads of the base class do. The failure is also what makes the cache look for the new primary."""
    cache = cache_at(own_cluster.url, "ClusterCache")
    cache.set_many(VALUES, 60)
    assert cache.get_or_set_many(KEYS, pytest.fail, 60) == VALUES
    owner = own_cluster.owner_of(SLOT_OF_ONE)
    assert own_cluster.ask(owner, "WAIT", 1, 5000) == 1
    owner.kill()
    with pytest.raises(redis.ConnectionError):
        cache.get_or_set_many(KEYS, pytest.fail, 60)
    wait_until(lambda: own_cluster.owner_of(SLOT_OF_ONE) is not owner)
    own_cluster.wait_until_ok()  # a node that has not heard of the new primary refuses reads of its own slots, too
    assert cache.get_or_set_many(KEYS, pytest.fail, 60) == VALUES


def test_while_slots_move_every_key_is_computed_once(cluster):
    """Keys of all slots, by many threads of two caches that share no knowledge."""
    caches = [cache_programs.cache_elsewhere(cluster.url, "ClusterCache"), cache_at(cluster.url, "ClusterCache")]
    keys = [f"k{number}" for number in range(60)]
    computed = []

    def compute(missing):
        computed.extend(missing)
        return {key: f"v of {key}" for key in missing}

    def get(number):
        found = caches[number % 2].get_or_set_many(keys[number : number + 20], compute, 60, wait=60)
        assert found == {key: f"v of {key}" for key in keys[number : number + 20]}

    with ThreadPoolExecutor(6) as pool:
        got = [pool.submit(get, number) for number in range(40)]
        for key in keys[::6]:
            slot = key_slot(f":1:{key}".encode())
            cluster.move(slot, another_node(cluster, slot))
        for each in got:
            each.result(60)
    assert sorted(computed) == sorted(keys[: len(set(computed))])
    assert len(computed) == len(set(computed))
