"""Large values, in processes and in tasks, and many keys."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
from redis.exceptions import RedisError

from django_redislock.cache.lease.obtain import PIECE, _fetch_large
from django_redislock.cache.lease.request import ValueRequest
from django_redislock.cache.lease.store import digest
from django_redislock.core.driver.registry import server_of
from django_redislock.core.options import Renewal
from tests.support import RedisServer, cache_programs, find_program, monitoring, until, wait_until
from tests.support.cache_programs import cache_at, commands, held, lease_elsewhere, waiters

MEGABYTE = 1_000_000


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "tasks"), [(None, False), (None, True), ("redis-server", False)], ids=["valkey", "tasks", "redis"]
)
def test_waiting_processes_get_a_value_of_20_megabytes_and_the_server_needs_no_room_for_copies(
    run_python, program, tasks
):
    """A plain GET by each makes Redis copy it for each, and a plain SET takes up twice the size."""
    value = "x" * 20 * MEGABYTE
    with RedisServer(program and find_program(program, package="redis-server")) as server, server.client() as client:
        waiting = [run_python(cache_programs.wait_for_values, server.url, tasks) for _ in range(3)]
        for process in waiting:
            process.wait_for(event="ready")
        cache = cache_at(server.url)
        cache.get_or_set("warm", lambda: 1)
        before = client.info("memory")["used_memory"]

        def compute():
            for process in waiting:
                process.send("k")
            wait_until(lambda: waiters(client, "k") == 3, timeout=30)
            return value

        cache.get_or_set("k", compute, 60, expire=120)
        for process in waiting:
            assert process.wait_for(event="got")["value"] == value
        assert client.info("memory")["used_memory_peak"] - before < 1.2 * len(value)
        assert 50_000 < client.pttl(":1:k") <= 60_000
        assert cache.get("k") == value


def test_a_large_value_that_is_replaced_while_it_is_fetched_is_fetched_anew(redis_url, client):
    server = server_of(client)
    made = ValueRequest(server, "redislock", "k", None, None, None, Renewal(10), False)
    old, new = b"a" * MEGABYTE, b"b" * MEGABYTE
    client.set("k", old)

    def replace(first):
        assert first == [old[:PIECE]]
        client.set("k", new)

    steps = _fetch_large(made, b"%d %b" % (len(old), digest(old)))
    assert server.run(with_a_look_at_the_first_result(steps, replace)) == new


def test_a_large_value_costs_one_round_trip_more_and_replaces_what_is_due(redis_url, client):
    cache = cache_at(redis_url)
    cache.get_or_set("warm", lambda: 1)
    with monitoring(client) as sent:
        cache.get_or_set("k", lambda: "x" * MEGABYTE, None)
    assert commands(sent) == ["GET", "EVALSHA", *["SETRANGE", "PEXPIRE"], *["SETRANGE"] * 2, "EVALSHA"]
    assert client.pttl(":1:k") == -1
    client.expire(":1:k", 5)
    assert cache.get_or_set("k", lambda: "y" * MEGABYTE, 60, stale=30) == "y" * MEGABYTE
    assert cache.get("k") == "y" * MEGABYTE
    assert client.pttl(":1:k") > 80_000
    assert cache.get_or_set("l", lambda: cache.delete("l") or "z" * MEGABYTE) == "z" * MEGABYTE
    assert cache.get("l") is None
    assert not client.keys("*:value")


@pytest.mark.processes
@pytest.mark.parametrize("program", [None, "redis-server"], ids=["valkey", "redis"])
def test_a_value_that_takes_the_server_long_to_hash_is_replaced_when_it_is_due(program):
    """On Redis 7.0 the time goes on while a script runs."""
    with RedisServer(program and find_program(program, package="redis-server")) as server, server.client() as client:
        cache = cache_at(server.url)
        cache.set("k", b"old" * 10 * MEGABYTE, 25)
        assert cache.get_or_set("k", lambda: b"new", 60, stale=30) == b"new"
        assert cache.get("k") == b"new"
        assert client.pttl(":1:k") > 80_000


def with_a_look_at_the_first_result(steps, look):
    """Go through the steps, whose connection another test may have had closed."""
    effect, first = next(steps), True
    while True:
        try:
            result = yield effect
            if first and result is not None:  # a pause has none
                look(result)
                first = False
            effect = steps.send(result)
        except RedisError as error:
            effect = steps.throw(error)
        except StopIteration as stop:
            return stop.value


@pytest.mark.processes
@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_a_thousand_cold_keys_in_four_processes_are_computed_once_each(client, redis_url, run_python, tasks):
    count = 1000
    processes = [run_python(cache_programs.compute_many_keys, redis_url, count, tasks) for _ in range(4)]
    for process in processes:
        process.wait_for(event="ready")
    for process in processes:
        process.send()
    done = [process.wait_for(event="done", timeout=90) for process in processes]
    assert sum(line["computed"] for line in done) == count
    assert all(line["threads"] <= 4 for line in done), "no thread for each of those who wait"
    assert not held(client)
    kept = re.compile(rb":1:k|\{redislock:\d+\}:(fence$|era$|counts$)|:1:warm")
    assert [key for key in client.keys("*") if not kept.match(key)] == [], (
        "values, fences and what waits are counted in"
    )


# Large values in tasks: a thread decodes them, and the loop goes on


decoders: list[bool] = []


class Noting:
    """Notes whether the thread of the tests decodes it."""

    def __init__(self, size: int) -> None:
        self.data = bytes(size)

    def __setstate__(self, state: dict[str, Any]) -> None:
        decoders.append(threading.current_thread() is threading.main_thread())
        self.__dict__.update(state)


@pytest.fixture(autouse=True)
def _nothing_noted():
    decoders.clear()


SIZES = pytest.mark.parametrize(("size", "in_the_loop"), [(1000, True), (200_000, False)], ids=["small", "large"])


@SIZES
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_a_task_that_computes_or_finds_a_large_value_has_a_thread_decode_it(cache, size, in_the_loop, many):
    async def get():
        if many:
            return (await cache.aget_or_set_many(["k"], lambda keys: {"k": Noting(size)}, 60))["k"]
        return await cache.aget_or_set("k", lambda: Noting(size), 60)

    async def main():
        assert len((await get()).data) == len((await get()).data) == size

    asyncio.run(main())
    assert decoders == [in_the_loop] * 2


def set_while_tasks_wait(cache, client, value):
    """Return what three tasks have that wait for another process, while the value is set in its place."""

    async def main():
        other = lease_elsewhere(client, "k")
        other.acquire()
        tasks = [asyncio.create_task(cache.aget_or_set("k", lambda: 1 / 0, 60)) for _ in range(3)]
        await until(lambda: waiters(client, "k"))
        cache.set("k", value, 60)
        other.release()
        return await asyncio.gather(*tasks)

    return asyncio.run(main())


@SIZES
def test_tasks_that_waited_for_a_large_value_have_a_thread_decode_their_copies(cache, client, size, in_the_loop):
    values = set_while_tasks_wait(cache, client, Noting(size))
    assert len({id(value) for value in values}) == 3
    assert decoders == [in_the_loop] * len(decoders)
    assert len(decoders) >= 3


LARGER_THAN_A_SCRIPT_COPIES = 600_000


def test_a_value_that_was_set_while_others_wait_and_that_no_script_copies_is_fetched_as_a_whole(cache, client):
    """No message with its length and its digest arrives, because no computation stored it."""
    values = set_while_tasks_wait(cache, client, Noting(LARGER_THAN_A_SCRIPT_COPIES))
    assert [value.data for value in values] == [bytes(LARGER_THAN_A_SCRIPT_COPIES)] * 3
