"""Blocks that another thread or task leaves than the one that entered them: the block's own acquisition ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

import pytest

from django_redislock.core import AsyncLock, AsyncQuorumLock, AsyncSemaphore, Lock, QuorumLock, Semaphore, held_locks
from django_redislock.core.redis_py import AsyncRedisPyLock, RedisPyLock
from django_redislock.exceptions import LockLost, NotAcquired
from tests.support import client_at
from tests.support.tasks import Hand

FOR_ALL = "redis-py's for any thread"
NAMES = ["lock", "re-entrant", "semaphore", "redis-py's", FOR_ALL]


class Threads:
    """Threads that do one thing after another, as those of a pool, and blocks that they enter and leave."""

    def __init__(self):
        self._hands = []

    def hand(self):
        """Return a function that calls a function in a thread of its own, always the same one."""
        pool = ThreadPoolExecutor(1)
        self._hands.append(pool)
        return lambda function: pool.submit(function).result(30)

    def close(self):
        for pool in self._hands:
            pool.shutdown()

    def lock(self, client, kind):
        if kind == "semaphore":
            return Semaphore(client, "a", limit=3)
        if "redis-py's" in kind:
            return RedisPyLock(client, "a", thread_local=kind == "redis-py's")
        return Lock(client, "a", reentrant=kind == "re-entrant")

    def generator(self, lock):
        """Return the functions that enter and leave a ``with`` block, each in the thread that is given."""

        @contextmanager
        def block():
            with lock:
                yield

        block = block()
        return lambda hand: hand(block.__enter__), lambda hand: hand(lambda: block.__exit__(None, None, None))

    def stack(self, lock):
        stack = ExitStack()
        return lambda hand: hand(lambda: stack.enter_context(lock)), lambda hand: hand(stack.close)


class Tasks(Threads):
    """Tasks that do one thing after another, and blocks that they enter and leave."""

    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def hand(self):
        hand = Hand(self._loop)
        self._hands.append(hand)
        return hand.do

    def close(self):
        self._hands.clear()

    def lock(self, client, kind):
        if kind == "semaphore":
            return AsyncSemaphore(client, "a", limit=3)
        if "redis-py's" in kind:
            return AsyncRedisPyLock(client, "a", thread_local=kind == "redis-py's")
        return AsyncLock(client, "a", reentrant=kind == "re-entrant")

    def generator(self, lock):
        @asynccontextmanager
        async def block():
            async with lock:
                yield

        block = block()
        return lambda hand: hand(block.__aenter__), lambda hand: hand(lambda: block.__aexit__(None, None, None))

    def stack(self, lock):
        stack = AsyncExitStack()
        return lambda hand: hand(lambda: stack.enter_async_context(lock)), lambda hand: hand(stack.aclose)


@pytest.fixture(params=["threads", "tasks"])
def world(request):
    made = Threads() if request.param == "threads" else Tasks(request.getfixturevalue("tasks")._loop)
    yield made
    made.close()


def fences(client):
    return {info.fence for info in held_locks(client)}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("how", ["generator", "stack"])
def test_a_block_that_another_one_leaves_ends_for_who_entered_it(client, world, kind, how):
    lock = world.lock(client, kind)
    first, second = world.hand(), world.hand()
    for _ in range(2):  # the object may be used again
        enter, leave = getattr(world, how)(lock)
        enter(first)
        assert len(fences(client)) == 1
        leave(second)
        assert not fences(client)
    assert not lock._blocks


def test_who_is_inside_twice_is_left_twice(client, world):
    lock = world.lock(client, "re-entrant")
    first, second = world.hand(), world.hand()
    blocks = [world.generator(lock), world.stack(lock)]
    for enter, _ in blocks:
        enter(first)
    for _, leave in blocks:
        assert fences(client)
        leave(second)
    assert not fences(client)


@pytest.mark.parametrize("how", ["generator", "stack"])
def test_blocks_of_one_object_that_end_crosswise_end_their_own_acquisitions(client, world, how):
    """As FastAPI's dependencies: the thread that ends a block is inside another one, or was when it entered."""
    lock = world.lock(client, "semaphore")
    first, second = world.hand(), world.hand()
    enter, leave = getattr(world, how)(lock)
    enter(first)
    own = fences(client)
    enter_other, leave_other = world.generator(lock)
    enter_other(second)
    others = fences(client) - own
    leave(second)
    assert fences(client) == others
    leave_other(first)
    assert not fences(client)


def test_thirty_blocks_that_end_in_any_threads_end_all(client, world):
    hands = [world.hand() for _ in range(4)]
    blocks = []
    for number in range(30):
        enter, leave = world.generator(world.lock(client, "lock")._like(f"lock {number}"))
        enter(hands[number % 4])
        blocks.append(leave)
    for number, leave in enumerate(blocks):
        leave(hands[(number + 1) % 4])
    assert not fences(client)


def test_of_two_stacks_that_may_be_meant_none_is_left(client, world):
    lock = world.lock(client, "semaphore")
    leaves = []
    for _ in range(2):
        enter, leave = world.stack(lock)
        enter(world.hand())
        leaves.append(leave)
    held = fences(client)
    with pytest.raises(NotAcquired):
        leaves[0](world.hand())
    assert fences(client) == held


@pytest.mark.parametrize("noticed", [False, True], ids=["unnoticed", "noticed"])
@pytest.mark.parametrize("next_ends_first", [False, True], ids=["the loser ends first", "the next ends first"])
def test_after_a_loss_each_block_of_a_lock_for_any_thread_ends_its_own_acquisition(
    client, world, noticed, next_ends_first
):
    lock = world.lock(client, FOR_ALL)
    first, second = world.hand(), world.hand()
    enter, leave = world.generator(lock)
    enter_other, leave_other = world.generator(lock)
    enter(first)
    Lock(client, "a").reset()
    if noticed:
        with pytest.raises(LockLost):
            first(lock.extend)
    enter_other(second)
    held = fences(client)
    if next_ends_first:
        leave_other(second)
        held = fences(client)
        assert not held
    with pytest.raises(LockLost):
        leave(first)
    assert fences(client) == held
    if not next_ends_first:
        leave_other(second)
    assert not fences(client)


def test_any_thread_releases_the_newest_acquisition_and_each_its_own(client, world):
    lock = world.lock(client, FOR_ALL)
    first, second = world.hand(), world.hand()
    first(lock.acquire)
    Lock(client, "a").reset()
    second(lock.acquire)
    world.hand()(lock.release)
    assert not fences(client)
    with pytest.raises(LockLost):
        first(lock.release)
    with pytest.raises(NotAcquired):
        second(lock.release)


def test_a_block_that_another_thread_released_does_not_end_the_next_holders(client, world):
    lock = world.lock(client, FOR_ALL)
    first, second = world.hand(), world.hand()
    enter, leave = world.generator(lock)
    enter(first)
    second(lock.release)
    second(lock.acquire)
    held = fences(client)
    with pytest.raises(NotAcquired):
        leave(first)
    assert fences(client) == held
    second(lock.release)


@pytest.mark.processes
def test_a_quorum_lock_ends_whoever_leaves_its_block(world, own_server):
    kind = QuorumLock if type(world) is Threads else AsyncQuorumLock
    clients = [client_at(own_server.url_of_db(number)) for number in range(3)]
    first, second = world.hand(), world.hand()
    for how in (world.generator, world.stack):
        enter, leave = how(kind(clients, "a"))
        enter(first)
        assert all(map(fences, clients))
        leave(second)
        assert not any(map(fences, clients))
