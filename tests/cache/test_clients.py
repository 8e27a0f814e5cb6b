"""The client classes, serializers, compressors and replicas of the base backends."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis
from django.test import override_settings
from django_redis.pool import ConnectionFactory

from django_redislock.core import held_locks
from tests.support import RedisServer, monitoring, wait_until
from tests.support.cache_programs import (
    Work,
    base_at,
    cache_at,
    commands,
    followers,
    held,
    lease_elsewhere,
    never,
    upper,
)
from tests.support.pages import counted_page, get

HERD = {"CLIENT_CLASS": "django_redis.client.HerdClient"}
SHARD = {"CLIENT_CLASS": "django_redis.client.ShardClient"}


@pytest.mark.parametrize(
    "options",
    [
        {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"},
        {"COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor"},
        {"COMPRESSOR": "django_redis.compressors.lzma.LzmaCompressor"},
        {"COMPRESSOR": "django_redis.compressors.gzip.GzipCompressor"},
        {"COMPRESSOR": "django_redis.compressors.lz4.Lz4Compressor"},
        {"COMPRESSOR": "django_redis.compressors.zstd.ZStdCompressor"},
        {"SERIALIZER": "django_redis.serializers.msgpack.MSGPackSerializer"},
        {"PICKLE_VERSION": 2},
        HERD,
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_stored_bytes_and_lives_are_those_of_the_base_class(redis_url, client, options):
    cache, base = cache_at(redis_url, OPTIONS=options), base_at(redis_url, OPTIONS=options)
    for key, value in {"none": None, "int": 5, "bool": True, "long": "x" * 500, "dict": {"a": [1, 2]}}.items():
        base.set("base", value, 60)
        assert cache.get_or_set(key, lambda value=value: value, 60) == value
        assert cache.get_or_set(key, never, 60) == value
        assert asyncio.run(cache.aget_or_set(key, never, 60)) == value
        assert cache.get_or_set_many([key], never) == {key: value}
        assert base.get(key) == value
        assert abs(client.pttl(f":1:{key}") - client.pttl(":1:base")) < 10_000
        if options is not HERD and "Gzip" not in str(options):  # which store the time, too
            assert client.get(f":1:{key}") == client.get(":1:base")


def test_what_is_returned_went_through_the_serializer(redis_url):
    cache = cache_at(redis_url, OPTIONS={"SERIALIZER": "django_redis.serializers.json.JSONSerializer"})
    assert cache.get_or_set("k", lambda: (1, 2)) == [1, 2]


class OwnSerializer:
    """Not bytes: redis-py would encode it."""

    def dumps(self, value):
        return f"own:{value}"

    def loads(self, data):
        return data.decode().removeprefix("own:")


def test_djangos_own_backend_with_a_serializer_of_ones_own(redis_url, client):
    cache = cache_at(redis_url, "DjangoRedisCache", OPTIONS={"serializer": OwnSerializer})
    assert cache.get_or_set("k", lambda: "ü") == "ü"
    assert client.get(":1:k") == "own:ü".encode()


class OfText:
    """Takes and gives text, as JSON's functions do; bytes are an error."""

    def dumps(self, value):
        return json.dumps(value, ensure_ascii=False) + "."

    def loads(self, data):
        return json.loads(data.removesuffix("."))


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_djangos_own_backend_decodes_replies_for_a_serializer_of_text(redis_url, client, encoding):
    options = {"serializer": OfText, "decode_responses": True, "encoding": encoding}
    cache, base = (at(redis_url, "DjangoRedisCache", OPTIONS=options) for at in (cache_at, base_at))
    assert base.get_or_set("base", lambda: "ü") == "ü"
    assert cache.get_or_set("k", lambda: "ü") == "ü"
    assert client.get(":1:k") == client.get(":1:base") == '"ü".'.encode(encoding)
    assert asyncio.run(cache.aget_or_set("k", never)) == "ü"
    assert cache.get_or_set_many(["k", "l"], lambda keys: dict.fromkeys(keys, "ä")) == {"k": "ü", "l": "ä"}
    cache.clear()
    assert cache.get("l") is None


# Herd: a value outlives its timeout for a while, in which some callers are sent to compute it anew


def set_stale(cache, key, value):
    """Store the value as if its timeout had passed long ago, so that every caller is sent to compute it."""
    client = cache.client
    packed = client._marker, value, int(time.time()) - 100
    client.get_client(write=True).set(client.make_key(key), client.encode(packed), px=60_000)


@pytest.fixture
def herd(redis_url):
    with override_settings(CACHE_HERD_TIMEOUT=5):
        yield cache_at(redis_url, OPTIONS=HERD)


def test_a_value_that_is_too_old_is_computed_once_and_replaced(herd, client):
    set_stale(herd, "k", "old")
    assert herd.get("k") is None
    work = Work("new")
    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(herd.get_or_set, "k", work, 60) for _ in range(10)]
        wait_until(lambda: followers() == 9)
        work.end.set()
        assert [future.result(20) for future in futures] == ["new"] * 10
    assert herd.get_or_set("k", never, 60) == "new"
    assert work.calls == 1
    assert not held(client)


@pytest.mark.parametrize(
    ("happen", "after"),
    [(lambda cache: cache.set("k", "newer", 60), "newer"), (lambda cache: cache.delete("k"), None)],
    ids=["set", "delete"],
)
def test_what_happens_while_a_value_that_is_too_old_is_replaced_stays(herd, happen, after):
    set_stale(herd, "k", "old")

    def compute():
        happen(herd)
        return "computed"

    assert herd.get_or_set("k", compute, 60) == "computed"
    assert herd.get("k") == after


def test_tasks_replace_a_value_that_is_too_old(herd):
    set_stale(herd, "k", "old")
    assert asyncio.run(herd.aget_or_set("k", lambda: "new", 60)) == "new"
    set_stale(herd, "k", "old")
    assert herd.get_or_set_many(["k"], lambda keys: {"k": "newer"}, 60) == {"k": "newer"}
    assert herd.get("k") == "newer"


# Sharded: each key has its server


@pytest.mark.filterwarnings("ignore:(get|delete|delete_many) on sharded client")  # django-redis does so by itself
def test_sharded(server):
    urls = [server.url_of_db(8), server.url_of_db(9)]
    cache = cache_at(urls, OPTIONS=SHARD)
    keys = [f"k{number}" for number in range(20)]
    for key in keys:

        def compute(key=key):
            holding = [client for client in cache._all_clients() if list(held_locks(client))]
            assert holding == [cache.client.get_server(cache.client.make_key(key))]
            return key

        assert cache.get_or_set(key, compute, 60) == key
        assert cache.get_or_set(key, never, 60) == key
    assert sum(client.exists(f":1:{key}") for client in cache._all_clients() for key in keys) == 20
    assert all(client.dbsize() for client in cache._all_clients()), "both are used"
    assert cache.get_or_set("stale", lambda: [cache.delete("stale"), cache.delete_many(keys)] and "v") == "v"
    assert cache.get("stale") is None
    many = [f"m{number}" for number in range(20)]
    for ask in (cache.get_or_set_many, lambda *args: asyncio.run(cache.aget_or_set_many(*args))):
        assert ask(many, upper) == upper(many)
        assert ask(many, never) == upper(many)
        cache.delete_many(many)
    for key in keys[:5]:
        assert asyncio.run(cache.aget_or_set(f"a{key}", lambda key=key: key)) == key
        assert cache.get_or_set(f"p{key}", lambda: cache.delete_pattern("p*") or "v") == "v"
    locks = [cache.lock(key) for key in keys]
    for lock in locks:
        assert lock.acquire()
    assert cache.reset_all() == 20
    cache.clear()


@pytest.mark.slow
def test_with_the_herd_client_an_old_value_is_old_at_once_and_returned_until_it_ends(redis_url, client):
    """It counted as new for CACHE_HERD_TIMEOUT more, and was missing at random in this time, and then always."""
    cache = cache_at(redis_url, OPTIONS=HERD)
    options = {"stale": 300, "jitter": 0, "wait": 0, "on_wait_timeout": "raise"}
    cache.get_or_set("k", lambda: "old", 60, **options)
    assert 350_000 < client.pttl(":1:k") <= 360_000
    client.pexpire(":1:k", 299_000)
    with lease_elsewhere(client, "k"):
        assert cache.get_or_set("k", never, 60, **options) == "old"
    wait_until(lambda: cache.get_or_set("k", lambda: "new", 60, **options) == "new")  # after a pause
    assert cache.get("k") == "new"


# Replicas: values are read there, all else happens on the primary


@pytest.mark.one_server("replicas of a Cluster are not in its LOCATION")
@pytest.mark.processes
def test_values_are_read_from_the_replica_and_computed_on_the_primary(backend):
    with RedisServer() as primary, RedisServer(replicaof=f"127.0.0.1 {primary.port}") as replica:
        cache = cache_at([primary.url, replica.url], backend)
        with replica.client() as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", timeout=30)

            async def find():
                with monitoring(client) as sent:
                    assert await cache.aget_or_set("k", never, 60) == "v"
                assert commands(sent) == ["GET"]
                assert await cache.aget_or_set("k", never, 60, stale=5) == "v"

            assert asyncio.run(cache.aget_or_set("k", lambda: "v", 60)) == "v"
            wait_until(lambda: cache.get("k") == "v")
            with monitoring(client) as sent:
                assert cache.get_or_set("k", never, 60) == "v"
            assert commands(sent) == ["GET"]
            asyncio.run(find())


@pytest.mark.one_server("nodes of a Cluster find each other over TCP only")
@pytest.mark.processes
def test_through_a_unix_socket(own_server, backend):
    cache = cache_at(own_server.unix_url, backend)
    assert cache.get_or_set("k", lambda: "v", 60) == "v"
    assert asyncio.run(cache.aget_or_set("l", lambda: "w", 60)) == "w"
    assert asyncio.run(cache.aget_or_set("k", never, 60)) == "v"
    assert cache.get_or_set_many(["k", "m"], lambda keys: dict.fromkeys(keys, 1)) == {"k": "v", "m": 1}


@pytest.fixture
def lagging(server, backend):
    """The locations of a primary and of a replica that does not follow it: two databases of one server."""
    return [server.url_of_db(8), server.url_of_db(9)]


@pytest.mark.one_server("replicas of a Cluster are not in its LOCATION")
def test_with_a_replica_that_lags_a_value_is_computed_once(lagging, backend):
    cache = cache_at(lagging, backend)
    for ask in (cache.get_or_set, partial(cache.locked_get_or_set, lock_key="its lock")):
        assert ask("k", lambda: "v", timeout=60) == "v"
        assert cache.get("k") is None
        assert ask("k", never, timeout=60) == "v", "as the primary has it"
        cache.delete("k")


@pytest.mark.one_server("replicas of a Cluster are not in its LOCATION")
@pytest.mark.parametrize("by_tasks", [False, True], ids=["by threads", "by tasks, then by threads"])
def test_with_a_replica_that_lags_a_value_whose_bytes_stay_the_same_is_refreshed_once(lagging, backend, by_tasks):
    """The lease was granted by the bytes alone: each of 112 callers computed the value again."""
    cache, primary, replica = (cache_at(location, backend) for location in (lagging, *lagging))
    for each in (primary, replica):
        each.set("k", "the same", 25)
    computed = []

    def compute():
        computed.append(1)
        return "the same"

    async def main():
        for _ in range(20):
            assert await cache.aget_or_set("k", compute, 60, stale=30) == "the same"

    if by_tasks:
        asyncio.run(main())
    for _ in range(20):
        assert cache.get_or_set("k", compute, 60, stale=30) == "the same"
    assert len(computed) == 1
    with redis.Redis.from_url(lagging[0]) as client:
        assert client.ttl(":1:k") > 60


@pytest.mark.one_server("replicas of a Cluster are not in its LOCATION")
def test_with_a_replica_that_lags_a_page_is_rendered_once(lagging, backend):
    """The value that the request found on the primary says only that there is a page."""
    location = {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": lagging}
    view, rendered = counted_page()
    with override_settings(CACHES={"default": location}):
        for _ in range(3):
            assert view(get()).content == b"page"
    assert len(rendered) == 1


# Sentinel: who is the primary is asked of it


@pytest.mark.processes
def test_with_sentinel_a_value_is_computed_once(sentinel, monkeypatch):
    # django-redis keeps its pools by URL, whatever their Sentinels are: another test has the same URL.
    monkeypatch.setattr(ConnectionFactory, "_pools", {})
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("127.0.0.1", sentinel)],
    }
    caches = [cache_at("redis://main/0", OPTIONS=options) for _ in range(5)]
    everybody, calls = threading.Barrier(5), []

    def ask(cache):
        everybody.wait(10)
        return cache.get_or_set("k", lambda: calls.append(1) or "v", 60)

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(ask, caches)) == ["v"] * 5
    assert calls == [1]
    assert asyncio.run(caches[0].aget_or_set("b", lambda: "w", 60)) == "w"
    assert caches[1].get("b") == "w"
    with caches[0].lock("a") as lock:
        assert not caches[1].lock("a").acquire(timeout=0.1)
        assert lock.owned()
    assert caches[0].delete("k")
