"""A Cluster with TLS between clients and nodes and between nodes, and a Cluster with a restricted user."""

from __future__ import annotations

import itertools

import pytest
import redis
import redis.asyncio

from django_redislock.core import Lock, held_locks, reset_all
from django_redislock.core.driver.registry import server_of
from django_redislock.core.listing import read_queue
from django_redislock.doctor import inspect, least_rights
from django_redislock.exceptions import LockBackendError
from django_redislock.server_url import client_from_url
from tests.core.test_async_clients import certificate_of
from tests.support import Cluster, begin, find_program, free_port, lived, wait_until

pytestmark = pytest.mark.processes
NAMES = [f"lock-{number}" for number in range(12)]
timeouts = itertools.count(4.0, 0.125)
"""Socket timeouts that no other client has, so that each learns the slots by itself."""


def use(make_lock, client):
    """Acquire, wait, extend, renew, list and reset, on all nodes."""
    locks = [make_lock(client, name, expire=6) for name in NAMES]
    for lock in locks:
        assert lock.acquire()
    waiter = begin(make_lock(client, NAMES[0]).acquire, timeout=20)
    wait_until(lambda: read_queue(client, NAMES[0], "redislock"))
    lived(6.5)
    assert [lock.lost for lock in locks if lock.lost] == []
    assert [info.name for info in held_locks(client)] == sorted(NAMES)
    locks[0].release()
    assert waiter.result(20)
    for lock in locks[1:]:
        lock.extend(20)
        lock.release()
    assert reset_all(client) == 1
    assert {finding.status for finding in inspect(server_of(client))} <= {"ok", "advice"}


@pytest.fixture(scope="module")
def with_tls(tmp_path_factory):
    key, certificate = certificate_of(tmp_path_factory.mktemp("tls"))
    files = {"tls_cert_file": certificate, "tls_key_file": key, "tls_ca_cert_file": certificate}
    program = find_program("redis-server", package="redis-server")
    with Cluster(program=program, tls_port=free_port, tls_cluster="yes", tls_auth_clients="no", **files) as cluster:
        yield cluster, certificate


def test_a_cluster_with_tls_does_all_that_another_one_does(make_lock, with_tls):
    cluster, certificate = with_tls
    cluster.empty()
    node = cluster.nodes[0].options["tls_port"]
    use(make_lock, client_from_url(f"rediss+cluster://127.0.0.1:{node}?ssl_ca_certs={certificate}"))


def test_a_certificate_of_an_unknown_ca_is_an_error_at_once_that_says_what_to_do(make_lock, with_tls):
    cluster, _ = with_tls
    client = client_from_url(f"rediss+cluster://127.0.0.1:{cluster.nodes[0].options['tls_port']}")
    with pytest.raises(LockBackendError, match=r"Give the CA .* as ssl_ca_certs"):
        make_lock(client, "a").acquire()
    findings = list(inspect(server_of(client)))
    assert any("ssl_ca_certs" in finding.advice for finding in findings)


@pytest.fixture
def user(cluster):
    """``user(rights)`` gives a restricted user these rights at each node, and returns its client."""

    def user(rights):
        for node in cluster.nodes:
            cluster.ask(node, "ACL SETUSER", "app", "reset", "on", ">secret")
            for line in rights:
                cluster.ask(node, "ACL SETUSER", "app", *line.split()[3:])
        return redis.asyncio.RedisCluster(
            host="127.0.0.1",
            port=cluster.nodes[0].port,
            username="app",
            password="secret",
            socket_timeout=next(timeouts),
        )

    yield user
    for node in cluster.nodes:
        cluster.ask(node, "ACL DELUSER", "app")


def rights_of(client):
    return list(least_rights("default", client))


def test_a_user_with_the_rights_that_the_doctor_names_can_do_all_of_it(make_lock, user, settings):
    settings.CACHES = {}
    rights = rights_of(user([]))
    assert any("+cluster|slots" in line for line in rights)
    use(make_lock, user(rights))


def test_without_the_right_to_ask_for_the_slots_the_first_call_says_which_right_is_missing(make_lock, user, settings):
    settings.CACHES = {}
    client = user([])
    without = user([line for line in rights_of(client) if "cluster|slots" not in line])
    with pytest.raises(LockBackendError, match=r"NoPermission.*cluster"):
        make_lock(without, "a").acquire()


def test_a_wrong_password_is_an_error_at_once(make_lock, user, cluster):
    user(["ACL SETUSER app ~* &* +@all"])
    client = redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, username="app", password="wrong")
    with pytest.raises(LockBackendError, match="AuthenticationError"):
        make_lock(client, "a").acquire()
    assert Lock(user(["ACL SETUSER app ~* &* +@all"]), "a").acquire()
