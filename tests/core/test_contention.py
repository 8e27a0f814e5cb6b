"""The counts of waits: what they say, what they cost, and what room they take."""

from __future__ import annotations

import pytest
import redis
from django.core.cache import caches

from django_redislock.celery.execution_lock import ExecutionLock
from django_redislock.core import Lock, events, scripts
from django_redislock.core.driver.effects import ScriptBatch, ScriptCall
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import BUCKETS, counts_key, lock_keys, undone_key
from django_redislock.core.listing import contention
from tests.support import begin_to_wait, counting, wait_in_a_thread

FIELDS = 80 + 4 * 32
"""Of one bucket, at most: minutes and names."""


def kept(client: redis.Redis) -> list[bytes]:
    """Return the keys that hold counts."""
    return list(client.scan_iter("*}:counts", count=1000))


@pytest.mark.slow
def test_waits_are_counted_by_name_and_minute(client: redis.Redis) -> None:
    for _ in range(2):
        wait_in_a_thread(client, "often")
    with Lock(client, "late"):
        assert not Lock(client, "late").acquire(timeout=2)
    found = contention(client)
    assert (found.names["often"].waits, found.names["often"].gave_up) == (2, 0)
    assert (found.names["late"].waits, found.names["late"].gave_up) == (1, 1)
    assert found.names["late"].seconds >= 0.5  # the time of its first try is none of the wait
    assert list(found.names) == sorted(found.names, key=lambda name: -found.names[name].seconds)
    assert sum(minute.waits for minute in found.minutes[-5:]) == 3
    assert sum(minute.waits for minute in found.minutes) == 3
    assert sum(minute.seconds for minute in found.minutes) >= 0.5


def test_a_wait_is_counted_without_a_command_of_its_own(client: redis.Redis) -> None:
    """At most three calls, as without counts.

    They are a first try where nobody listens yet, a place in the queue, and the end of the wait.
    """
    with Lock(client, "a"):
        assert not Lock(client, "a").acquire(timeout=0.05)
        with counting(client) as counts:
            assert not Lock(client, "a").acquire(timeout=0.4)
    assert counts["hset"] == 1
    assert counts["evalsha"] <= 3


def value_waited_for(client: redis.Redis, key: str, waiters: int) -> None:
    """Compute a value while so many other processes wait for it since two seconds, by what they leave in Redis."""
    cache = caches["default"]
    queue = lock_keys("redislock", f"cache:{cache.make_key(key)}").queue
    since = (client.time()[0] - 2) * 1_000_000

    def compute() -> int:
        if waiters:
            client.zadd(queue, {f"of a process\n{number}": since for number in range(waiters)})
        return 1

    assert cache.get_or_set(key, compute) == 1
    assert client.zcard(queue) == 0


def test_what_did_not_wait_leaves_nothing(client: redis.Redis) -> None:
    with Lock(client, "a"):
        assert not Lock(client, "a").acquire(blocking=False)
    value_waited_for(client, "a", 0)
    assert kept(client) == []
    assert contention(client).names == {}


def test_who_waits_to_be_a_leader_is_no_contention(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat that waits gave up 3,600 times an hour, and was on top of the list."""
    heard: list[str] = []
    monkeypatch.setattr(events, "listeners", [lambda event, details: heard.append(event)])
    leads, waits = (Lock(client, "a", kind="leader") for _ in range(2))
    with leads:
        assert not waits.acquire(timeout=0.2)
        waiter = begin_to_wait(client, "a", waits.acquire)
    assert waiter.result(30)
    assert contention(client).names == {}
    assert "waited" not in heard


def test_recomputations_avoided(client: redis.Redis) -> None:
    value_waited_for(client, "report", 3)
    value_waited_for(client, "asked for by one", 0)
    [(name, found)] = contention(client).names.items()
    assert name.endswith("report")
    assert (found.waits, found.avoided, found.duplicates, found.gave_up) == (3, 3, 0, 0)
    assert found.seconds >= 3  # 2 each


def test_what_saves_most_stays_among_many(client: redis.Redis) -> None:
    hot = ExecutionLock(client, "hot")
    for number in range(60):
        hot.count_duplicate()
        for other in range(30):  # of the same bucket
            hot._copy(_keys=hot._keys._replace(name=b"cold:%d:%d" % (number, other))).count_duplicate()
    found = contention(client).names
    assert next(iter(found)) == "hot"
    assert found["hot"].duplicates == 60
    assert len(found) < 1_000
    for key in kept(client):
        assert client.hlen(key) <= FIELDS


def wait_for(client: redis.Redis, names: list[str]) -> None:
    """Let a wait of each name end as the protocol does, without the sleep: a last call with the ticket drawn before."""
    ticket = b"%d" % ((client.time()[0] - 1) * 1_000_000)
    calls = []
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            keys = lock_keys("redislock", name)
            pipe.set(keys.lock, "other\n1\n1\n{}", px=60_000)
            arguments = (b"me", b"1000", name.encode(), b"{}", b"channel", b"0", ticket)
            calls.append(ScriptCall(scripts.ACQUIRE, (*keys[:4], undone_key(keys, b"me"), counts_key(keys)), arguments))
        pipe.execute()
    assert all(isinstance(reply, list) for reply in server_of(client).call(ScriptBatch(tuple(calls))))


@pytest.mark.slow
def test_ten_thousand_names_take_bounded_room(client: redis.Redis) -> None:
    sizes = []
    for start in range(0, 10_000, 5_000):
        wait_for(client, [f"name:{number:05}" for number in range(start, start + 5_000)])
        sizes += [client.hlen(key) for key in kept(client)]
    assert len(kept(client)) == BUCKETS
    assert max(sizes) <= FIELDS
    assert all(0 < client.pttl(key) <= 80 * 60_000 for key in kept(client))
    assert sum(minute.waits for minute in contention(client).minutes) == 10_000


@pytest.mark.slow
def test_one_waited_for_long_stays_among_many(client: redis.Redis) -> None:
    wait_for(client, [name for number in range(200) for name in ("hot", *(f"cold:{number}:{i}" for i in range(10)))])
    found = contention(client)
    assert next(iter(found.names)) == "hot"
    assert found.names["hot"].waits == 200


def test_counts_that_cannot_be_kept_harm_no_lock(client: redis.Redis) -> None:
    wait_in_a_thread(client, "a")
    for key in kept(client):
        client.set(key, "of another type")
    wait_in_a_thread(client, "a")
    assert not Lock(client, "a").locked()


def test_counts_of_more_than_an_hour_ago_are_not_shown_and_leave_with_the_next_count(client: redis.Redis) -> None:
    key, window = counts_key(lock_keys("redislock", "a")), client.time()[0] // 600
    of_windows = [f"{at} 1000 1 0 2 3;" for at in (window - 6, window - 7, window - 100)]
    client.hset(key, mapping={"na": "".join(of_windows), "nb": of_windows[-1], f"m{(window - 7) * 10 % 80}": "1 1 1"})
    found = contention(client)
    assert list(found.names) == ["a"]
    assert (found.names["a"].waits, found.names["a"].duplicates, found.names["a"].avoided) == (1, 2, 3)
    assert sum(minute.waits for minute in found.minutes) == 0
    ExecutionLock(client, "a").count_duplicate()
    assert client.hget(key, "na").split(b";")[1:] == [of_windows[0].encode().rstrip(b";"), b""]
    assert contention(client).names["a"].duplicates == 3


def test_a_value_that_no_count_wrote_does_not_keep_a_lock_from_its_waiter(client: redis.Redis) -> None:
    client.set(counts_key(lock_keys("redislock", "a")), "foreign")
    wait_in_a_thread(client, "a")
