"""A holder hears the cause of its loss that the server knows, in words and as a code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redislock.core import Lock, QuorumLock
from django_redislock.core.keys import lock_keys
from django_redislock.core.lease import notes_key
from django_redislock.exceptions import LockLost, LossRecord
from tests.support import Proxy, RedisServer, client_at, wait_until

KEYS = lock_keys("redislock", "a")
NOTES = notes_key(KEYS)


def loss_of(lock: Lock) -> LossRecord:
    with pytest.raises(LockLost) as raised:
        lock.release()
    return raised.value.record


@pytest.mark.parametrize("operation", ["release", "extend"])
def test_after_a_forced_release_the_holder_hears_who_did_it_when_and_why(
    make_lock: Any, client: redis.Redis, operation: str
) -> None:
    lock = make_lock(client, "a")
    lock.acquire()
    assert make_lock(client, "a").reset(fence=lock.fence, by="olga", reason="It hangs since noon.")
    with pytest.raises(LockLost) as raised:
        getattr(lock, operation)()
    record = raised.value.record
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


def test_each_of_several_former_holders_hears_its_own_cause(client: redis.Redis) -> None:
    locks = [Lock(client, "a", auto_renewal=False) for _ in range(3)]
    for number, lock in enumerate(locks):
        lock.acquire(blocking=False)
        Lock(client, "a").reset(reason=f"reason {number}")
    assert [loss_of(lock).reason.rpartition(": ")[2] for lock in locks] == ["reason 0", "reason 1", "reason 2"]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        (lambda lock, client: wait_until(lambda: lock.lost), "expired"),
        (lambda lock, client: client.delete(KEYS.lock), "server_lost_data"),
        (lambda lock, client: client.flushdb(), "server_lost_data"),
        (lambda lock, client: client.set(KEYS.lock, "another\n1\n1\n{}"), "server_lost_data"),
    ],
    ids=["expired", "deleted", "emptied", "taken by another"],
)
def test_other_causes_have_other_codes(
    client: redis.Redis, what: Callable[[Lock, redis.Redis], Any], code: str
) -> None:
    lock = Lock(client, "a", expire=0.05 if code == "expired" else 30, auto_renewal=False)
    lock.acquire()
    what(lock, client)
    assert loss_of(lock).code == code


@pytest.mark.parametrize("operation", ["release", "extend"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("taken", [False, True])
def test_who_was_released_by_its_id_elsewhere_hears_that(
    make_lock: Any, client: redis.Redis, shared: bool, taken: bool, operation: str
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
        getattr(lock, operation)()
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


def test_a_cause_that_cannot_be_asked_for_is_unknown_and_the_loss_stands(proxy: Proxy, client: redis.Redis) -> None:
    with client_at(proxy.url) as behind:
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
