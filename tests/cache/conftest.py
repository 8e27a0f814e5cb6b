from __future__ import annotations

import asyncio

import pytest
from django.test import override_settings

from tests.support.cache_programs import cache_at


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


@pytest.fixture(params=["RedisCache", "DjangoRedisCache"])
def caches_in_settings(request, redis_url):
    """The settings have two caches of each of our backends in turn: "default" and "other"."""
    default = {"BACKEND": f"django_redislock.cache.{request.param}", "LOCATION": redis_url}
    with override_settings(CACHES={"default": default, "other": default | {"KEY_PREFIX": "other"}}):
        yield
