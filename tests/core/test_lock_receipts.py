"""A release that is repeated, because its reply was lost, gets the same answer; what is kept for that stays small."""

from __future__ import annotations

import pytest
import redis

from django_redislock.core import Lock
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.core.operations import release_call, reset_call
from django_redislock.exceptions import NotAcquired
from tests.support import Proxy, client_at


def cycle(client: redis.Redis, name: str, times: int) -> None:
    lock = Lock(client, name, auto_renewal=False)
    for _ in range(times):
        with lock:
            pass


@pytest.mark.slow
def test_ten_thousand_cycles_of_a_name_leave_no_more_keys_than_one(client: redis.Redis) -> None:
    cycle(client, "a", 1)
    before = client.dbsize()
    cycle(client, "a", 10_000)
    assert client.dbsize() == before
    receipts = lock_keys("redislock", "a").receipts
    assert client.zcard(receipts) < 1500
    assert 0 < client.pttl(receipts) <= 120_000


def test_a_thousand_resets_of_a_name_leave_no_more_keys_than_one(client: redis.Redis) -> None:
    lock, sizes = Lock(client, "a"), set()
    for _ in range(1000):
        client.set(lock_keys("redislock", "a").lock, "other\n1\n1\n{}", px=60_000)
        assert lock.reset()
        sizes.add(client.dbsize())
    assert sizes == {2}  # the receipts, and the notes for former holders


def test_the_oldest_receipts_leave_at_later_releases(client: redis.Redis) -> None:
    receipts = lock_keys("redislock", "a").receipts
    client.zadd(receipts, {f"{number}": number for number in range(1, 3001)})
    client.zadd(receipts, {"id recent": client.time()[0] * 1_000_000})
    cycle(client, "a", 200)
    left = client.zrange(receipts, 0, -1)
    assert len(left) < 1224
    assert b"id recent" in left
    assert b"3000" in left


def test_a_release_whose_reply_was_lost_is_repeated_after_a_thousand_others_came_and_went(client: redis.Redis) -> None:
    """Such as that of a client that is cut off while others go on."""
    lock = Lock(client, "a")
    lock.acquire()
    release = release_call(lock._visible_lease()).with_text()
    assert server_of(client).call(release) == 1
    cycle(client, "a", 1000)
    lock.release()


def test_a_release_by_id_whose_reply_was_lost_says_released(proxy: Proxy) -> None:
    with client_at(proxy.url) as behind:
        lock = Lock(behind, "a", id="given")
        lock.acquire()
        proxy.drop_next_reply(containing=b"EVALSHA")
        Lock(behind, "a", id="given").release()
        assert proxy.dropped == 1


@pytest.mark.slow
def test_a_release_that_is_answered_after_the_end_of_its_life_is_a_release(proxy: Proxy) -> None:
    with client_at(proxy.url) as behind:
        lock = Lock(behind, "a", expire=1, auto_renewal=False)
        lock.acquire()
        proxy.delay_replies(1.2)
        lock.release()
        assert lock.lost is None


@pytest.mark.parametrize("end", ["force-released", "expired"])
def test_a_given_id_that_released_before_did_not_release_what_ended_otherwise(client: redis.Redis, end: str) -> None:
    for _ in range(2):
        with Lock(client, "a", id="given"):
            pass
    Lock(client, "a", id="given").acquire()
    for _ in range(2):  # by the id alone; that may be repeated
        Lock(client, "a", id="given").release()
    Lock(client, "a", id="given").acquire()
    if end == "expired":
        client.delete(lock_keys("redislock", "a").lock)
    else:
        Lock(client, "a").reset()
    with pytest.raises(NotAcquired):
        Lock(client, "a", id="given").release()


def test_a_reset_is_repeated_while_the_next_one_holds(client: redis.Redis) -> None:
    """It frees one acquisition, however often its call comes."""
    Lock(client, "a").acquire()
    server = server_of(client)
    call = reset_call(lock_keys("redislock", "a"), None).with_text()
    assert server.call(call) == 1
    successor = Lock(client, "a")
    successor.acquire(blocking=False)
    assert server.call(call) == 1
    assert successor.owned()
    successor.release()
