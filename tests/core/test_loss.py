"""A holder hears the cause of its loss that the server knows, in words and as a code."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redislock.core import AsyncLock, Lock, QuorumLock
from django_redislock.core.keys import lock_keys
from django_redislock.core.loss import notes_key
from django_redislock.exceptions import LockLost, LossRecord
from tests.support import Proxy, RedisServer, async_client_at, client_at, counting, wait_until

KEYS = lock_keys("redislock", "a")
NOTES = notes_key(KEYS)


def loss_of(lock: Lock) -> LossRecord:
    with pytest.raises(LockLost) as raised:
        lock.release()
    return raised.value.record


def test_after_a_forced_release_the_holder_hears_who_did_it_when_and_why(client: redis.Redis) -> None:
    lock = Lock(client, "a")
    lock.acquire()
    assert Lock(client, "a").reset(fence=lock.fence, by="olga", reason="It hangs since noon.")
    record = loss_of(lock)
    assert record.code == "force_released"
    assert re.fullmatch(
        r"olga force-released it at 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC: It hangs since noon", record.reason
    )


def test_the_watchdog_the_log_and_on_lost_hear_it_too(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []
    lock = Lock(client, "a", expire=0.9, on_lost=lambda lock: told.append(lock.lost))
    other = Lock(client, "b", expire=0.9)
    lock.acquire()
    other.acquire()
    Lock(client, "a").reset(by="olga", reason="stuck")
    wait_until(lambda: told)
    assert (told[0].code, told[0].reason.partition(" ")[0]) == ("force_released", "olga")
    assert "olga force-released it" in caplog.text
    other.release()  # whose renewal went along


def test_an_extension_and_a_task_of_asyncio_hear_it_too(client: redis.Redis, redis_url: str) -> None:
    lock = Lock(client, "a")
    lock.acquire()
    Lock(client, "a").reset(by="olga")
    with pytest.raises(LockLost, match="olga force-released it"):
        lock.extend()

    async def main() -> LossRecord:
        async with async_client_at(redis_url) as connected:
            lock = AsyncLock(connected, "a")
            await lock.acquire()
            await AsyncLock(connected, "a").reset(by="olga", reason="stuck")
            with pytest.raises(LockLost) as raised:
                await lock.release()
            return raised.value.record

    record = asyncio.run(main())
    assert record.code == "force_released"
    assert record.reason.endswith("UTC: stuck")


def test_each_of_several_former_holders_hears_its_own_cause(client: redis.Redis) -> None:
    locks = [Lock(client, "a", auto_renewal=False) for _ in range(3)]
    for number, lock in enumerate(locks):
        lock.acquire(blocking=False)
        Lock(client, "a").reset(reason=f"reason {number}")
    assert [loss_of(lock).reason.rpartition(": ")[2] for lock in locks] == ["reason 0", "reason 1", "reason 2"]


def _expired(client: redis.Redis, lock: Lock) -> None:
    wait_until(lambda: lock.lost)


def _deleted(client: redis.Redis, lock: Lock) -> None:
    client.delete(KEYS.lock)


def _emptied(client: redis.Redis, lock: Lock) -> None:
    client.flushdb()


def _taken_by_another(client: redis.Redis, lock: Lock) -> None:
    client.delete(KEYS.lock)
    Lock(client, "a", auto_renewal=False).acquire(blocking=False)


@pytest.mark.parametrize(
    ("what", "expire", "code"),
    [
        (_expired, 0.05, "expired"),
        (_deleted, 30, "server_lost_data"),
        (_emptied, 30, "server_lost_data"),
        (_taken_by_another, 30, "server_lost_data"),
    ],
)
def test_other_causes_have_other_codes(
    client: redis.Redis, what: Callable[[redis.Redis, Lock], None], expire: float, code: str
) -> None:
    lock = Lock(client, "a", expire=expire, auto_renewal=False)
    lock.acquire()
    what(client, lock)
    assert loss_of(lock).code == code


def test_who_is_released_by_its_id_elsewhere_hears_that(client: redis.Redis) -> None:
    lock = Lock(client, "a")
    lock.acquire()
    Lock(client, "a", id=lock.id).release()
    with pytest.raises(LockLost) as raised:
        lock.extend()
    assert raised.value.record.code == "released"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("taken", [False, True])
def test_release_after_release_by_id_elsewhere_raises_lock_lost(
    make_lock: Any, client: redis.Redis, shared: bool, taken: bool
) -> None:
    """It once took the receipt of the other release for its own, and ended without a word while a third one held."""
    lock, third = make_lock(client, "a", id="given" if shared else None), make_lock(client, "a")
    lock.acquire()
    other = make_lock(client, "a", id=lock.id)
    if shared:
        other.acquire()
    other.release()
    if taken:
        third.acquire(blocking=False)
    with pytest.raises(LockLost) as raised:
        lock.release()
    assert raised.value.record.code == "released"
    assert third.owned() == taken


def test_no_answer_until_the_end_of_its_life_is_no_answer(own_server: RedisServer) -> None:
    with own_server.client() as client:
        lock = Lock(client, "a", expire=0.6)
        lock.acquire()
        own_server.kill()
        wait_until(lambda: lock.lost)
        assert lock.lost is not None
        assert lock.lost.code == "no_answer"


def test_a_cause_that_cannot_be_asked_for_is_unknown_and_the_loss_stands(redis_url: str, client: redis.Redis) -> None:
    with Proxy(redis_url) as proxy, client_at(proxy.url) as behind:
        lock = Lock(behind, "a")
        lock.acquire()
        Lock(client, "a").reset(by="olga")
        proxy.drop_next_reply(n=9, containing=b":forced:")
        assert loss_of(lock).code == "unknown"
        assert proxy.dropped
    assert not Lock(client, "a").locked()


def test_a_quorum_lock_is_lost_by_the_cause_that_all_its_servers_name(server: Any) -> None:
    clients = [redis.Redis.from_url(server.url_of_db(number)) for number in range(3)]
    try:
        for client in clients:
            client.flushdb()
        lock = QuorumLock(clients, "a")
        lock.acquire()
        for client in clients:
            Lock(client, "a").reset(by="olga", reason="stuck")
        with pytest.raises(LockLost) as raised:
            lock.release()
        assert raised.value.record.code == "force_released"
        assert "fewer than 2 of its servers still hold it: olga force-released it" in raised.value.record.reason
    finally:
        for client in clients:
            client.close()


def test_the_note_outlives_the_life_that_was_left_and_then_ends(client: redis.Redis) -> None:
    Lock(client, "a", expire=1000, auto_renewal=False).acquire()
    Lock(client, "a").reset()
    assert 1_000_000 < client.pttl(NOTES) <= 1_120_000
    Lock(client, "a", expire=10, auto_renewal=False).acquire()
    Lock(client, "a").reset()
    assert client.pttl(NOTES) > 900_000  # of the first one, who may still believe
    for _ in range(50):
        Lock(client, "a", auto_renewal=False).acquire()
        Lock(client, "a").reset(reason="x" * 10_000)
    assert client.zcard(NOTES) == 16
    assert all(len(note) < 600 for note in client.zrange(NOTES, 0, -1))


def test_nobody_asks_for_a_cause_unless_a_lock_was_lost(client: redis.Redis) -> None:
    lock = Lock(client, "a")
    with lock:
        lock.extend()
    with counting(client) as counts:
        for _ in range(10):
            with lock:
                lock.extend()
    assert counts["evalsha"] == 30


def test_a_reason_is_one_line_of_the_log(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    lock = Lock(client, "a")
    lock.acquire()
    Lock(client, "a").reset(by="ol\nga", reason="a\r\nERROR forged \x1b[31m line")
    assert loss_of(lock).reason.endswith("UTC: a ERROR forged  [31m line")
    assert not [record for record in caplog.records if "\n" in record.getMessage()]


def test_a_reason_that_is_no_text_is_refused_at_once(client: redis.Redis) -> None:
    lock = Lock(client, "a")
    lock.acquire()
    with pytest.raises(TypeError, match="reason must be a str, not int"):
        Lock(client, "a").reset(reason=7)  # type: ignore[arg-type]
    assert lock.owned()
    lock.release()
