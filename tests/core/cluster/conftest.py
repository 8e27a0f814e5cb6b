from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.support import Cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[redis.RedisCluster]:
    with cluster.client() as client:
        yield client
