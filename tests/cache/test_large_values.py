"""Large values in tasks: a thread decodes them, and the loop goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.support import until
from tests.support.cache_programs import lease_elsewhere, waiters

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


@SIZES
def test_tasks_that_waited_for_a_large_value_have_a_thread_decode_their_copies(cache, client, size, in_the_loop):
    async def main():
        other = lease_elsewhere(client, "k")
        other.acquire()
        tasks = [asyncio.create_task(cache.aget_or_set("k", lambda: 1 / 0, 60)) for _ in range(3)]
        await until(lambda: waiters(client, "k"))
        cache.set("k", Noting(size), 60)
        other.release()
        return await asyncio.gather(*tasks)

    values = asyncio.run(main())
    assert len({id(value) for value in values}) == 3
    assert decoders == [in_the_loop] * len(decoders)
    assert len(decoders) >= 3


LARGER_THAN_A_SCRIPT_COPIES = 600_000


def test_a_value_that_was_set_while_others_wait_and_that_no_script_copies_is_fetched_as_a_whole(cache, client):
    """No message with its length and its digest arrives, because no computation stored it."""

    async def main():
        other = lease_elsewhere(client, "k")
        other.acquire()
        tasks = [asyncio.create_task(cache.aget_or_set("k", lambda: 1 / 0, 60)) for _ in range(2)]
        await until(lambda: waiters(client, "k"))
        cache.set("k", Noting(LARGER_THAN_A_SCRIPT_COPIES), 60)
        other.release()
        return await asyncio.gather(*tasks)

    assert [value.data for value in asyncio.run(main())] == [bytes(LARGER_THAN_A_SCRIPT_COPIES)] * 2
