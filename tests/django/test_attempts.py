"""``lock(...).attempt()``: a block that is told that the lock was not free in time."""

from __future__ import annotations

import asyncio

import pytest

from django_redislock import (
    AcquireTimeout,
    LockLost,
    alock,
    alock_all,
    asemaphore,
    held_locks,
    lock,
    lock_all,
    reset_all,
    rlock,
    semaphore,
)

THREADS = {
    "lock": lambda name: lock(name, blocking=False),
    "semaphore": lambda name: semaphore(name, 1, blocking=False),
    "lock_all": lambda name: lock_all([f"{name}0", name], blocking=False),
}
TASKS = {
    "alock": lambda name: alock(name, blocking=False),
    "asemaphore": lambda name: asemaphore(name, 1, blocking=False),
    "alock_all": lambda name: alock_all([f"{name}0", name], blocking=False),
}


def names():
    return {info.name for info in held_locks()}


@pytest.mark.parametrize("make", THREADS.values(), ids=THREADS)
def test_the_block_has_the_lock_or_none_and_releases_what_it_has(client, make):
    made = make("a")
    for _ in range(2):
        with made.attempt() as held:
            assert held is made
            assert "a" in names()
            before = names()
            with make("a").attempt() as other:
                assert other is None
            assert names() == before, "who was refused releases nothing"
        assert names() == set()


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_a_block_of_a_task_has_the_lock_or_none(client, make):
    async def hold():
        made = make("a")
        for _ in range(2):
            async with made.attempt() as held:
                assert held is made
                assert "a" in names()
                async with make("a").attempt() as other:
                    assert other is None
            assert names() == set()

    asyncio.run(hold())


def test_what_the_body_raises_passes_also_an_acquire_timeout(client):
    for error in (AcquireTimeout("b", 0.0), KeyError("b")):
        with pytest.raises(type(error)), lock("a").attempt():
            raise error
    assert names() == set()


def test_a_loss_is_raised_at_the_end_of_the_block(client):
    with pytest.raises(LockLost), lock("a").attempt():
        reset_all()


def test_a_reentrant_lock_is_left_once_for_each_block(client):
    with rlock("a").attempt() as outer, rlock("a").attempt() as inner:
        assert None not in (outer, inner)
        with rlock("a") as innermost:
            innermost.raise_if_lost()
        assert names() == {"a"}
    assert names() == set()
