"""Each script uses only the keys that its caller named in KEYS: some servers refuse others, and a Cluster may."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing, suppress
from typing import Any

import pytest
import redis

from django_redislock.celery.execution_lock import AfterRelease, Delivery, ExecutionLock
from django_redislock.core import AsyncLock, Lock, Semaphore, held_locks, operations
from django_redislock.core.driver.registry import server_of
from django_redislock.core.listing import contention, read_queue
from django_redislock.exceptions import LockLost
from tests.support import async_client_at, begin, begin_to_wait, queued, servers_of, until, wait_in_a_thread, wait_until
from tests.support.cache_programs import cache_at, cache_elsewhere
from tests.support.clients import CLUSTER
from tests.support.declared_keys import CHECK, checking_keys
from tests.support.processes import ROOT
from tests.support.scripts import all_scripts

PARTS = {"clock", "lib", "index", "expiry", "take_unwanted", "take", "handover", "counts", "turns", "slots", "replace"}
PARTS |= {"receipts", "waiters", "message", "marker", "undone"}
PARTS |= {"store", "quick", "quick_release", "quick_lease", "quick_slot", "quick_start", "quick_publish"}
"""The files that are no script by themselves."""


def use_locks(client: Any, url: str) -> None:
    wait_in_a_thread(client, "a")
    with Lock(client, "a") as held:
        assert not Lock(client, "a").acquire(timeout=0.05)
        waiter = begin_to_wait(client, "a", Lock(client, "a", id="mine").acquire)
        held.extend()
        assert held.owner().waiting == 1
        assert len(read_queue(client, "a", "redislock")) == 1
    assert waiter.result(30)
    assert Lock(client, "a", id="mine").reset()
    with suppress(LockLost), Lock(client, "a") as lost:
        lost.reset()
    assert Lock(client, "brief", expire=0.05, auto_renewal=False).acquire()
    with Lock(client, "brief", timeout=5):
        asyncio.run(give_up(client, url))


async def give_up(client: Any, url: str) -> None:
    url = url.replace("redis://", CLUSTER) if isinstance(client, redis.RedisCluster) else url
    async with aclosing(async_client_at(url)) as aclient:
        waits = asyncio.create_task(AsyncLock(aclient, "brief").acquire())
        await until(lambda: queued(client, "brief"))
        waits.cancel()
        await until(lambda: not queued(client, "brief"))


def use_semaphores(client: Any, url: str) -> None:
    one, two, three = (Semaphore(client, "a", 2) for _ in range(3))
    with one, two:
        assert three.locked()
        assert not three.acquire(timeout=0.05)
        waiter = begin(three.acquire)
        wait_until(lambda: one.holders()[0].waiting == 1)
        two.extend()
    assert waiter.result(30)
    assert three.reset()


def use_lists(client: Any, url: str) -> None:
    with Lock(client, "a"), Semaphore(client, "a", 2):
        assert len(list(held_locks(client))) == 2
        held = server_of(client).run(operations.count(server_of(client), "redislock"))
    assert (held.locks, held.slots, held.limits) == (2, 1, 2)
    assert held.oldest > 0
    wait_in_a_thread(client, "list")
    assert contention(client).names["list"].waits == 1


def use_tasks(client: Any, url: str) -> None:
    prepared = ExecutionLock(client, "any")
    for limit in (0, 2):
        waiting = prepared.with_name("celery-queue:t", id="task")
        assert waiting.take(fresh=True)
        assert waiting.prevented_by() is not None
        assert waiting.replace_arguments(waiting.owner(), b"newest")
        assert waiting.take_again() is True
        delivery = Delivery("task", f"task:{limit}:one", known=True)
        assert waiting.newest_arguments(delivery) == b"newest"
        of_place = {"place": waiting, "replaces": True, "arguments_expire": 30}
        first = prepared.with_name("celery:t", limit=limit, delivery=delivery, **of_place)
        assert first.acquire(blocking=False)
        assert (first.had_place, first.newest, waiting.owner()) == (True, b"newest", None)
        copy = prepared.with_name("celery:t", limit=limit, delivery=delivery)
        assert not copy.acquire(blocking=False)
        assert not copy.claim(30, "ending")
        other = prepared.with_name("celery:t", limit=limit, delivery=Delivery("other", f"other:{limit}:x", known=True))
        if limit:
            third = prepared.with_name("celery:t", limit=limit, delivery=Delivery("third", "third:0:x", known=True))
            assert third.acquire(blocking=False)
        assert not other.acquire(timeout=0.05)
        other.ending = AfterRelease(keep_id="other", keep=0.01)
        waiter = begin(lambda other=other: other.acquire() and other.release())
        wait_until(lambda first=first: first.owner().waiting == 1, message="it waits")
        first.ending = AfterRelease("ending", 30)
        first.release()
        first.mark_processed(30)
        waiter.result(30)
        other.count_duplicate()
        if limit:
            third.release()
    assert contention(client).names["celery:t"].duplicates == 1


def use_values(client: Any, url: str) -> None:
    backend = "ClusterCache" if isinstance(client, redis.RedisCluster) else "RedisCache"
    cache, other = cache_at(url, backend), cache_elsewhere(url, backend)
    goes_on = threading.Event()

    def compute(size: int = 1) -> str:
        assert goes_on.wait(30)
        return "x" * size

    def waiting() -> int:
        return sum(node.exists(key) for node in servers_of(client) for key in node.keys("*}:queue:cache:*"))

    for size in (1, 600_000):
        goes_on.clear()
        calls = [begin(cache.get_or_set, f"k{size}", lambda size=size: compute(size), 60, stale=60)]
        wait_until(lambda: leases(client))
        calls.append(begin(other.get_or_set, f"k{size}", compute, 60))
        wait_until(waiting)
        goes_on.set()
        assert {call.result(30) for call in calls} == {"x" * size}
    assert cache.get_or_set("old", lambda: "x", 0.001, stale=60) == "x"
    for _ in range(2):
        assert cache.get_or_set("old", lambda: 1 / 0, 0.001, stale=60, on_error="stale") == "x"
    assert cache.delete("old")


def leases(client: Any) -> list[bytes]:
    """Return the values of the leases that are held."""
    found = [(node, key) for node in servers_of(client) for key in node.keys("*}:lock:cache:*")]
    return [value for node, key in found if (value := node.get(key))]


FEATURES = (use_locks, use_semaphores, use_lists, use_tasks, use_values)


@pytest.fixture(params=["server", pytest.param("cluster", marks=pytest.mark.processes)])
def servers(request: pytest.FixtureRequest) -> Any:
    """One server, or a Cluster."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def checked(servers: Any, _empty_database: None) -> Iterator[Any]:
    """A client of servers that know no script yet; each script that they get has the check in front."""
    with checking_keys(), servers.client() as client:
        for each in servers_of(client):
            each.script_flush()
        yield client


def test_each_script_uses_only_the_keys_that_its_caller_named(checked: Any, servers: Any) -> None:
    for feature in FEATURES:
        feature(checked, servers.url)
    names = [path.stem for path in (ROOT / "django_redislock").rglob("*.lua") if path.stem not in PARTS]
    scripts = all_scripts()
    assert {script.name for script in scripts} == set(names), "a new script has to be used here, too"
    known = [each.script_exists(*(script.sha for script in scripts)) for each in servers_of(checked)]
    unused = [script for script, *on in zip(scripts, *known, strict=True) if not any(on)]
    assert unused == []


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("return redis.call('GET', 'other')", "undeclared key other of GET"),
        ("return redis.pcall('GET', 'other')", "undeclared key other of GET"),
        ("pcall(redis.call, 'DEL', 'a', 'other') return 1", "undeclared key other of DEL"),
        ("return redis.call('RENAME', 'a', 'other')", "undeclared key other of RENAME"),
        ("return redis.call('HGET', 'a', 'x')", "unknown command HGET"),
    ],
)
def test_the_check_refuses_an_undeclared_key_and_an_unknown_command(client: Any, script: str, error: str) -> None:
    with pytest.raises(redis.ResponseError, match=error):
        client.eval(CHECK + script, 1, "a")
    assert client.eval(CHECK + "return redis.call('EXISTS', 'a') + #redis.call('TIME')", 1, "a") == 2
