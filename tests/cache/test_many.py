"""get_or_set_many: each missing key is computed once over all callers, whatever other keys they want."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis
from django.test import override_settings

from django_redislock.cache.lease import many as many_module, single_flight
from django_redislock.core import held_locks
from tests.support import monitoring, servers_of, wait_until
from tests.support.cache_programs import cache_at, commands, held, never, upper
from tests.support.interruptions import interrupted_at_each_point


def test_what_is_missing_is_computed_in_one_call_and_stored(cache, client, many):
    cache.set("b", "stored")
    calls = []
    values = many(["a", "b", "c", "a"], lambda keys: calls.append(keys) or upper(keys), 60)
    assert values == {"a": "A", "b": "stored", "c": "C"}
    assert list(values) == ["a", "b", "c"]
    assert calls == [["a", "c"]]
    assert cache.get_many(["a", "b", "c"]) == values
    assert 50_000 < client.pttl(":1:a") <= 60_000
    assert many(iter("abc"), never) == values
    assert not held(client)
    assert not single_flight._flights


def test_hits_are_one_mget(cache, client, many):
    cache.set_many({"a": None, "b": 2})
    many(["warm"], upper)
    with monitoring(client) as sent:
        assert many(["a", "b"], never) == {"a": None, "b": 2}
    assert commands(sent) in (["MGET"], ["GET"] * 2)  # the latter on a Cluster, whose nodes have other slots


def test_keys_that_are_there_are_read_and_decoded_and_nothing_else_is_done_for_each(cache, many, monkeypatch):
    keys = [f"k{number}" for number in range(100)]
    cache.set_many(dict.fromkeys(keys, 1))
    many(["warm"], upper)
    made = []
    for name in ("_prepare", "_client_for", "_server_of"):
        method = getattr(type(cache), name)
        monkeypatch.setattr(
            type(cache), name, lambda *args, f=method, name=name, **options: made.append(name) or f(*args, **options)
        )
    assert many(keys, never) == dict.fromkeys(keys, 1)
    assert len(made) <= 3
    assert many([*keys, "missing"], upper)["missing"] == "MISSING"
    assert made.count("_prepare") == 1


@pytest.mark.one_server("on a Cluster each node takes round trips of its own")
@pytest.mark.parametrize("count", [1, 100])
def test_however_many_are_missing_they_take_three_round_trips(many, client, effects, count):
    """One to read them, one to ask for the right to compute them, one to store them."""
    keys = [f"k{number}" for number in range(count)]
    many(["warm"], upper)
    effects.clear()
    with monitoring(client) as sent:
        assert many(keys, lambda missing: client.echo("computing") and upper(missing)) == upper(keys)
    asked = [type(effect).__name__.replace("ScriptBatch", "ScriptCall") for _, effect in effects]
    assert [effect for effect in asked if effect != "Pipeline"] == ["ScriptCall", "Invoke", "ScriptCall"]
    assert commands(sent) == ["MGET", *["EVALSHA"] * count, "ECHO", *["EVALSHA"] * count]


def test_keys_without_a_value_are_left_out_and_free_and_values_nobody_asked_for_are_not_stored(cache, client, many):
    assert many([], never) == {}
    assert many(["a", "b"], lambda keys: {"a": 1, "z": 26}) == {"a": 1}
    assert (cache.get("b"), cache.get("z")) == (None, None)
    assert not held(client)
    assert cache.get_or_set("b", lambda: 2) == 2


def test_the_defaults_error_comes_out_and_every_key_is_free(cache, client, many):
    def fail(keys):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        many(["a", "b"], fail)
    with pytest.raises(TypeError, match="must return a dict"):
        many(["a", "b"], list)
    assert not held(client)
    assert not single_flight._flights
    assert many(["a", "b"], upper) == {"a": "A", "b": "B"}


def test_bad_arguments(many):
    for options in ({"stale": 5}, {"nonsense": 1}, {"refresh": "thread"}):
        with pytest.raises(TypeError, match=next(iter(options))):
            many(["a"], upper, **options)
    with pytest.raises(TypeError, match="default"):
        many(["a"], {"a": 1})
    with pytest.raises(ValueError, match="wait"):
        many(["a"], upper, wait=-1)


@pytest.mark.parametrize("settings", [{"ENABLED": False}, {}])
def test_without_locks(cache, client, many, settings):
    cache.set("b", "stored")
    many(["warm"], upper)
    with override_settings(DJANGO_REDISLOCK=settings), monitoring(client) as sent:
        assert many(["a", "b"], upper, 60, lock=not settings) == {"a": "A", "b": "stored"}
    assert ("EVALSHA" in commands(sent)) is not bool(settings)
    assert cache.get("a") == "A"


def test_a_key_deleted_meanwhile_is_not_stored_and_the_others_are(cache, many):
    def compute(keys):
        cache.delete("b")
        return upper(keys)

    assert many(["a", "b"], compute) == {"a": "A", "b": "B"}
    assert cache.get_many(["a", "b"]) == {"a": "A"}


def test_nested(cache):
    def outer(keys):
        inner = cache.get_or_set_many(["x", "b"], lambda keys: {key: f"inner {key}" for key in keys})
        return {key: [inner["x"], inner["b"]] for key in keys}

    began = time.monotonic()
    assert cache.get_or_set_many(["a", "b"], outer)["a"] == ["inner x", "inner b"]
    assert time.monotonic() - began < 10


# Faults


def test_a_server_that_forgot_the_scripts_is_told_them(cache, client, many):
    many(["warm"], upper)
    client.script_flush()
    assert many(["a", "b", "c"], lambda keys: client.script_flush() and upper(keys)) == {"a": "A", "b": "B", "c": "C"}
    assert many(["a", "b", "c"], never) == {"a": "A", "b": "B", "c": "C"}
    assert not held(client)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("lost", ["of the right to compute", "of what was stored"])
def test_lost_replies_are_asked_for_again(proxy, client, asynchronous, lost):
    cache = cache_at(proxy.url)
    calls = []

    def compute(keys):
        calls.append(keys)
        if lost == "of what was stored":
            proxy.drop_next_reply(containing=b"EVALSHA")
        return upper(keys)

    async def get():
        await cache.aget_or_set_many(["warm"], upper)
        if lost == "of the right to compute":
            proxy.drop_next_reply(containing=b"EVALSHA")
        if asynchronous:
            return await cache.aget_or_set_many(["a", "b"], compute)
        return cache.get_or_set_many(["a", "b"], compute)

    cache.get_or_set_many(["warm"], upper)
    values = asyncio.run(get())
    assert proxy.dropped == 1
    assert values == {"a": "A", "b": "B"}
    assert calls == [["a", "b"]]
    assert cache.get_many(["a", "b"]) == values
    assert not held(client)


@pytest.mark.slow
def test_cancelled_while_it_asks_for_the_right_to_compute_it_leaves_nothing(proxy, client):
    cache = cache_at(proxy.url)

    async def compute(keys):
        await asyncio.Event().wait()

    async def main():
        await cache.aget_or_set_many(["warm"], upper)
        proxy.delay_replies(0.5)
        task = asyncio.ensure_future(cache.aget_or_set_many(["a", "b", "c"], compute))
        while len(list(held_locks(client))) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: not held(client))
    assert not single_flight._flights


def test_without_redis(own_server):
    forgiving = cache_at(own_server.url, OPTIONS={"IGNORE_EXCEPTIONS": True})
    strict = cache_at(own_server.url)
    own_server.kill()
    assert forgiving.get_or_set_many(["a", "b"], upper) == {"a": "A", "b": "B"}
    assert asyncio.run(forgiving.aget_or_set_many(["a", "b"], upper)) == {"a": "A", "b": "B"}
    with pytest.raises(redis.ConnectionError):
        strict.get_or_set_many(["a", "b"], never)


@pytest.mark.interrupts
def test_a_time_limit_while_it_begins_leaves_no_flight_that_nobody_leads(redis_url):
    cache = cache_at(redis_url)

    def get(point):
        cache.get_or_set_many([f"a{point}", f"b{point}"], upper, 60)

    points = 0
    for points in interrupted_at_each_point(get, many_module, within="register"):
        assert not single_flight._flights, points
    assert points > 30


@pytest.mark.interrupts
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_a_time_limit_while_it_ends_leaves_no_flight_that_nobody_leads(redis_url, many):
    cache = cache_at(redis_url)

    def get(point):
        if many:
            cache.get_or_set_many([f"a{point}", f"b{point}"], upper, 60)
        else:
            cache.get_or_set(f"a{point}", lambda: "A", 60)

    points = 0
    for points in interrupted_at_each_point(get, single_flight, within="close"):
        assert not single_flight._flights, points
    assert points > 10


@pytest.mark.parametrize("lock", [True, False])
def test_a_default_may_change_its_list_of_keys(many, cache, lock):
    """The values were stored under the keys of others."""
    for change in (list.sort, list.reverse, list.clear):

        def default(keys, change=change):
            values = upper(keys)
            change(keys)
            return values

        cache.clear()
        assert many(["b", "c", "a"], default, 60, lock=lock) == {"b": "B", "c": "C", "a": "A"}
        assert cache.get("b") == "B"


def test_without_locks_what_should_not_be_cached_deletes_nothing(many, cache):
    def default(keys):
        cache.set("k", "set meanwhile", 60)
        return {"k": "refused"}

    assert many(["k"], default, 60, lock=False, should_cache=lambda value: False) == {"k": "refused"}
    assert cache.get("k") == "set meanwhile"


def test_a_server_that_does_not_know_the_scripts_is_sent_each_text_once(many, client):
    """It was sent with each of the keys: 26 MB for a thousand."""

    def bytes_for(name):
        before = [server.info("stats")["total_net_input_bytes"] for server in servers_of(client)]
        many([f"{name}{number}" for number in range(300)], dict.fromkeys, 60)
        after = [server.info("stats")["total_net_input_bytes"] for server in servers_of(client)]
        return sum(after) - sum(before)

    bytes_for("first")
    known = bytes_for("known")
    for server in servers_of(client):
        server.script_flush()
    assert bytes_for("unknown") < 2 * known + 200_000
