"""The setting MIN_REPLICAS reaches every lock, and the doctor and the checks report too few replicas."""

from __future__ import annotations

import asyncio

import pytest
from django.core import checks
from django.core.cache import caches

from django_redislock import alock, conf, lock
from django_redislock.celery.options import complete
from django_redislock.connections import get_client
from django_redislock.core.driver.registry import close_unused, server_of
from django_redislock.doctor import diagnose, inspect
from django_redislock.exceptions import LockBackendError
from tests.support import Cluster, RedisServer, key_of, wait_until


@pytest.fixture(autouse=True)
def _one_replica_must_confirm(settings, redis_url):
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": redis_url}
    settings.CACHES = {"default": cache}
    settings.DJANGO_REDISLOCK = {"MIN_REPLICAS": 1}
    yield
    close_unused()


@pytest.mark.slow
def test_the_server_without_replicas_grants_no_lock(client):
    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        lock("a").acquire()
    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        lock("a", expire=5).acquire()
    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        caches["default"].lock("a").acquire()
    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        asyncio.run(alock("a").acquire())
    wait_until(lambda: not client.keys("*:lock:*"), message="what was granted is given back")


def test_a_lock_may_ask_for_another_number():
    with lock("a", min_replicas=0) as held:
        assert held.owned()


def test_the_message_of_a_task_that_is_not_published_leaves_no_lock(client):
    task = complete({}, conf.get()).lock.with_name("task", id="of-the-message")
    assert task.take_ahead() is None
    with pytest.raises(LockBackendError, match="0 of 1 replicas"):
        task.take(fresh=True)
    wait_until(lambda: not client.exists(key_of("task")))


@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True])
def test_a_wrong_number_is_a_message_of_plain_check(settings, value):
    settings.DJANGO_REDISLOCK = {"MIN_REPLICAS": value}
    (message,) = checks.run_checks(tags=["redislock"])
    assert message.id == "redislock.E002"
    assert message.hint == "It must be a number of replicas from 0 to 100."


def found(check):
    return [finding for finding in inspect(server_of(get_client())) if finding.check == check]


def deployed():
    messages = checks.run_checks(tags=["redislock"], include_deployment_checks=True)
    return {message.id: message for message in messages}


def test_too_few_replicas_are_reported_before_the_first_lock():
    (finding,) = found("min_replicas")
    assert finding.status == "problem"
    assert "It has no connected replicas." in finding.message
    assert "MIN_REPLICAS" in finding.advice
    assert "no connected replicas" in deployed()["redislock.E008"].msg


@pytest.mark.slow
def test_the_doctor_tries_locks_that_the_replicas_must_confirm():
    """It said "ok", and no process could acquire a lock: a replica that is connected need not confirm anything."""
    trials = {finding.check: finding for finding in diagnose(get_client())}
    for check in ("acquire", "many locks"):
        assert trials[check].status == "problem"
        assert "0 of 1 replicas" in trials[check].message


@pytest.mark.processes
def test_a_primary_that_writes_without_its_replicas_is_reported(settings):
    with RedisServer() as primary, RedisServer(replicaof=f"127.0.0.1 {primary.port}") as _, primary.client() as client:
        settings.CACHES = {"default": settings.CACHES["default"] | {"LOCATION": primary.url}}
        wait_until(lambda: client.set("mark", "x") and client.wait(1, 100) == 1, message="the replica follows")
        assert lock("a").acquire()
        (finding,) = found("replicas")
        assert (finding.status, finding.message) == (
            "advice",
            "It has 1 connected replica, and min-replicas-to-write is 0.",
        )
        assert "min-replicas-to-write" in deployed()["redislock.W006"].hint
        client.config_set("min-replicas-to-write", "1")
        client.config_set("min-replicas-max-lag", "2")
        assert [finding.status for finding in found("replicas")] == ["ok"]
        assert not {"redislock.W006", "redislock.E008"} & deployed().keys()


@pytest.mark.processes
def test_the_replicas_of_a_cluster_need_no_replicas_of_their_own(settings):
    """Each of them was a problem, so a healthy Cluster failed ``check --deploy``."""
    with Cluster(primaries=1, replicas=1) as cluster:
        settings.CACHES = {"default": {"BACKEND": "django_redislock.cache.ClusterCache", "LOCATION": cluster.url}}
        with lock("a"):
            assert found("min_replicas") == []
        (finding,) = found("replicas")
        assert f"Node 127.0.0.1:{cluster.nodes[0].port}: It has 1 connected replica" in finding.message
        assert "redislock.E008" not in deployed()
        for node in cluster.nodes:
            cluster.ask(node, "CONFIG SET", "min-replicas-to-write", 1)
        assert [finding.status for finding in found("replicas")] == ["ok"]
        close_unused()
