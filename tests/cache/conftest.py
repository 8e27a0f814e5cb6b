from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import redis
from django.test import override_settings

from django_redislock.core.driver.async_server import AsyncServer
from django_redislock.core.driver.server import Server as Driver
from tests.support import AllNodes, Cluster, OneNode, RedisServer, Server
from tests.support.cache_programs import cache_at


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `ClusterCache` is not asked for: the tests with the mark `one_server`, which says why."""
    left_out = [
        item
        for item in items
        if item.get_closest_marker("one_server")
        and hasattr(item, "callspec")
        and item.callspec.params.get("backend") == "ClusterCache"
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(params=["RedisCache", "DjangoRedisCache", "ClusterCache"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each of our cache backends; for a `ClusterCache`, `redis_url` and `client` are a Cluster's."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def clustered(request: pytest.FixtureRequest) -> Cluster | None:
    """The Cluster of this test, if it is about a `ClusterCache`."""
    if "backend" not in request.fixturenames or request.getfixturevalue("backend") != "ClusterCache":
        return None
    return request.getfixturevalue("cluster")  # type: ignore[no-any-return]


@pytest.fixture
def server_kind(request: pytest.FixtureRequest) -> type[RedisServer]:
    """The class of a server for this test alone; for a `ClusterCache` it is a Cluster of one node."""
    is_cluster = "backend" in request.fixturenames and request.getfixturevalue("backend") == "ClusterCache"
    return OneNode if is_cluster else RedisServer


@pytest.fixture
def own_server(server_kind: type[RedisServer]) -> Iterator[RedisServer]:
    with server_kind() as server:
        yield server


@pytest.fixture
def redis_url(clustered: Cluster | None, server: Server) -> str:
    return (clustered or server).url


@pytest.fixture(scope="session")
def client_of_cluster(shared_cluster: Cluster) -> Iterator[AllNodes]:
    """A client for the tests of a `ClusterCache`: to make one takes as long as such a test."""
    with AllNodes.from_url(shared_cluster.url) as client:
        yield client


@pytest.fixture
def client(
    clustered: Cluster | None, server: Server, _empty_database: None, request: pytest.FixtureRequest
) -> Iterator[redis.Redis | AllNodes]:
    if clustered is not None:
        client = request.getfixturevalue("client_of_cluster")
        client.ping()
        yield client
        return
    with server.client() as client:
        client.ping()
        yield client


@pytest.fixture
def cache(redis_url, backend):
    return cache_at(redis_url, backend)


@pytest.fixture(params=["sync", "async"])
def get(request, cache):
    """``get("k", default, 60, …)`` calls get_or_set or its asynchronous twin."""
    if request.param == "sync":
        return cache.get_or_set

    async def in_a_loop(*args, **kwargs):
        value = await cache.aget_or_set(*args, **kwargs)
        wait_for = [task for task in asyncio.all_tasks() if task.get_name() == "redislock-refresh"]
        await asyncio.gather(*wait_for)
        return value

    return lambda *args, **kwargs: asyncio.run(in_a_loop(*args, **kwargs))


@pytest.fixture(params=["sync", "async"])
def many(request, cache):
    """``many(keys, default, …)`` calls the method or its asynchronous twin."""
    if request.param == "sync":
        return cache.get_or_set_many
    return lambda *args, **kwargs: asyncio.run(cache.aget_or_set_many(*args, **kwargs))


@pytest.fixture
def effects(monkeypatch):
    """What the operations asked the drivers to do, each with the thread that asked."""
    asked = []
    for driver in (Driver, AsyncServer):

        def noting(self, effect, *args, do=driver._do):
            asked.append((threading.get_ident(), effect))
            return do(self, effect, *args)

        monkeypatch.setattr(driver, "_do", noting)
    return asked


@pytest.fixture
def caches_in_settings(backend, redis_url):
    """The settings have two caches of each of our backends in turn: "default" and "other"."""
    default = {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}
    with override_settings(CACHES={"default": default, "other": default | {"KEY_PREFIX": "other"}}):
        yield
