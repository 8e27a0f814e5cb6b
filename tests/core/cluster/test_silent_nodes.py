"""All nodes are silent, as behind a firewall that drops: any call ends after four socket timeouts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest
import redis

from django_redislock.core import AsyncLock, Lock, held_locks, reset_all, scripts
from django_redislock.core.driver import effects
from django_redislock.core.driver.async_server import async_server_of
from django_redislock.core.driver.cluster.table import PING, Node
from django_redislock.core.driver.effects import At, AtEach
from django_redislock.core.driver.registry import server_of
from django_redislock.core.listing import contention
from django_redislock.core.operations import count
from django_redislock.exceptions import LockBackendError
from tests.support import BUSY, Cluster, renew_now, wait_until, wait_until_renewed
from tests.support.cache_programs import cache_at

TIMEOUT = 0.6
"""Longer than the pause between two readings of the slot table."""
NAMES = [f"lock-{number}" for number in range(100)]
ROUNDS = itertools.count()
"""Each round has values of its own, because one that is repeated after a stall may have stored some."""


@pytest.fixture(autouse=True)
def _one_try(monkeypatch):
    """Else each call is repeated until RETRY_FOR is over: here one try is counted."""
    monkeypatch.setattr(effects, "retry_for", 0.0)


@pytest.fixture(scope="module")
def silent_nodes() -> Iterator[Cluster]:
    """Six nodes, which the tests freeze: no failover comes meanwhile."""
    with Cluster(primaries=6, cluster_node_timeout="60000") as cluster:
        yield cluster


@pytest.fixture
def freeze(silent_nodes):
    def freeze() -> None:
        for node in silent_nodes.nodes:
            node.pause()

    yield freeze
    for node in silent_nodes.nodes:
        node.resume()


@pytest.fixture
def waited(monkeypatch):
    """The socket timeouts for which the calls of threads waited in vain, without those that give back what a call of
    this test, or of an earlier one, may have got: nobody waits for them."""
    parts: list[float] = []
    call, renew = Node.call, Node.renew

    def gives_back(asked):
        return any(each.script is scripts.UNDO for each in getattr(asked, "calls", [asked]) if hasattr(each, "script"))

    def counted_call(self, asked):
        try:
            return call(self, asked)
        except redis.TimeoutError:
            parts.append(1.0)
            raise

    def counted_renew(self, asked, patience):
        try:
            return renew(self, asked, patience)
        except redis.TimeoutError:
            if not gives_back(asked):
                parts.append(min(patience, TIMEOUT) / TIMEOUT)
            raise

    monkeypatch.setattr(Node, "call", counted_call)
    monkeypatch.setattr(Node, "renew", counted_renew)
    return parts


def values_of(cluster: Cluster, **options: object):
    return cache_at(cluster.url, "ClusterCache", OPTIONS={"SOCKET_TIMEOUT": TIMEOUT, **options})


CALLS = {
    "acquire": lambda client: Lock(client, "a").acquire(),
    "list": lambda client: list(held_locks(client)),
    "count": lambda client: server_of(client).run(count(server_of(client), "redislock")),
    "count with missing nodes": lambda client: server_of(client).run(count(server_of(client), "redislock", 0, {})),
    "contention": contention,
    "reset_all": reset_all,
}


@pytest.mark.parametrize("known", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("call", CALLS)
def test_silent_nodes_cost_a_call_four_socket_timeouts_at_most(silent_nodes, freeze, waited, call, known):
    with silent_nodes.client(socket_timeout=TIMEOUT, client_name=f"{call} {known}".replace(" ", "-")) as client:
        if known:
            list(held_locks(client))
        freeze()
        server_of(client).table.outdated = True
        with pytest.raises(LockBackendError):
            CALLS[call](client)
    assert 0 < sum(waited) <= 4


def ask_each_node(table):
    answers = yield AtEach(tuple(At(node, PING, 0.1) for node in table.primaries))
    assert all(isinstance(answer, redis.TimeoutError) for answer in answers)
    raise LockBackendError("", "each node is silent")


@pytest.mark.parametrize("call", [*CALLS, "each node"])
def test_the_error_of_silent_nodes_does_not_keep_what_its_function_has_dropped(silent_nodes, freeze, call):
    """Of several nodes the answers are a list: an error in it led, by its traceback, to the frame with the list."""
    calls = CALLS | {"each node": lambda client: server_of(client).run(ask_each_node(server_of(client).table))}
    with silent_nodes.client(socket_timeout=TIMEOUT, client_name=f"dropped {call}".replace(" ", "-")) as client:
        Lock(client, "a").locked()  # or the Cluster knows no nodes
        freeze()

        def drop_and_fail():
            dropped = Lock(client, "b")
            with suppress(LockBackendError):  # `pytest.raises` would keep it
                answered.append(calls[call](client))
            return weakref.ref(dropped)

        answered = []
        gc.disable()
        try:
            assert drop_and_fail()() is None
        finally:
            gc.enable()
        assert not answered


ASYNC_CALLS = {
    "acquire": lambda client: AsyncLock(client, "a").acquire(),
    "count": lambda client: async_server_of(server_of(client)).run(count(server_of(client), "redislock")),
}


@pytest.mark.parametrize("call", ASYNC_CALLS)
def test_silent_nodes_cost_a_task_four_socket_timeouts_at_most(silent_nodes, freeze, call):
    timeout = 2.5 * TIMEOUT  # it takes little more than one: the rest is for a busy machine

    async def use() -> float:
        with silent_nodes.client(socket_timeout=timeout, client_name=f"task-{call}") as client:
            await ASYNC_CALLS["count"](client)
            freeze()
            server_of(client).table.outdated = True
            began = time.monotonic()
            with pytest.raises(LockBackendError):
                await ASYNC_CALLS[call](client)
            return time.monotonic() - began

    assert asyncio.run(use()) < 4 * timeout + BUSY


def test_a_lock_whose_renewal_met_silent_nodes_is_not_renewed_after_it_was_dropped(silent_nodes, freeze, waited):
    with silent_nodes.client(socket_timeout=TIMEOUT, client_name="dropped-renewal") as client:

        def renew_and_drop():
            lock = Lock(client, "a", expire=30)
            lock.acquire()
            freeze()
            renew_now(lock)
            wait_until(lambda: waited)
            for node in silent_nodes.nodes:
                node.resume()
            wait_until_renewed(lock)
            return weakref.ref(lock._visible_lease())

        gc.disable()
        try:
            dropped = renew_and_drop()
            wait_until(lambda: dropped() is None, timeout=10)
        finally:
            gc.enable()


def test_the_error_of_silent_nodes_does_not_keep_what_its_task_has_dropped(silent_nodes, freeze):
    """A request that was given up is in the connection's list until its reply comes, or the connection ends."""

    async def drop_and_fail(client):
        dropped = Lock(client, "b")
        with suppress(LockBackendError):
            answered.append(await ASYNC_CALLS["count"](client))
        return weakref.ref(dropped)

    async def use():
        port = silent_nodes.nodes[0].port
        client = redis.asyncio.RedisCluster("127.0.0.1", port, socket_timeout=TIMEOUT)  # it says nothing as it connects
        freeze()
        dropped = await drop_and_fail(client)
        await asyncio.sleep(0)  # the loop has the reply until the task waits again
        assert dropped() is None

    answered = []
    gc.disable()
    try:
        asyncio.run(use())
    finally:
        gc.enable()
    assert not answered


@pytest.mark.parametrize("ignores", [False, True], ids=["raises", "ignores-exceptions"])
@pytest.mark.parametrize("when", ["before", "while it computes"])
def test_get_or_set_many_of_silent_nodes_waits_four_socket_timeouts_at_most(
    silent_nodes, freeze, waited, ignores, when
):
    cache = values_of(silent_nodes, IGNORE_EXCEPTIONS=ignores, client_name=f"many-{ignores}-{when[:2]}")

    names = [f"{next(ROUNDS)} {name}" for name in NAMES]

    def compute(keys):
        if when != "before":
            freeze()
        return dict.fromkeys(keys, 1)

    cache.get_or_set_many([f"warm {name}" for name in names], lambda keys: dict.fromkeys(keys, 1), 60)
    if when == "before":
        freeze()
    if ignores:
        assert cache.get_or_set_many(names, compute, 60) == dict.fromkeys(names, 1)
    else:
        with pytest.raises(redis.TimeoutError):
            cache.get_or_set_many(names, compute, 60)
    assert 0 < sum(waited) <= 4


@pytest.mark.parametrize("ignores", [False, True], ids=["raises", "ignores-exceptions"])
@pytest.mark.parametrize("when", ["before", "while it computes"])
def test_aget_or_set_many_of_silent_nodes_waits_four_socket_timeouts_at_most(silent_nodes, freeze, ignores, when):
    cache = values_of(silent_nodes, IGNORE_EXCEPTIONS=ignores, client_name=f"amany-{ignores}-{when[:2]}")
    names = [f"a {next(ROUNDS)} {name}" for name in NAMES]

    async def compute(keys):
        if when != "before":
            freeze()
        return dict.fromkeys(keys, 1)

    async def use() -> float:
        await cache.aget_or_set_many([f"warm {name}" for name in names], lambda keys: dict.fromkeys(keys, 1), 60)
        if when == "before":
            freeze()
        began = time.monotonic()
        if ignores:
            assert await cache.aget_or_set_many(names, compute, 60) == dict.fromkeys(names, 1)
        else:
            with pytest.raises(redis.TimeoutError):
                await cache.aget_or_set_many(names, compute, 60)
        return time.monotonic() - began

    assert asyncio.run(use()) < 4 * TIMEOUT + BUSY
