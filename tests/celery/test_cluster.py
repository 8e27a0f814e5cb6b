"""Tasks whose locks are on a Cluster, while another broker carries their messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.crc import key_slot

from django_redislock import TaskAlreadyRunning
from django_redislock.celery import DuplicateResult
from django_redislock.core import held_locks
from tests.support import Cluster, Server, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.harness import TaskQueue, checked_queue, ended, workers
from tests.support.worker import Worker

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def url(shared_cluster: Cluster) -> str:
    return shared_cluster.url.removesuffix("/0").replace("redis://", "redis+cluster://")


@pytest.fixture(scope="module")
def worker(server: Server, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that takes its messages from the shared server, which is no Cluster."""
    with workers(server, tmp_path_factory.mktemp("worker_pools")) as worker_pools:
        yield worker_pools.start("prefork", name="cluster", env={"REDISLOCK_TEST_LOCKS": url}).wait_ready()


@pytest.fixture(autouse=True)
def _locks_on_the_cluster(settings, url, cluster: Cluster) -> Iterator[None]:
    settings.DJANGO_REDISLOCK = {"URL": url}
    yield
    with cluster.client() as client:
        wait_until(lambda: not list(held_locks(client)), message="all locks are released")


@pytest.fixture
def blocked(worker: Worker) -> Iterator[TaskQueue]:
    yield from checked_queue(TaskQueue([worker], blocked=True))


def move_locks(cluster: Cluster) -> int:
    """Move the slots of all held locks to other nodes; return how many locks there were."""
    with cluster.client() as client:
        slots = [key_slot(key) for key in client.keys("{redislock:*}:lock:*", target_nodes=client.PRIMARIES)]
    for slot in set(slots):
        owner = cluster.owner_of(slot)
        cluster.move(slot, next(node for node in cluster.nodes if node is not owner))
    return len(slots)


def test_a_duplicate_is_refused_also_after_the_slot_of_the_lock_has_moved(blocked, cluster, client):
    first = blocked.publish(tasks.refuse)
    blocked.run_log.wait_for("start")
    assert not list(held_locks(client)), "no lock is on the broker"
    assert type(ended(blocked.publish(tasks.refuse)).result) is TaskAlreadyRunning
    assert move_locks(cluster) == 1
    assert type(ended(blocked.publish(tasks.refuse)).result) is TaskAlreadyRunning
    blocked.run_log.let_bodies_end()
    assert ended(first).result == f"ran {first.id}"
    assert len(blocked.run_log.events("start")) == 1


def test_a_job_is_published_once_and_its_lock_is_released_at_its_end(blocked, cluster):
    first = blocked.publish(tasks.job)
    again = blocked.publish(tasks.job)
    assert isinstance(again, DuplicateResult)
    assert again.id == first.id
    blocked.run_log.wait_for("start")
    assert move_locks(cluster) == 1
    blocked.run_log.let_bodies_end()
    assert ended(first).result == f"ran {first.id}"
    assert len(blocked.run_log.events("start")) == 1


def test_a_task_that_acknowledges_late_leaves_its_marker_on_the_cluster(blocked, cluster):
    blocked.run_log.let_bodies_end()
    result = blocked.publish(tasks.mortal_late)
    assert ended(result).result == f"ran {result.id}"

    def states():
        with cluster.client() as nodes:
            return [nodes.get(key) for key in nodes.scan_iter("{redislock:*}:done:*", count=1000)]

    wait_until(lambda: any(state.startswith(b"done") for state in states()), message="the worker confirms the message")
