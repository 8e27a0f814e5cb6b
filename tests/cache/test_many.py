"""get_or_set_many: each missing key is computed once over all callers, whatever other keys they want."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from django.test import override_settings

from django_redislock.cache.lease import single_flight
from django_redislock.core import Lock, held_locks
from django_redislock.core.driver.async_server import AsyncServer
from django_redislock.core.driver.effects import ScriptBatch, ScriptCall
from django_redislock.core.driver.server import Server
from django_redislock.exceptions import AcquireTimeout
from tests.support import cache_programs, monitoring, queued, wait_until
from tests.support.cache_programs import cache_at, commands


@pytest.fixture(params=["sync", "async"])
def many(request, cache):
    """``many(keys, default, …)`` calls the method or its asynchronous twin."""
    if request.param == "sync":
        return cache.get_or_set_many
    return lambda *args, **kwargs: asyncio.run(cache.aget_or_set_many(*args, **kwargs))


@pytest.fixture
def cache(redis_url, backend):
    return cache_at(redis_url, backend)


def upper(keys):
    return {key: key.upper() for key in keys}


def never(keys):
    raise AssertionError(f"asked for {keys}")


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
    assert not list(held_locks(client))
    assert not single_flight._flights


def test_hits_are_one_mget(cache, client, many):
    cache.set_many({"a": None, "b": 2})
    many(["warm"], upper)
    with monitoring(client) as sent:
        assert many(["a", "b"], never) == {"a": None, "b": 2}
    assert commands(sent) == ["MGET"]


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


@pytest.mark.parametrize("count", [1, 100])
def test_however_many_are_missing_they_take_three_round_trips(many, cache, client, monkeypatch, count):
    """One to read them, one to ask for the right to compute them, one to store them."""
    keys = [f"k{number}" for number in range(count)]
    many(["warm"], upper)
    asked = []

    def note(driver):
        do = driver._do

        def noting(self, effect, *args):
            asked.append(type(effect).__name__)
            return do(self, effect, *args)

        monkeypatch.setattr(driver, "_do", noting)

    note(Server)
    note(AsyncServer)
    with monitoring(client) as sent:
        assert many(keys, lambda missing: client.echo("computing") and upper(missing)) == upper(keys)
    assert [effect.replace("ScriptBatch", "ScriptCall") for effect in asked if effect != "Pipeline"] == [
        "ScriptCall",
        "Invoke",
        "ScriptCall",
    ]
    assert commands(sent) == ["MGET", *["EVALSHA"] * count, "ECHO", *["EVALSHA"] * count]


def test_a_server_that_forgot_the_scripts_is_told_them(cache, client, many):
    many(["warm"], upper)
    client.script_flush()
    assert many(["a", "b", "c"], lambda keys: client.script_flush() and upper(keys)) == {"a": "A", "b": "B", "c": "C"}
    assert many(["a", "b", "c"], never) == {"a": "A", "b": "B", "c": "C"}
    assert not list(held_locks(client))


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

    async def main():
        await cache.aget_or_set_many(["warm"], upper)
        begin()
        return await cache.aget_or_set_many(["a", "b"], compute)

    def begin():
        if lost == "of the right to compute":
            proxy.drop_next_reply(containing=b"EVALSHA")

    if asynchronous:
        values = asyncio.run(main())
    else:
        cache.get_or_set_many(["warm"], upper)
        begin()
        values = cache.get_or_set_many(["a", "b"], compute)
    assert proxy.dropped == 1
    assert values == {"a": "A", "b": "B"}
    assert calls == [["a", "b"]]
    assert cache.get_many(["a", "b"]) == values
    assert not list(held_locks(client))


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
    wait_until(lambda: not list(held_locks(client)))
    assert not single_flight._flights


def test_no_keys(many):
    assert many([], never) == {}


def test_keys_without_a_value_are_left_out_and_free(cache, client, many):
    assert many(["a", "b"], lambda keys: {"a": 1}) == {"a": 1}
    assert cache.get("b") is None
    assert not list(held_locks(client))
    assert cache.get_or_set("b", lambda: 2) == 2


def test_values_that_nobody_asked_for_are_not_stored(cache, many):
    assert many(["a"], lambda keys: {"a": 1, "z": 26}) == {"a": 1}
    assert cache.get("z") is None


def test_the_defaults_error_comes_out_and_every_key_is_free(cache, client, many):
    def fail(keys):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        many(["a", "b"], fail)
    with pytest.raises(TypeError, match="must return a dict"):
        many(["a", "b"], list)
    assert not list(held_locks(client))
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


def test_async_defaults(cache):
    async def compute(keys):
        await asyncio.sleep(0)
        return upper(keys)

    assert asyncio.run(cache.aget_or_set_many(["a", "b"], compute)) == {"a": "A", "b": "B"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_overlapping_callers_in_opposite_orders_compute_each_key_once(redis_url, cache, asynchronous):
    computed, lock = [], threading.Lock()
    start = threading.Barrier(8)

    def compute(keys):
        with lock:
            computed.extend(keys)
        return upper(keys)

    def one(number):
        keys = [f"k{i}" for i in range(number, number + 5)]
        start.wait(10)
        keys = keys[:: 1 if number % 2 else -1]
        if asynchronous:
            return asyncio.run(cache.aget_or_set_many(keys, compute, 60))
        return cache.get_or_set_many(keys, compute, 60)

    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        for number, values in enumerate(pool.map(one, range(8))):
            assert values == {f"k{i}": f"K{i}" for i in range(number, number + 5)}
    assert time.monotonic() - began < 10, "far below the 30 s that a caller waits at most"
    assert sorted(computed) == sorted({f"k{i}" for i in range(12)})


def test_a_single_key_shares_with_many(cache):
    running, end = threading.Event(), threading.Event()

    def compute(keys):
        running.set()
        assert end.wait(20)
        return upper(keys)

    with ThreadPoolExecutor(2) as pool:
        several = pool.submit(cache.get_or_set_many, ["a", "b"], compute, 60)
        assert running.wait(10)
        one = pool.submit(cache.get_or_set, "b", lambda: 1 / 0, 60)
        wait_until(lambda: cache_programs.followers() == 1)
        end.set()
        assert several.result(20) == {"a": "A", "b": "B"}
        assert one.result(20) == "B"


def test_what_another_process_computes_is_waited_for_after_the_rest_is_computed(cache, client, many):
    """Another process's lease is a lock of that name."""
    calls = []

    def compute(keys):
        calls.append(keys)
        return upper(keys)

    with Lock(client, "cache::1:b"):
        with pytest.raises(AcquireTimeout, match="cache::1:b"):
            many(["a", "b", "c"], compute, wait=0.1, on_wait_timeout="raise")
        assert calls == [["a", "c"]]
        assert many(["b", "d"], compute, wait=0.1, on_wait_timeout={"mine": 1}) == {"b": {"mine": 1}, "d": "D"}
    assert many(["a", "b", "c"], compute) == {"a": "A", "b": "B", "c": "C"}
    assert calls == [["a", "c"], ["d"], ["b"]]


@pytest.fixture
def elsewhere(redis_url):
    """The cache as another process has it: what is computed there is waited for through Redis."""
    return cache_at(redis_url, "DjangoRedisCache", OPTIONS={"client_name": "elsewhere"})


@pytest.mark.parametrize("count", [10, 100])
def test_however_many_another_process_computes_they_are_asked_for_twice_and_waited_for_at_once(
    cache, elsewhere, many, client, monkeypatch, count
):
    keys = [f"k{number}" for number in range(count)]
    work, asked, seen = Held(), [], threading.local()
    many(["warm"], upper)

    def note(driver):
        do = driver._do

        def noting(self, effect, *args):
            if hasattr(seen, "waits"):
                asked.append(effect)
            return do(self, effect, *args)

        monkeypatch.setattr(driver, "_do", noting)

    note(Server)
    note(AsyncServer)

    def wait():
        seen.waits = True
        return many(keys, never)

    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(elsewhere.get_or_set_many, keys, work.then(upper), 60)
        assert work.running.wait(10)
        waiter = pool.submit(wait)
        wait_until(lambda: all(queued(client, f"cache::1:{key}") == 1 for key in keys))
        work.end.set()
        assert waiter.result(20) == leader.result(20) == upper(keys)
    asks = [len(effect.calls) for effect in asked if isinstance(effect, ScriptBatch)]
    assert not any(isinstance(effect, ScriptCall) for effect in asked)
    assert len([number for number in asks if number > 1]) == 2, "whether it is to compute, and to be told"
    assert sum(number for number in asks if number > 1) <= 2 * count, "but for one look twice a second"
    assert not any(queued(client, f"cache::1:{key}") for key in keys)
    assert not single_flight._flights


def test_a_key_that_becomes_free_is_computed_while_another_one_is_waited_for(cache, client, many):
    calls = []
    with ThreadPoolExecutor(1) as pool, Lock(client, "cache::1:a"):
        with Lock(client, "cache::1:b"):
            waiter = pool.submit(many, ["a", "b"], lambda keys: calls.append(keys) or upper(keys))
            wait_until(lambda: queued(client, "cache::1:a") == queued(client, "cache::1:b") == 1)
        wait_until(lambda: cache.get("b") == "B")
        assert calls == [["b"]]
    assert waiter.result(20) == {"a": "A", "b": "B"}
    assert calls == [["b"], ["a"]]


def test_who_waits_for_one_key_is_told_of_its_failure_and_waits_for_no_other_one(elsewhere, client, many):
    work = Held()

    def fail(keys):
        raise ValueError("mine")

    with ThreadPoolExecutor(2) as pool, Lock(client, "cache::1:a"):
        leader = pool.submit(elsewhere.get_or_set_many, ["b"], work.then(fail))
        assert work.running.wait(10)
        waiter = pool.submit(many, ["a", "b"], never)
        wait_until(lambda: queued(client, "cache::1:a") == queued(client, "cache::1:b") == 1)
        work.end.set()
        with pytest.raises(ValueError, match="mine"):
            waiter.result(20)
        with pytest.raises(ValueError, match="mine"):
            leader.result(20)
        assert queued(client, "cache::1:a") == 0
    assert not single_flight._flights


def test_who_follows_in_the_same_process_has_a_value_while_another_one_is_waited_for(cache, client, many):
    work = Held()
    with ThreadPoolExecutor(2) as pool, Lock(client, "cache::1:b"):
        both = pool.submit(cache.get_or_set_many, ["a", "b"], work.then(upper))
        assert work.running.wait(10)
        one = pool.submit(many, ["a"], never)
        wait_until(lambda: cache_programs.followers() == 1)
        work.end.set()
        assert one.result(20) == {"a": "A"}
        assert not both.done()
    assert both.result(20) == {"a": "A", "b": "B"}


def test_cancelled_while_it_waits_for_many_it_leaves_no_place_in_a_queue(cache, client):
    keys = ["a", "b", "c"]

    async def main():
        task = asyncio.ensure_future(cache.aget_or_set_many(keys, never))
        while not all(queued(client, f"cache::1:{key}") for key in keys):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Lock(client, "cache::1:a"), Lock(client, "cache::1:b"), Lock(client, "cache::1:c"):
        asyncio.run(main())
        wait_until(lambda: not any(queued(client, f"cache::1:{key}") for key in keys))
    assert not single_flight._flights


class Held:
    """Lets a computation run until the test ends it."""

    def __init__(self):
        self.running, self.end = threading.Event(), threading.Event()

    def then(self, default):
        """Return the default, which begins when the test says so."""

        def compute(keys):
            self.running.set()
            assert self.end.wait(20)
            return default(keys)

        return compute


def test_nested(cache):
    def outer(keys):
        inner = cache.get_or_set_many(["x", "b"], lambda keys: {key: f"inner {key}" for key in keys})
        return {key: [inner["x"], inner["b"]] for key in keys}

    began = time.monotonic()
    assert cache.get_or_set_many(["a", "b"], outer)["a"] == ["inner x", "inner b"]
    assert time.monotonic() - began < 10


def test_without_redis(own_server):
    forgiving = cache_at(own_server.url, OPTIONS={"IGNORE_EXCEPTIONS": True})
    strict = cache_at(own_server.url)
    own_server.kill()
    assert forgiving.get_or_set_many(["a", "b"], upper) == {"a": "A", "b": "B"}
    assert asyncio.run(forgiving.aget_or_set_many(["a", "b"], upper)) == {"a": "A", "b": "B"}
    with pytest.raises(redis.ConnectionError):
        strict.get_or_set_many(["a", "b"], never)


@pytest.mark.filterwarnings("ignore:(get|delete|delete_many) on sharded client")  # django-redis does so by itself
def test_sharded(server, many):
    urls = [server.url_of_db(8), server.url_of_db(9)]
    cache = cache_at(urls, OPTIONS={"CLIENT_CLASS": "django_redis.client.ShardClient"})
    keys = [f"k{number}" for number in range(20)]
    assert cache.get_or_set_many(keys, upper) == upper(keys)
    assert cache.get_or_set_many(keys, never) == upper(keys)
    assert all(client.dbsize() for client in cache._all_clients())
    cache.clear()


def test_many_that_were_waited_for_in_vain_are_computed_in_one_call(cache, client, many):
    calls = []
    for key in "abc":  # whose leases end when the values are stored
        Lock(client, f"cache::1:{key}", auto_renewal=False).acquire()
    assert many(["a", "b", "c"], lambda keys: calls.append(keys) or upper(keys), wait=0.1) == upper("abc")
    assert calls == [["a", "b", "c"]]
    assert not single_flight._flights
