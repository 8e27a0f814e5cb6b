"""Processes that wait for a lock and no longer answer: frozen ones hold it up once, killed ones are no waiters."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from django_redislock.core import Lock, held_locks, scripts
from django_redislock.core.driver.effects import ScriptCall
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import counts_key, lock_keys, undone_key
from django_redislock.core.listing import read_queue
from tests.support import (
    ON_A_CLUSTER,
    PythonProcess,
    begin_to_wait,
    client_at,
    counting,
    enter,
    freeze,
    listening,
    queued,
    servers_of,
    wait_until,
    within,
)
from tests.support.lock_programs import wait_in_forks

KEYS = lock_keys("redislock", "a")
TOGETHER = 1.0
"""Seconds for which frozen processes may hold up a lock."""


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def try_for(client: redis.Redis, id: str, ticket: int | None = None, waits: bool = True) -> Any:
    """Try for the lock as the waiter of that id, whose channel has the same name."""
    arguments = (id, "60000", "a", "{}", id, "1" if waits else "0", "" if ticket is None else str(ticket))
    keys = (*KEYS[:4], undone_key(KEYS, id.encode()), *(() if ticket is None else (counts_key(KEYS),)))
    call = ScriptCall(scripts.ACQUIRE, keys, tuple(part.encode() for part in arguments))
    return server_of(client).call(call.with_text())


def give_up(client: redis.Redis, id: str) -> None:
    arguments = (id.encode(), b"a", id.encode(), b"", b"id " + id.encode())
    call = ScriptCall(scripts.RELEASE, (KEYS.lock, KEYS.held, KEYS.queue, KEYS.receipts), arguments)
    server_of(client).call(call.with_text())


def unclaimed(client: redis.Redis, channel: str, *entries: str) -> None:
    """Leave a reservation that was not claimed, and a queue."""
    client.set(KEYS.lock, f"{channel}\n0\n{client.time()[0] * 1000 - 2000}\n{channel}", px=60_000)
    client.zadd(KEYS.queue, {f"{id}\n{id}": number for number, id in enumerate(entries, 1)})
    client.expire(KEYS.queue, 60)


def queue(client: redis.Redis) -> list[str]:
    return [entry.partition(b"\n")[2].decode() for entry in client.zrange(KEYS.queue, 0, -1)]


def after_the_reservation(client: redis.Redis) -> None:
    end = int(client.get(KEYS.lock).split(b"\n")[2])
    wait_until(lambda: client.time()[0] * 1000 + client.time()[1] // 1000 > end)


@pytest.mark.processes
def test_ten_frozen_processes_ahead_hold_up_a_free_lock_for_no_longer_than_a_second(
    make_lock: Any, client: redis.Redis, redis_url: str, run_python: Callable[..., PythonProcess]
) -> None:
    with Lock(client, "a", expire=60):
        frozen = run_python(wait_in_forks, redis_url, "a", 10).wait_for()["pids"]
        wait_until(lambda: queued(client, "a") == 10)
        for pid in frozen:
            freeze(pid)
        waiter = begin_to_wait(client, "a", enter, make_lock(client, "a", timeout=30))
    with within(TOGETHER):  # ten times half a second would be 5
        assert waiter.result(30)
    signal_all(frozen, signal.SIGCONT)  # told of it, they came back, and are served
    wait_until(lambda: queued(client, "a") == 0 and not client.exists(KEYS.lock))


def test_after_an_unclaimed_reservation_those_who_come_back_are_served_in_their_order(client: redis.Redis) -> None:
    with listening(client, "frozen 1", "frozen 2", "first", "second") as told:
        unclaimed(client, "frozen 1", "frozen 2", "first", "second")
        left = try_for(client, "second", 3)[0]
        assert 0 < left <= 200
        assert told() == ["frozen 2", "first"], "all but the caller's process are woken"
        assert queue(client) == ["second"]
        for id, ticket in (("first", 2), ("second", 3), ("newcomer", None)):
            assert 0 < try_for(client, id, ticket)[0] <= 200, "frozen 2 might come back still"
        after_the_reservation(client)
        assert isinstance(try_for(client, "second", 3), list)
        assert told() == ["first"], "its turn"
        assert isinstance(try_for(client, "first", 2), int)
        assert queue(client) == ["second", "newcomer"]
        try_for(client, "frozen 2", 1)
        assert queue(client) == ["frozen 2", "second", "newcomer"], "thawed, it has its place again"


def test_after_an_unclaimed_reservation_those_who_are_killed_are_not_waited_for(client: redis.Redis) -> None:
    with listening(client, "first", "second"):
        unclaimed(client, "killed 1", "killed 2", "first")
        assert isinstance(try_for(client, "second", 4), list), "first may come back"
        assert queue(client) == ["second"]
    with listening(client, "second"):
        after_the_reservation(client)
        assert isinstance(try_for(client, "second", 4), int)
        unclaimed(client, "killed 1", "killed 2", "killed 3")
        assert isinstance(try_for(client, "second", 4), int)
        assert queue(client) == []


def test_who_came_back_and_died_or_gave_up_is_followed_by_another(client: redis.Redis) -> None:
    with listening(client, "frozen", "first", "third"):
        unclaimed(client, "frozen", "first", "second", "third")
        with listening(client, "second"):
            for id, ticket in (("third", 3), ("first", 1), ("second", 2)):
                assert isinstance(try_for(client, id, ticket), list)
        give_up(client, "first")
        assert queue(client) == ["second", "third"]
        after_the_reservation(client)
        assert isinstance(try_for(client, "third", 3), int)
        assert queue(client) == []


def test_frozen_processes_alone_do_not_keep_others_out(client: redis.Redis) -> None:
    with listening(client, "frozen 1", "frozen 2", "frozen 3") as told:
        unclaimed(client, "frozen 1", "frozen 2", "frozen 3")
        assert not Lock(client, "a").acquire(blocking=False)
        assert not Lock(client, "a").acquire(blocking=False)
        after_the_reservation(client)
        assert Lock(client, "a").acquire(blocking=False)
        assert queue(client) == []
        assert told() == ["frozen 2", "frozen 3"]


def test_a_reservation_for_nobody_is_no_holder(client: redis.Redis) -> None:
    with listening(client, "frozen 1", "frozen 2"):
        unclaimed(client, "frozen 1", "frozen 2")
        assert not Lock(client, "a").acquire(blocking=False)
        lock = Lock(client, "a")
        assert client.get(KEYS.lock).startswith(b"\n0\n")
        assert not lock.locked()
        assert not lock.reset()
        assert client.pttl(KEYS.lock) > 0


def test_the_dead_of_a_queue_are_passed_over_at_once_in_bounded_pieces(make_lock: Any, client: redis.Redis) -> None:
    lock = make_lock(client, "a")
    for number, most in ((100, 0), (2500, 1500)):
        lock.acquire()
        client.zadd(KEYS.queue, {f"gone {number}\n{number}": number for number in range(number)})
        lock.release()
        assert client.zcard(KEYS.queue) <= most
    assert client.zcard(KEYS.queue)
    assert lock.acquire(timeout=5)
    lock.release()
    assert not client.exists(KEYS.lock, KEYS.queue)


# Killed ones


def leave_entries(client: redis.Redis, number: int) -> None:
    """Leave the places in the queue of so many processes that are gone."""
    client.zadd(KEYS.queue, {f"redislock:wake:{i}:{i}:host\nid-{i}": i + 1 for i in range(number)})
    client.expire(KEYS.queue, 60)


def waiting(client: redis.Redis) -> int:
    [info] = held_locks(client)
    return info.waiting


@pytest.mark.processes
def test_killed_waiters_do_not_count_as_waiting(
    client: redis.Redis, redis_url: str, run_python: Callable[..., PythonProcess]
) -> None:
    with Lock(client, "a", expire=60) as lock:
        pids = run_python(wait_in_forks, redis_url, "a", 5).wait_for()["pids"]
        wait_until(lambda: queued(client, "a") == 5)
        assert waiting(client) == 5
        signal_all(pids[:3], signal.SIGKILL)
        wait_until(lambda: waiting(client) == 2)
        assert queued(client, "a") == 2, "their places went when somebody looked"
        signal_all(pids[3:], signal.SIGKILL)
        wait_until(lambda: lock.owner().waiting == 0)


def test_of_a_thousand_killed_waiters_and_a_living_one_one_waits(client: redis.Redis) -> None:
    with Lock(client, "a", expire=60):
        leave_entries(client, 1000)
        with listening(client, "living"):
            try_for(client, "living")
            assert waiting(client) == 1
            leave_entries(client, 30)
            [only] = read_queue(client, "a", "redislock")
            assert only.seconds < 60
            assert (only.host, only.pid) == ("", 0), "its channel does not say them"
            assert queue(client) == ["living"]


def test_more_waiters_than_are_looked_at_are_an_upper_bound(client: redis.Redis) -> None:
    with Lock(client, "a", expire=60):
        leave_entries(client, 1500)
        assert [waiting(client) for _ in range(3)] == [476, 0, 0]


def test_the_waiters_of_many_locks_are_asked_for_once_each_process(client: redis.Redis) -> None:
    locks = [Lock(client, f"lock {number}", expire=60) for number in range(30)]
    for lock in locks:
        lock.acquire()
        client.zadd(lock_keys("redislock", lock.name).queue, {"one process\nid": 1, "another\nid": 2})
    with ExitStack() as stack:
        for server in servers_of(client):
            stack.enter_context(listening(server, "another"))
        counts = stack.enter_context(counting(client))
        assert sum(info.waiting for info in held_locks(client)) == 30
    assert counts["pubsub|numsub"] <= (30 if ON_A_CLUSTER else 2), (
        "each slot of a Cluster is asked by a call of its own"
    )
    for lock in locks:
        lock.release()


def test_a_user_who_may_not_ask_who_listens_counts_all(client: redis.Redis, redis_url: str) -> None:
    for server in servers_of(client):
        server.acl_setuser("blind", enabled=True, nopass=True, keys="*", channels="*", commands=["+@all", "-pubsub"])
    try:
        with client_at(redis_url, username="blind", password="any") as blind, Lock(blind, "a", expire=60):
            leave_entries(client, 3)
            assert waiting(blind) == 3
            assert waiting(client) == 0
    finally:
        for server in servers_of(client):
            server.acl_deluser("blind")
