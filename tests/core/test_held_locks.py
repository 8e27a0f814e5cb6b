"""held_locks and reset_all: the index of the locks held now, and how it stays right and small."""

from __future__ import annotations

from datetime import timedelta
from itertools import count, pairwise

import pytest

from django_redislock.core import Lock, held_locks, reset_all
from django_redislock.core.keys import lock_keys
from tests.support import ON_A_CLUSTER, RedisServer, counting, monitoring, wait_until


def test_held_locks_lists_all_held_and_nothing_else(make_lock, client):
    client.mset({f"{{cache}}:{i}": i for i in range(1000)})
    locks = [make_lock(client, f"lock {i}") for i in range(150)]
    for lock in locks:
        lock.acquire()
    locks[0].release()
    client.delete(lock_keys("redislock", "lock 1").lock)
    elsewhere = make_lock(client, "a", prefix="other")
    elsewhere.acquire()
    assert {info.name for info in held_locks(client)} == {f"lock {i}" for i in range(2, 150)}
    assert [info.name for info in held_locks(client, "other")] == ["a"]
    with monitoring(client) as sent:
        list(held_locks(client))
    assert {line.split()[0] for line in sent} == {"EVALSHA"}
    assert ON_A_CLUSTER or len(sent) == 2


def test_what_cannot_be_read_of_a_record_is_empty_and_the_rest_is_read(client):
    records = {"": 0.0, "{": 0.0, "[]": 0.0, '{"expire":NaN,"pid":1e400}': 0.0, '{"expire":"long","host":{}}': 0.0}
    for record, expire in (records | {'{"expire":0.5,"pid":"x","auto_renewal":"no"}': 0.5}).items():
        client.set(lock_keys("redislock", "a").lock, f"id\n5\n0\n{record}")
        info = Lock(client, "a").owner()
        assert (info.id, info.fence, info.acquired_at.timestamp(), info.expire) == ("id", 5, 0.0, expire)
        assert (info.pid, info.host, info.auto_renewal, info.result_ignored) == (0, "", False, False)


def test_an_expired_lock_is_not_listed(make_lock, client):
    make_lock(client, "a", expire=0.05, auto_renewal=False).acquire()
    wait_until(lambda: not list(held_locks(client)))


@pytest.mark.slow
def test_a_lost_index_is_mended_by_the_renewal(make_lock, client):
    lock = make_lock(client, "a", expire=6)
    with lock:
        client.delete(lock_keys("redislock", "a").held)
        assert not list(held_locks(client))
        wait_until(lambda: [info.name for info in held_locks(client)] == ["a"])


def test_a_lock_of_a_hundred_days_is_listed_for_a_hundred_days(make_lock, client):
    held, days = lock_keys("redislock", "a").held, 86_400_000
    make_lock(client, "a", expire=timedelta(days=100), auto_renewal=False).acquire()
    other = next(name for number in count() if lock_keys("redislock", name := f"other {number}").held == held)
    with make_lock(client, other, expire=30):
        pass
    assert client.pttl(held) > 99 * days


def test_every_index_lives_for_two_weeks_from_the_first_lock_of_a_day(make_lock, client):
    keys, days = lock_keys("redislock", "a"), 86_400_000
    for last in (None, (client.time()[0] - 86_400) * 1_000_000, (client.time()[0] + 86_400) * 1_000_000):
        client.zadd(keys.held, {"another": 9e15})
        client.pexpire(keys.held, days)
        client.delete(keys.fence) if last is None else client.set(keys.fence, last)
        with make_lock(client, "a", auto_renewal=False):
            assert client.pttl(keys.held) > 29 * days
            client.pexpire(keys.held, 20 * days)
        with make_lock(client, "a", expire=timedelta(days=25), auto_renewal=False):
            assert client.pttl(keys.held) > 24 * days


def test_an_index_that_was_lost_today_has_a_life_again(make_lock, client):
    keys, days = lock_keys("redislock", "a"), 86_400_000
    lock = make_lock(client, "a", auto_renewal=False)
    for _ in range(2):
        with lock:
            assert client.pttl(keys.held) > 29 * days
        client.delete(keys.held)


def test_many_that_ended_without_a_release_leave_the_index_a_few_at_a_time(make_lock, client):
    held = lock_keys("redislock", "a").held
    client.zadd(held, {f"ended {number}": 1 for number in range(1000)})
    lock, sizes = make_lock(client, "a", auto_renewal=False), [1000]
    while sizes[-1]:
        with lock:
            pass
        sizes.append(client.zcard(held))
    assert max(before - after for before, after in pairwise(sizes)) == 100


@pytest.mark.slow
def test_what_is_held_is_found_among_a_million_foreign_keys_without_looking_at_them(make_lock):
    """It costs as many commands as beside none: so many for the locks, and no scan."""
    with RedisServer(enable_debug_command="yes") as server, server.client(socket_timeout=60) as client:
        costs = []
        for keys in (0, 0, 1_000_000):  # the first makes the scripts known
            if keys:
                client.execute_command("DEBUG", "POPULATE", keys, "cache")
                assert client.dbsize() >= keys
            for i in range(20):
                make_lock(client, f"lock {i}", expire=60, auto_renewal=False).acquire()
            with counting(client) as listed:
                assert len(list(held_locks(client))) == 20
            with counting(client) as freed:
                assert reset_all(client) == 20
            for now_and_then in ("zremrangebyscore", "zremrangebyrank"):  # of old receipts
                del freed[now_and_then]
            costs.append((listed, freed))
            assert not {"keys", "scan", "flushdb", "flushall"} & (listed.keys() | freed.keys())
        assert costs[1] == costs[2]
        assert client.dbsize() >= 1_000_000


def test_reset_all_frees_its_own_locks_and_touches_nothing_else(make_lock, client):
    client.set("lock:door", "x")
    client.set("redislock:mine", "y")
    elsewhere = make_lock(client, "a", prefix="other")
    elsewhere.acquire()
    for i in range(30):
        make_lock(client, f"lock {i}", auto_renewal=False).acquire()
    with monitoring(client) as sent:
        assert reset_all(client) == 30
    # It scans a Cluster for the leases of values.
    never = ("KEYS", "FLUSH") if ON_A_CLUSTER else ("KEYS", "SCAN", "FLUSH")
    assert not [line for line in sent if line.startswith(never)]
    assert not list(held_locks(client))
    assert elsewhere.owned()
    assert client.get("lock:door") == b"x"
    assert client.get("redislock:mine") == b"y"
