"""What README says of a lock by hand and of redis-py's lock: each cell of its table, on a real server."""

from __future__ import annotations

import threading

import pytest
import redis
from redis.exceptions import ConnectionError, LockNotOwnedError
from redis.lock import Lock

from tests.support import Proxy, Server, wait_until
from tests.support.cache_programs import base_at


def test_django_rediss_lock_is_redis_pys(redis_url: str) -> None:
    assert type(base_at(redis_url).lock("x")) is Lock


def test_when_the_work_outlasts_the_expiry_a_second_holder_starts(client: redis.Redis) -> None:
    client.set("by hand", "first", nx=True, px=50)
    first = client.lock("redis-py", timeout=0.05)
    assert first.acquire()
    wait_until(lambda: client.set("by hand", "second", nx=True, px=50))
    wait_until(lambda: client.lock("redis-py", timeout=60).acquire(blocking=False))
    with pytest.raises(LockNotOwnedError):  # so that one learns of it, at its end
        first.release()


def test_what_a_killed_holder_leaves_stays_until_its_expiry_or_for_ever(client: redis.Redis) -> None:
    client.set("by hand", "killed", nx=True, ex=30)
    assert client.lock("with timeout", timeout=30).acquire()
    assert client.lock("without").acquire()
    assert [0 < client.ttl(name) <= 30 for name in ("by hand", "with timeout")] == [True, True]
    assert client.ttl("without") == -1


@pytest.mark.skipif(redis.VERSION < (6, 0), reason="redis-py 6.0 is the first whose clients repeat what failed")
def test_a_lost_reply_makes_ones_own_lock_a_busy_one(server: Server, client: redis.Redis) -> None:
    with Proxy(server.url) as proxy, redis.Redis(port=proxy.port) as behind:  # it repeats what failed
        behind.ping()
        proxy.drop_next_reply(containing=b"by hand")
        assert behind.set("by hand", "mine", nx=True, ex=30) is None, "the client has asked again"
        assert client.get("by hand") == b"mine"
        proxy.drop_next_reply(containing=b"redis-py")
        assert not behind.lock("redis-py", timeout=30).acquire(blocking=False)
        assert client.exists("redis-py")
    with Proxy(server.url) as proxy, redis.Redis.from_url(proxy.url) as behind:  # it does not, and tells its caller
        behind.ping()
        proxy.drop_next_reply(containing=b"failed")
        with pytest.raises(ConnectionError):
            behind.lock("failed", timeout=30).acquire(blocking=False)
        assert client.exists("failed")


def test_a_holder_that_was_frozen_frees_its_successors_lock_by_hand_and_nothing_by_redis_py(
    client: redis.Redis,
) -> None:
    client.set("by hand", "frozen", nx=True, px=50)
    frozen = client.lock("redis-py", timeout=0.05)
    assert frozen.acquire()
    wait_until(lambda: client.set("by hand", "successor", nx=True, ex=30))
    wait_until(lambda: client.lock("redis-py", timeout=30).acquire(blocking=False))
    client.delete("by hand")
    with pytest.raises(LockNotOwnedError):
        frozen.release()
    assert not client.exists("by hand")
    assert client.exists("redis-py")


def test_redis_pys_waiters_poll_and_a_newer_one_may_be_served_before_an_older_one(client: redis.Redis) -> None:
    holder, older = client.lock("x", timeout=60), client.lock("x", timeout=60, sleep=0.3)
    assert holder.acquire()
    before = client.info("commandstats")["cmdstat_set"]["calls"]
    waiting = threading.Thread(target=older.acquire)
    waiting.start()
    wait_until(lambda: client.info("commandstats")["cmdstat_set"]["calls"] >= before + 3)
    holder.release()
    newer = client.lock("x", timeout=60)
    assert newer.acquire(blocking=False), "it came last, and is served first"
    newer.release()
    waiting.join(20)


def test_neither_of_them_says_who_holds_it(client: redis.Redis) -> None:
    assert client.lock("redis-py", timeout=30).acquire()
    token = client.get("redis-py")
    assert len(token) == 32
    int(token, 16)  # a number drawn at random
