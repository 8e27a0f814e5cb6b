"""A server in cluster mode behind a plain client: one shard, a proxy, a serverless service."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_redislock.core import Lock, held_locks, reset_all
from django_redislock.core.driver.registry import server_of
from django_redislock.core.listing import contention
from django_redislock.core.operations import count
from django_redislock.doctor import diagnose
from tests.support import OneNode, RedisServer, lived, wait_until
from tests.support.locks import wait_in_a_thread

NAMES = [f"lock-{number}" for number in range(10)]


@pytest.fixture(scope="module")
def shard() -> Iterator[RedisServer]:
    with OneNode() as server:
        yield server


@pytest.fixture
def client(shard):
    with shard.client() as client:
        client.flushall()
        vars(server_of(client)).pop("splits", None)  # nobody knows it to be in cluster mode
        yield client


@pytest.mark.slow
def test_two_locks_of_one_process_are_both_renewed(make_lock, client):
    locks = [make_lock(client, name, expire=0.9) for name in NAMES]
    for lock in locks:
        lock.acquire()
    lived(2)
    assert [lock.locked() for lock in locks] == [True] * len(NAMES)
    for lock in locks:
        lock.release()


def test_the_causes_of_losses_are_found(client):
    locks = [Lock(client, name, expire=0.9) for name in NAMES]
    for lock in locks:
        lock.acquire()
    assert reset_all(client) == len(NAMES)
    wait_until(lambda: all(lock.lost for lock in locks))
    assert all("all locks were reset" in lock.lost.reason for lock in locks)


def test_held_locks_are_listed_and_counted(client):
    for name in NAMES:
        Lock(client, name, expire=20).acquire()
    assert [info.name for info in held_locks(client)] == sorted(NAMES)
    server = server_of(client)
    assert server.run(count(server, "redislock")).locks == len(NAMES)


@pytest.mark.slow
def test_waits_are_counted(client):
    wait_in_a_thread(client, "a")
    assert contention(client).names["a"].waits == 1


@pytest.mark.parametrize("splits", [False, True])
def test_calls_are_repeated_while_the_server_says_that_the_cluster_is_down(shard, client, splits):
    server_of(client).splits = splits
    client.config_resetstat()
    with Lock(client, "a"), ThreadPoolExecutor() as executor:
        client.execute_command("CLUSTER", "DELSLOTS", 5)
        try:
            wait_until(lambda: b"cluster_state:fail" in client.execute_command("CLUSTER", "INFO"))
            acquiring = executor.submit(Lock(client, "b").acquire)
            listing = executor.submit(lambda: [info.name for info in held_locks(client)])
            wait_until(lambda: errors(client, "CLUSTERDOWN") > 4, message="both tried")
        finally:  # or every later test of this server would fail
            client.execute_command("CLUSTER", "ADDSLOTS", 5)
        assert acquiring.result(30)
        assert "a" in listing.result(30)


def errors(client, kind):
    """Return how often the server has replied so; it has no line for what it never did."""
    found = client.info("errorstats").get(f"errorstat_{kind}", {"count": 0})
    return found["count"] if isinstance(found, dict) else int(found.removeprefix("count="))  # before redis-py 6.0


def test_the_doctor_finds_nothing_wrong(client):
    findings = {finding.check: finding for finding in diagnose(client)}
    assert {check for check, finding in findings.items() if finding.status == "problem"} == set()
    assert "cluster mode" in findings["many locks"].message


def test_it_is_recognised_by_the_first_refusal_and_asked_slot_by_slot_from_then_on(client):
    server = server_of(client)
    assert not server.splits
    list(held_locks(client))
    assert server.splits
