"""lock_all and alock_all: several locks at once, in one order, with one timeout, and all or none."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest
from django.db import transaction
from django.test import override_settings

from django_redislock import (
    AcquireTimeout,
    AlreadyAcquired,
    LockLost,
    NotAcquired,
    alock,
    alock_all,
    held_locks,
    lock,
    lock_all,
)
from django_redislock.signals import lock_acquired, lock_released
from tests.support import BUSY, in_threads, renew_now, until, wait_until
from tests.support.tasks import Tasks


def held_names():
    return [info.name for info in held_locks()]


@pytest.fixture(params=["thread", "task"])
def hold_all(request):
    """``lock_all``, or ``alock_all`` that is used like it: a task of each thread enters and leaves the block for it."""
    if request.param == "thread":
        yield lock_all
        return
    with Tasks() as tasks:

        class HeldByTask:
            def __init__(self, names, **options):
                self._held = alock_all(names, **options)

            def __enter__(self):
                return tasks.do(self._held.__aenter__)

            def __exit__(self, *error):
                tasks.do(lambda: self._held.__aexit__(*error))

        yield HeldByTask


@pytest.fixture
def steps():
    """What happened to which lock, in order."""
    seen = []

    def note_acquired(name, **kwargs):
        seen.append(f"+{name}")

    def note_released(name, **kwargs):
        seen.append(f"-{name}")

    lock_acquired.connect(note_acquired)
    lock_released.connect(note_released)
    yield seen
    lock_acquired.disconnect(note_acquired)
    lock_released.disconnect(note_released)


# Order, and what the block is given


@pytest.mark.parametrize("names", [["b", "a", "c", "b"], ("c", "b", "a"), {"a", "b", "c"}, {"c": 1, "b": 2, "a": 3}])
def test_each_name_is_acquired_once_in_sorted_order_and_released_in_reverse(client, hold_all, steps, names):
    with hold_all(names) as held:
        assert list(held) == held_names() == ["a", "b", "c"]
    assert steps == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert held_names() == []


def test_the_block_gets_the_lock_of_each_name(client, hold_all):
    with hold_all(["account:2", "account:1"], label="transfer", expire=7) as held:
        for name in ("account:1", "account:2"):
            holder = lock(name).owner()
            assert (holder.fence, holder.label, holder.expire) == (held[name].fence, "transfer", 7)
        assert (len(held), "account:3" in held, held.lost) == (2, False, None)
        with pytest.raises(KeyError):
            held["account:3"]
        assert "account:1" in repr(held)
        held.raise_if_lost()


def test_callers_with_opposite_orders_do_not_wait_for_each_other(client, hold_all):
    balance = {"a": 0, "b": 0, "c": 0}

    def transfer(number):
        names = list(["abc", "cab", "bca", "cba"][number])
        for _ in range(10):
            with hold_all(names, timeout=60):
                before = dict(balance)
                time.sleep(0.001)
                balance.update({name: before[name] + 1 for name in names})

    in_threads(4, transfer)
    assert balance == {"a": 40, "b": 40, "c": 40}


def test_threads_that_share_one_object_take_turns(client):
    shared, inside, most = lock_all(["a", "b"], timeout=60), [], []

    def enter(number):
        for _ in range(5):
            with shared as held:
                inside.append(held["a"].fence)
                most.append(len(inside))
                inside.remove(held["a"].fence)

    in_threads(4, enter)
    assert most == [1] * 20


# All or none


@pytest.mark.slow
def test_the_timeout_is_for_all_names_together_and_those_acquired_are_given_back(client, hold_all):
    first, last = lock("a", timeout=0), lock("c", timeout=0)
    assert first.acquire()
    assert last.acquire()
    threading.Timer(0.5, first.reset).start()
    began = time.monotonic()
    with pytest.raises(AcquireTimeout) as caught, hold_all(["a", "b", "c"], timeout=1):
        raise AssertionError("the block ran")
    assert 1 <= time.monotonic() - began < 1.1 + BUSY
    assert (caught.value.name, caught.value.timeout) == ("c", 1)
    assert held_names() == ["c"]


def test_one_held_name_is_enough_to_raise_at_once_or_after_the_timeout_of_the_settings(client, hold_all, steps):
    assert lock("b").acquire()
    with pytest.raises(AcquireTimeout, match="'b'"), hold_all(["a", "b", "c"], blocking=False):
        raise AssertionError("the block ran")
    assert steps == ["+b", "+a", "-a"]
    with (
        override_settings(DJANGO_REDISLOCK={"TIMEOUT": 0.2}),
        pytest.raises(AcquireTimeout) as caught,
        hold_all(["a", "b"]),
    ):
        raise AssertionError("the block ran")
    assert caught.value.timeout == 0.2


def test_a_caller_that_holds_one_of_the_names_gets_an_error_unless_it_is_reentrant(client):
    with lock("b", reentrant=True) as outer:
        with pytest.raises(AlreadyAcquired, match="'b'"), lock_all(["a", "b", "c"]):
            raise AssertionError("the block ran")
        assert held_names() == ["b"]
        with lock_all(["a", "b", "c"], reentrant=True) as held:
            assert held["b"].fence == outer.fence
        assert held_names() == ["b"]


def test_a_task_that_is_cancelled_while_it_waits_for_one_name_holds_none(client):
    async def hold():
        async with alock_all(["a", "b"]):
            raise AssertionError("the block ran")

    async def main():
        async with alock("b"):
            task = asyncio.create_task(hold())
            await until(lambda: held_names() == ["a", "b"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert held_names() == ["b"]

    asyncio.run(main())


@pytest.mark.parametrize("disturbed", [lock_acquired, lock_released])
def test_an_interrupt_in_the_middle_leaves_no_lock_held(client, disturbed):
    def interrupt(name, **kwargs):
        if name == "b":
            raise KeyboardInterrupt(name)

    disturbed.connect(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), lock_all(["a", "b", "c"]):
            pass
    finally:
        disturbed.disconnect(interrupt)
    wait_until(lambda: held_names() == [])


# Losses


def test_when_one_lock_is_lost_the_caller_is_told_and_the_others_are_released(client, hold_all):
    told = []
    with (
        pytest.raises(LockLost) as caught,
        hold_all(["a", "b", "c"], expire=30, on_lost=lambda one: told.append(one.name)) as held,
    ):
        assert lock("b").reset(reason="a test")
        renew_now(held["b"])
        wait_until(lambda: held.lost)
        assert (held.lost.name, held.lost.code) == ("b", "force_released")
        with pytest.raises(LockLost):
            held.raise_if_lost()
        wait_until(lambda: told)
        held["a"].raise_if_lost()
    assert caught.value.name == "b"
    assert told == ["b"]
    assert held_names() == []


def test_the_error_of_the_block_is_not_replaced_by_a_loss(client, hold_all):
    with pytest.raises(ZeroDivisionError), hold_all(["a", "b", "c"]):
        client.flushdb()
        raise ZeroDivisionError
    assert held_names() == []


def test_outside_of_the_block_there_is_no_acquisition_to_check(client):
    held = lock_all(["a", "b"])
    with pytest.raises(NotAcquired):
        held.raise_if_lost()
    with held:
        held.raise_if_lost()
    with pytest.raises(NotAcquired):
        held.raise_if_lost()


# Transactions


@pytest.mark.usefixtures("database")
def test_until_the_commit_all_locks_are_held_unless_one_cannot_be_had(client):
    with transaction.atomic():
        with lock_all(["a", "b"], until_commit=True):
            pass
        assert held_names() == ["a", "b"]
    assert held_names() == []
    in_threads(1, lambda _: lock("b").acquire())
    with transaction.atomic():
        with pytest.raises(AcquireTimeout), lock_all(["a", "b"], until_commit=True, blocking=False):
            raise AssertionError("the block ran")
        assert held_names() == ["b"]


# Switched off, and bad input


def test_disabled_every_caller_gets_all_locks(own_server, hold_all):
    with (
        override_settings(DJANGO_REDISLOCK={"ENABLED": False, "URL": "redis://127.0.0.1:1/0"}),
        hold_all(["a", "b"], timeout=1) as held,
        hold_all(["a", "b"], timeout=1) as other,
    ):
        held.raise_if_lost()
        assert other["a"].fence >= held["a"].fence > 0


@pytest.mark.parametrize("function", [lock_all, alock_all])
def test_wrong_names_and_options_are_refused_before_anything_is_acquired(function):
    for names in ([], iter(())):
        with pytest.raises(ValueError, match="at least one name"):
            function(names)
    for names in ("account:1", None, 7):
        with pytest.raises(TypeError, match="several names"):
            function(names)
    for names, kind in ((b"ab", "int"), (["a", 1], "int"), (["a", None], "NoneType"), ([["a"]], "list")):
        with pytest.raises(TypeError, match=f"name must be a str, not {kind}"):
            function(names)
    for names in (["a", ""], ["a", "b" * 1001]):
        with pytest.raises(ValueError, match="1 to 1000 bytes"):
            function(names)
    with pytest.raises(TypeError, match="timeout="):
        function(["a"], wait=3)
    with pytest.raises(ValueError, match="expire"):
        function(["a"], expire=0)
    with pytest.raises(ValueError, match="blocking=False"):
        function(["a"], timeout=3, blocking=False)


def test_a_block_of_the_other_kind_is_refused():
    with pytest.raises((TypeError, AttributeError)), alock_all(["a"]):
        raise AssertionError("the block ran")


def test_a_block_that_another_task_leaves_releases_all_its_locks():
    @asynccontextmanager
    async def block():
        async with alock_all(["a", "b"]):
            yield

    async def main():
        both = block()
        await asyncio.create_task(both.__aenter__())
        assert await asyncio.to_thread(held_names) == ["a", "b"]
        await both.__aexit__(None, None, None)
        assert await asyncio.to_thread(held_names) == []

    asyncio.run(main())
