from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support import Cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """A Cluster of three primaries, which is empty. Its slots may be anywhere."""
    with shared_cluster.client() as client:
        client.flushall(target_nodes=client.PRIMARIES)
    return shared_cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[redis.RedisCluster]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A Cluster of three primaries with a replica each, for this test alone."""
    with Cluster(replicas=1, cluster_node_timeout="1000") as cluster:
        yield cluster
