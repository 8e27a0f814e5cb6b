"""A holder that is asked for its lock gives it back; nobody else gets the lock before that, or before its expiry."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import redis

from django_redislock.core import Lock, QuorumLock, Semaphore
from django_redislock.core.keys import lock_keys
from django_redislock.core.listing import held_locks
from django_redislock.exceptions import LockLost
from tests.support import begin, wait_until

KEYS = lock_keys("redislock", "a")


def test_the_holder_hears_who_asked_and_why_and_nobody_gets_the_lock_before_it_is_released(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    held, waits = Lock(client, "a", expire=1.5, on_lost=lambda lock: told.append(lock.lost)), Lock(client, "a")
    held.acquire()
    waiting = begin(waits.acquire)
    wait_until(lambda: client.zcard(KEYS.queue))
    assert Lock(client, "a").recall(by="olga", reason="It hangs since noon.")
    began = time.monotonic()
    wait_until(lambda: told)
    assert time.monotonic() - began < 1.5 / 3 + 0.2
    assert told[0].code == "recalled"
    assert re.fullmatch(r"olga asked for it back at 20\d\d-\S+ \S+ UTC: It hangs since noon", told[0].reason)
    assert "olga asked for it back" in caplog.text
    with pytest.raises(LockLost):
        held.raise_if_lost()
    assert not waiting.done()
    with pytest.raises(LockLost):
        held.release()
    assert waiting.result(5)
    waits.reset()


@pytest.mark.parametrize("operation", ["extend", "reacquire"])
def test_a_recalled_lock_is_not_extended(make_lock: Any, client: redis.Redis, operation: str) -> None:
    lock = make_lock(client, "a", expire=5)
    lock.acquire()
    assert make_lock(client, "a").recall(fence=lock.fence, by="olga")
    left = client.pttl(KEYS.lock)
    with pytest.raises(LockLost) as raised:
        getattr(lock, operation)()
    assert raised.value.record.code == "recalled"
    assert client.pttl(KEYS.lock) <= left
    with pytest.raises(LockLost):
        lock.release()
    assert not lock.locked()


def test_who_releases_before_it_has_heard_of_it_lost_nothing(make_lock: Any, client: redis.Redis) -> None:
    lock = make_lock(client, "a")
    lock.acquire()
    assert lock.recall()
    assert lock.owned()
    lock.release()
    assert not make_lock(client, "a").recall(), "nobody holds it"
    assert not client.zcard(KEYS.held)


def test_a_second_ask_changes_nothing_and_a_forced_release_after_it_works(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    lock = Lock(client, "a", auto_renewal=False)
    lock.acquire()
    other = Lock(client, "a")
    assert not other.recall(fence=lock.fence + 1)
    assert other.recall(fence=lock.fence, by="olga")
    value = client.get(KEYS.lock)
    assert other.recall(fence=lock.fence, by="otto")
    assert client.get(KEYS.lock) == value
    assert "otto" not in caplog.text
    assert other.reset(fence=lock.fence, by="oskar")
    assert not client.exists(KEYS.lock)
    with pytest.raises(LockLost) as raised:
        lock.release()
    assert raised.value.record.code == "force_released"
    assert raised.value.record.reason.startswith("oskar ")


def test_a_lock_that_is_not_renewed_is_held_until_its_expiry(client: redis.Redis) -> None:
    lock = Lock(client, "a", expire=0.6, auto_renewal=False)
    lock.acquire()
    began = time.monotonic()
    assert Lock(client, "a").recall()
    assert lock.lost is None
    assert Lock(client, "a").acquire(timeout=5)
    assert 0.4 < time.monotonic() - began < 1
    assert lock.lost


def test_who_knows_the_id_neither_acquires_nor_extends_a_recalled_lock(make_lock: Any, client: redis.Redis) -> None:
    lock, same = make_lock(client, "a", id="given"), make_lock(client, "a", id="given")
    lock.acquire()
    assert lock.recall()
    left = client.pttl(KEYS.lock)
    assert not same.acquire(blocking=False)
    assert client.pttl(KEYS.lock) <= left
    same.release()
    assert not lock.locked()


def test_a_re_entrant_lock_is_not_entered_again(make_lock: Any, client: redis.Redis) -> None:
    lock = make_lock(client, "a", reentrant=True)
    lock.acquire()
    lock.acquire()
    assert lock.recall()
    with pytest.raises(LockLost) as raised:
        lock.acquire()
    assert raised.value.record.code == "recalled"
    assert lock.locked(), "until the outermost block ends"
    for _ in range(2):
        with pytest.raises(LockLost):
            lock.release()
    assert not lock.locked()


def test_one_slot_is_recalled_or_each_one(client: redis.Redis) -> None:
    slots = [Semaphore(client, "a", 2) for _ in range(2)]
    for slot in slots:
        slot.acquire()
    assert slots[0].recall(fence=slots[0].fence)
    assert [held.recalled for held in slots[0].holders()] == [True, False]
    slots[1].extend()
    assert slots[0].recall()
    with pytest.raises(LockLost):
        slots[1].extend()
    assert not Semaphore(client, "a", 2).acquire(blocking=False)
    slots[0].release()
    assert Semaphore(client, "a", 2).acquire(blocking=False)


def test_the_list_shows_the_holder_and_that_it_was_asked(client: redis.Redis) -> None:
    lock = Lock(client, "a")
    lock.acquire()
    lock.recall()
    assert [(held.id, held.fence, held.recalled) for held in held_locks(client)] == [(lock.id, lock.fence, True)]


def test_a_quorum_lock_is_recalled_from_most_of_its_servers(server: Any) -> None:
    clients = [redis.Redis.from_url(server.url_of_db(number)) for number in range(3)]
    try:
        for client in clients:
            client.flushdb()
        lock = QuorumLock(clients, "a")
        lock.acquire()
        for client in clients[:2]:
            Lock(client, "a").recall(by="olga")
        with pytest.raises(LockLost) as raised:
            lock.extend()
        assert raised.value.record.code == "recalled"
    finally:
        for client in clients:
            client.close()
