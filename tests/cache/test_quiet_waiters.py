"""Processes that wait for a value also look for it: in case a message is lost, and rarely where they are many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import counting, lived, wait_until
from tests.support.cache_programs import cache_at, lease_elsewhere, never, waiters

MANY = 64


@pytest.mark.slow
def test_many_processes_that_wait_for_a_value_share_their_looks(redis_url, client):
    caches = [
        cache_at(f"{redis_url}?socket_timeout={5 + number / 100}") for number in range(MANY)
    ]  # as if in processes
    with ThreadPoolExecutor(MANY) as pool, lease_elsewhere(client, "k"):
        answers = [pool.submit(cache.get_or_set, "k", never, 60, wait=20, on_wait_timeout=None) for cache in caches]
        wait_until(lambda: waiters(client) == MANY, timeout=30)
        lived(2.5)  # the first looks of those that came early are for a shorter queue
        with counting(client) as counts:
            lived(3)
        assert counts["evalsha"] <= 3 * 32 * 1.5, "and not 128 a second"
        client.set(":1:k", 7)  # nobody is told of it
        assert [answer.result(30) for answer in answers] == [7] * MANY, "each looks every 4 s at least"
