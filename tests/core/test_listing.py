"""What looks at all locks works in pieces, so that no script keeps the server busy for long, whatever is held."""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any

import pytest
import redis

from django_redislock.core import Lock, operations, reset_all
from django_redislock.core.driver import effects
from django_redislock.core.driver.effects import ScriptBatch
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import BUCKETS, held_keys, lock_keys
from django_redislock.core.listing import contention, held_locks
from django_redislock.core.watchdog import BATCH
from django_redislock.exceptions import LockBackendError
from tests.support import ON_A_CLUSTER, RedisServer, client_at, counting, servers_of

MANY = 100_000


@pytest.fixture
def many(client: redis.Redis) -> list[str]:
    """The names of many locks, as the index has them."""
    names = [f"lock:{number}" for number in range(MANY)]
    buckets: dict[int, dict[str, float]] = defaultdict(dict)
    for name in names:
        buckets[zlib.crc32(name.encode()) % BUCKETS][name] = 9e15
    for bucket, members in buckets.items():
        client.zadd(held_keys("redislock")[bucket], members)
    return names


def replies(client: redis.Redis, steps: Any) -> tuple[list[list[Any]], Any]:
    """Do what the steps ask for; return the replies to each request, and what the steps return.

    A Cluster gets many requests at once.
    """
    server, all_of_them, reply = server_of(client), [], None
    while True:
        try:
            effect = steps.send(reply)
        except StopIteration as stop:
            return all_of_them, stop.value
        reply = server.call(effect)
        all_of_them.append(reply if isinstance(effect, ScriptBatch) else [reply])


def test_a_count_costs_a_count(client: redis.Redis, many: list[str]) -> None:
    client.zadd(held_keys("redislock")[0], {"ended": 1})
    with counting(client) as counts:
        (found, *looks), number = replies(client, operations.count(server_of(client), "redislock"))
    assert number.locks == MANY
    assert sum(int(each) for reply in found for each in reply.split()) == MANY
    assert counts["zcount"] == BUCKETS
    # The age of the oldest lock and the number of waiters need a look at locks: at so many a call, and not at all.
    assert counts["get"] == min(MANY, operations.LOOKED_AT)
    assert len(looks) <= 1 + -(-operations.LOOKED_AT // operations.BATCH)


def test_the_names_of_many_locks_come_in_pieces(client: redis.Redis, many: list[str]) -> None:
    found, names = replies(client, operations.names(server_of(client), "redislock"))
    assert sorted(names) == sorted(many)
    assert max(len(lengths.split()) for each in found for _, _, lengths, _ in each) < 1300, "5 ms of the server at most"
    assert len(found) < 250


def test_the_names_of_few_locks_come_at_once(client: redis.Redis) -> None:
    client.zadd(held_keys("redislock")[BUCKETS - 1], {"last": 9e15, "ended": 1})
    found, names = replies(client, operations.names(server_of(client), "redislock"))
    assert (len(found), names) == (1, ["last"])


def test_locks_are_read_and_reset_in_pieces(client: redis.Redis) -> None:
    with client.pipeline(transaction=False) as pipe:
        for number in range(450):
            keys = lock_keys("redislock", name := f"lock:{number}")
            pipe.set(keys.lock, f"id\n{number + 1}\n1\n{{}}", px=60_000).zadd(keys.held, {name: 9e15})
        pipe.execute()
    with counting(client) as counts:
        assert sum(1 for _ in held_locks(client)) == 450
    if ON_A_CLUSTER:  # by slot
        assert counts["evalsha"] <= (1 + 3) * BUCKETS
    else:
        assert (counts["evalsha"], counts["mget"]) == (1 + 3, 3)
    assert reset_all(client) == 450
    assert not list(held_locks(client))


def test_renewals_go_in_pieces() -> None:
    assert BATCH <= 250, "5 ms of the server at most"


def test_the_counts_of_many_names_come_in_pieces(client: redis.Redis) -> None:
    window = client.time()[0] // 600
    with client.pipeline(transaction=False) as pipe:
        for bucket in range(BUCKETS):
            names = [f"{bucket}:{number}" for number in range(16)]
            of_name = "".join(f"{at} 1000 1 0 1 0;" for at in range(window, window - 6, -1))
            of_minutes = {f"m{at * 10 % 80}": f"{at * 10} 16000 16" for at in range(window - 5, window + 1)}
            mapping = {f"n{name}": of_name for name in names} | of_minutes
            pipe.hset(f"{{redislock:{bucket}}}:counts", mapping=mapping)
        pipe.execute()
    with counting(client) as counts:
        found = contention(client)
    assert counts["evalsha"] >= BUCKETS * 22 // 1200
    assert len(found.names) == BUCKETS * 16
    assert {(waits.seconds, waits.waits, waits.duplicates) for waits in found.names.values()} == {(6.0, 6, 6)}
    assert sum(minute.waits for minute in found.minutes) >= 5 * 16 * BUCKETS


@pytest.mark.processes
def test_a_refusal_is_told_as_one_and_names_no_prefix_as_a_lock(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "retry_for", 0.5)
    with own_server.client() as admin:
        rights = ("+@connection", "+command", "+cluster")  # without which redis-py has no client of a Cluster
        servers_of(admin)[0].execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", "~*", "&*", *rights)
    with client_at(own_server.url, username="app", password="secret") as client:
        with pytest.raises(
            LockBackendError, match=r"^Redis refused a command for the held locks: NoPermissionError: .*"
        ) as raised:
            list(held_locks(client))
        assert raised.value.refused
        with pytest.raises(LockBackendError, match=r"^Redis refused a command for lock 'a': NoPermissionError"):
            Lock(client, "a").acquire(blocking=False)
    with own_server.client() as client:
        own_server.kill()
        with pytest.raises(LockBackendError, match=r"^Redis did not answer for the held locks"):
            list(held_locks(client))
