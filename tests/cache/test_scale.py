"""Large values, many keys, many runs, and computers that die at any point of their work."""

from __future__ import annotations

import os
import re
import shutil
import time

import pytest
from redis.exceptions import RedisError

from django_redislock.cache.lease import single_flight
from django_redislock.cache.lease.obtain import PIECE, _fetch_large
from django_redislock.cache.lease.request import ValueRequest
from django_redislock.cache.lease.store import digest
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import BUCKETS
from tests.support import RedisServer, cache_programs, monitoring, wait_until
from tests.support.cache_programs import cache_at, commands, held, waiters

MEGABYTE = 1_000_000


@pytest.mark.processes
@pytest.mark.one_server("its server is not in cluster mode")
def test_a_value_of_20_megabytes_takes_up_little_more_than_its_size(backend):
    """Above what the server uses anyway; a plain SET of the base class takes up twice the size."""
    value = os.urandom(20 * MEGABYTE)
    with RedisServer() as server, server.client() as client:
        cache = cache_at(server.url, backend)
        cache.get_or_set("warm", lambda: 1)
        before = client.info("memory")["used_memory"]
        assert cache.get_or_set("k", lambda: value, 60) == value
        assert client.info("memory")["used_memory_peak"] - before < 1.2 * len(value)
        assert 50_000 < client.pttl(":1:k") <= 60_000
        assert cache.get("k") == value
        assert client.dbsize() == 1 + sum(key.endswith((b":fence", b":era")) for key in client.keys("*")) + 1


@pytest.mark.processes
@pytest.mark.parametrize("program", [None, "redis-server"], ids=["valkey", "redis"])
@pytest.mark.parametrize("tasks", [False, True], ids=["thread", "task"])
def test_waiting_processes_get_a_value_of_20_megabytes_and_the_server_needs_no_room_for_copies(
    run_python, program, tasks
):
    """A plain GET by each makes Redis copy it for each."""
    if program is not None and shutil.which(program) is None:
        pytest.skip("no redis-server here")
    value = "x" * 20 * MEGABYTE
    with RedisServer(program) as server, server.client() as client:
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
        assert cache.get("k") == value


def test_a_large_value_that_is_replaced_while_it_is_fetched_is_fetched_anew(redis_url, client):
    server = server_of(client)
    made = ValueRequest(server, "redislock", "k", None, None, None, 10, True, None, False)
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
    if program is not None and shutil.which(program) is None:
        pytest.skip("no redis-server here")
    with RedisServer(program) as server, server.client() as client:
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
    kept = re.compile(rb":1:k|\{redislock:\d+\}:(fence$|era$|waits:|waited:|saves:|saved:)|:1:warm")
    assert [key for key in client.keys("*") if not kept.match(key)] == [], (
        "values, fences and what waits are counted in"
    )


@pytest.mark.slow
def test_two_thousand_runs_leave_nothing(redis_url, client):
    cache = cache_at(redis_url)
    for start in range(0, 2000, 1000):  # so that each bucket has several
        keys = [f"k{number}" for number in range(start, start + 1000)]
        for key in keys[:990]:
            cache.get_or_set(key, lambda: 1, 60)
        cache.get_or_set_many(keys[990:], lambda missing: dict.fromkeys(missing, 1), 60)
        client.delete(*[f":1:{key}" for key in keys])
    assert all(key.endswith((b":fence", b":era")) for key in client.keys("*"))
    assert client.dbsize() <= 2 * BUCKETS
    assert not single_flight._flights


@pytest.mark.processes
@pytest.mark.parametrize("after", [2, 5, 9])
def test_a_computer_killed_at_any_point_of_its_work_is_followed_by_another(client, redis_url, run_python, after):
    first, second = (run_python(cache_programs.work_in_steps, redis_url, 10) for _ in range(2))
    wait_until(lambda: first.lines or second.lines)
    wait_until(lambda: waiters(client, "k") == 1)
    computing, waiting = (first, second) if first.lines else (second, first)
    for step in range(after):
        computing.wait_for(event="step", step=step)
        computing.send()
    computing.wait_for(event="step", step=after)
    assert not waiting.lines
    computing.kill()
    killed = time.monotonic()
    waiting.wait_for(event="step", step=0)
    assert time.monotonic() - killed < 1 + 2, "its life, and a moment"
    for step in range(10):
        if step:
            waiting.wait_for(event="step", step=step)
        waiting.send()
    assert waiting.wait_for(event="got")["value"] == "v"
    assert cache_at(redis_url).get("k") == "v"


@pytest.mark.processes
def test_all_data_is_lost_while_others_wait(own_server, run_python):
    processes = [run_python(cache_programs.ask, own_server.url, "RedisCache", "k", f"by {n}", {}, {}) for n in range(3)]
    for process in processes:
        process.wait_for(event="ready")
    first, *others = processes
    first.send("ask")
    first.wait_for(event="computing")
    for process in others:
        process.send("ask")
    with own_server.client() as client:
        wait_until(lambda: waiters(client, "k") == 2)
        client.flushall()
        wait_until(lambda: any({"event": "computing"}.items() <= line.items() for p in others for line in p.lines))
        first.send("stale")
        assert first.wait_for(event="got")["value"] == "stale"
        assert client.get(":1:k") is None, "what was computed before is not stored"
        (fresh,) = [p for p in others if any(line["event"] == "computing" for line in p.lines)]
        fresh.send("fresh")
        for process in others:
            assert process.wait_for(event="got")["value"] == "fresh"
