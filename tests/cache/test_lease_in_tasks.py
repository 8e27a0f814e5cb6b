"""The operations of a value's lease run in tasks as well as in threads."""

from __future__ import annotations

import asyncio
import math
import pickle

from django_redislock.cache.lease.obtain import ValueRequest, get_or_compute
from django_redislock.core.driver.async_server import async_server_of
from django_redislock.core.driver.registry import server_of


def test_values_can_be_computed_by_tasks(aclient, client):
    """The steps of the cache ask for one more thing to be done."""
    server, calls = server_of(aclient), []

    async def compute():
        calls.append(1)
        await asyncio.sleep(0.05)
        return "v"

    def want():
        return ValueRequest(
            *(server, "redislock", "k", compute),
            dumps=lambda key, value: (pickle.dumps(value), 60000),
            loads=lambda key, data: pickle.loads(data),
            expire=10,
            auto_renewal=False,
            max_hold=None,
            ignore_errors=False,
        )

    async def get():
        here = async_server_of(server)
        return (await here.run(get_or_compute(want(), asyncio.current_task(), math.inf, here.room.open))).value

    async def main():
        assert await asyncio.gather(*[get() for _ in range(5)]) == ["v"] * 5

    asyncio.run(main())
    assert calls == [1]
