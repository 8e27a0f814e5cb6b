"""A plain client of one of several primaries of a Cluster is refused in words, for every name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from redis.crc import key_slot

from django_redislock.celery.execution_lock import ExecutionLock
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError
from tests.support import Cluster


@contextmanager
def one_node(cluster: Cluster) -> Iterator[redis.Redis]:
    """Give a plain client of the first node, of which nothing is known yet."""
    with redis.Redis(port=cluster.nodes[0].port) as plain:
        vars(server_of(plain)).pop("one_of_several", None)
        yield plain


def names_by_owner(cluster: Cluster) -> tuple[list[str], list[str]]:
    """Return names of locks that the first node has, and others."""
    names = [f"name-{number}" for number in range(30)]
    owners = {name: cluster.owner_of(key_slot(lock_keys("redislock", name).lock)) for name in names}
    here = [name for name in names if owners[name] is cluster.nodes[0]]
    return here, [name for name in names if name not in here]


def test_a_plain_client_of_one_of_several_primaries_gets_no_lock_once_that_is_known(
    make_lock, cluster: Cluster
) -> None:
    """It got the locks of ten names in thirty, until a slot moved."""
    with one_node(cluster) as plain:
        here, elsewhere = names_by_owner(cluster)
        held = make_lock(plain, here[0], expire=30)
        assert held.acquire(), "nothing says that it is not all yet"
        for name in (elsewhere[0], *here[1:], elsewhere[1]):
            with pytest.raises(LockBackendError, match=r"one node of a Cluster: use a redis\.RedisCluster"):
                make_lock(plain, name).acquire(timeout=1)
        held.extend()
        held.release()


def test_a_message_of_a_task_takes_no_lock_at_one_of_several_primaries(cluster: Cluster) -> None:
    with one_node(cluster) as plain:
        here, elsewhere = names_by_owner(cluster)
        prepared = ExecutionLock(plain, "any")
        assert prepared.with_name(here[0], id="one").take(fresh=True)
        ahead = prepared.with_name(elsewhere[0], id="two").take_ahead()
        assert ahead is not None
        assert ahead() is None
        for name in (elsewhere[0], here[1]):
            with pytest.raises(LockBackendError, match="one node of a Cluster"):
                prepared.with_name(name, id="three").take(fresh=True)
