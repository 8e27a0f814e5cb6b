"""Locks that the watchdog does not renew, or not any more: who holds them still is found out, and their end is told."""

from __future__ import annotations

import _thread
import asyncio
import gc
import logging
import subprocess
import sys
import threading

import pytest

from django_redislock.core import AsyncLock, Lock
from django_redislock.core.clock import monotonic
from django_redislock.core.driver.registry import server_of
from django_redislock.exceptions import LockLost, NotAcquired
from django_redislock.signals import lock_lost
from tests.support import async_client_at, in_threads, lived, until, wait_until, watchdogs_of
from tests.support.locks import RLock


@pytest.fixture
def told():
    """What the signal `lock_lost` carried."""
    records = []

    def receive(record, **kwargs):
        records.append(record)

    lock_lost.connect(receive)
    yield records
    lock_lost.disconnect(receive)


# Who cannot be asked


class OwnTask(asyncio.tasks._PyTask):
    """What nest_asyncio makes of every task: the one in pure Python, which is no `asyncio.Task`."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [asyncio.tasks._PyTask, OwnTask])
async def test_tasks_of_a_foreign_task_factory_keep_their_locks_and_those_of_others(redis_url, client, kind, caplog):
    told = []
    other = Lock(client, "other", expire=1.5, on_lost=told.append)
    other.acquire()

    async def hold():
        assert not isinstance(asyncio.current_task(), asyncio.Task)
        async with (
            async_client_at(redis_url) as aclient,
            AsyncLock(aclient, "a", expire=1.5, on_lost=told.append) as lock,
        ):
            await asyncio.sleep(2)
            assert await lock.owned()

    asyncio.get_running_loop().set_task_factory(lambda loop, run, **more: kind(run, loop=loop, **more))
    await asyncio.create_task(hold())
    assert other.owned()
    assert not told
    assert "failed" not in caplog.text
    other.release()


@pytest.mark.slow
async def test_a_foreign_task_that_ends_without_releasing_is_noticed_and_told_in_its_loop(aclient, caplog):
    told = []
    lock = AsyncLock(aclient, "a", expire=1.2, on_lost=lambda _: told.append(threading.current_thread()))

    async def take():
        await lock.acquire()

    asyncio.get_running_loop().set_task_factory(lambda loop, run, **more: OwnTask(run, loop=loop, **more))
    await asyncio.create_task(take())
    await until(lambda: told, timeout=30)
    assert told == [threading.current_thread()]
    assert "ended without releasing" in caplog.text


class Stranger:
    """Neither a thread nor a task."""


class Rude(Stranger):
    """Looks like a task, and cannot be asked."""

    def get_loop(self):
        raise RuntimeError("ask somebody else")

    done = get_loop


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stranger, Rude])
def test_an_owner_that_cannot_be_asked_counts_as_alive_and_is_told_of_once(client, caplog, monkeypatch, kind):
    owner = type(f"New{kind.__name__}", (kind,), {})()

    class Strange(Lock):
        def _acquirer(self):
            return owner

    strange, other = Strange(client, "strange", expire=1.5), Lock(client, "other", expire=1.5)
    strange.acquire()
    other.acquire()
    lived(2)
    assert other.owned()
    assert strange.owned()
    strange.release()
    other.release()
    assert [record.levelname for record in caplog.records if "Cannot find out whether" in record.message] == ["WARNING"]
    assert "failed" not in caplog.text


# Threads that Python did not start


@pytest.mark.slow
def test_the_end_of_a_raw_thread_is_noticed(client, caplog):
    """Python takes it for alive for ever, and gives its number to the next one."""
    lock, acquired = Lock(client, "a", expire=1.2), threading.Event()

    def run():
        lock.acquire()
        acquired.set()

    _thread.start_new_thread(run, ())
    assert acquired.wait(20)
    stop = threading.Event()
    for _ in range(5):  # they get its number
        _thread.start_new_thread(stop.wait, ())
    wait_until(lambda: "ended without releasing" in caplog.text)
    stop.set()
    wait_until(lambda: Lock(client, "a").ttl() is None)


def test_a_thread_with_the_number_of_one_that_died_holding_does_not_hold_its_lock(client):
    """Python did not start these threads, and before 3.13 it takes the second one for the first."""

    def attempt(name):
        """Return what a thread with the dead one's number gets, or None if no thread had that number."""
        numbers, seen = [], []
        held, wanted = RLock(client, name, expire=60), RLock(client, name, expire=60)

        def die_holding():
            held.acquire()
            numbers.append(threading.get_ident())

        def look():
            if threading.get_ident() != numbers[0]:
                seen.append(None)
                return
            try:
                held.release()
            except NotAcquired:
                seen.append(wanted.acquire(blocking=False))
            else:
                seen.append("released the lock of the dead thread")

        _thread.start_new_thread(die_holding, ())
        wait_until(lambda: numbers)
        for looks in range(1, 11):
            _thread.start_new_thread(look, ())
            wait_until(lambda: len(seen) == looks)  # noqa: B023
            if seen[-1] is not None:
                break
        return seen[-1]

    # The number may also go to a thread that keeps it: in one run of CI a hundred threads had others.
    answers = (attempt(f"a{number}") for number in range(10))
    assert next((answer for answer in answers if answer is not None), None) is False


@pytest.mark.slow
def test_a_raw_thread_that_lives_keeps_its_lock(client, caplog):
    go, held = threading.Event(), []

    def run():
        with Lock(client, "a", expire=1.5) as lock:
            held.append(lock)
            go.wait(20)
            held.append(lock.lost)
        held.append("released")

    gc.collect()
    _thread.start_new_thread(run, ())
    wait_until(lambda: held)
    # Only what is young: among the objects of all tests it keeps the GIL for ten seconds on a busy machine.
    gc.collect(1)
    lived(2)
    go.set()
    wait_until(lambda: held[1:] == [None, "released"])
    assert "not renewed" not in caplog.text


# Their end is told


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_end_of_a_lock_that_is_not_renewed_is_told_without_anybody_asking(
    make_lock, client, caplog, told, reentrant
):
    heard = []
    lock = make_lock(client, "a", expire=0.5, auto_renewal=False, reentrant=reentrant, on_lost=heard.append)
    lock.acquire()
    fence = lock.fence
    sent = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    wait_until(lambda: heard)
    assert [lost.name for lost in heard] == ["a"]
    assert [(record.name, record.fence) for record in told] == [("a", fence)]
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        f"Lock 'a' (fence {fence}) was lost: its expiry of 0.5 s ended without a renewal."
    ]
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == sent, "nobody asked Redis"
    with pytest.raises(LockLost):
        lock.release()
    assert len(told) == len(heard) == 1


@pytest.mark.slow
def test_an_extension_puts_off_the_end_that_is_told(client, told):
    lock = Lock(client, "a", expire=0.8, auto_renewal=False)
    lock.acquire()
    lock.extend(60)
    lived(1.2)
    assert not told
    assert lock.owned()
    lock.extend(0.5)
    wait_until(lambda: told)
    with pytest.raises(LockLost):
        lock.release()


@pytest.mark.slow
def test_nothing_is_told_of_a_lock_that_was_released_or_whose_object_is_gone(client, caplog, told):
    kept = Lock(client, "kept", expire=0.5, auto_renewal=False)
    with kept:
        pass
    dropped = Lock(client, "dropped", expire=0.5, auto_renewal=False)
    dropped.acquire()
    del dropped
    gc.collect()
    last = Lock(client, "last", expire=0.7, auto_renewal=False)
    last.acquire()
    wait_until(lambda: told)
    assert [record.name for record in told] == ["last"]
    assert "kept" not in caplog.text
    assert "dropped" not in caplog.text


def test_a_release_that_races_the_end_is_a_loss_that_is_told_or_a_release(client, told):
    """Each release comes about when the life ends: it is told once that the lock was lost, or not at all."""
    outcomes, names = [], [f"lock {i}" for i in range(60)]

    def cycle(name, late):
        lock = Lock(client, name, expire=0.2, auto_renewal=False)
        lock.acquire()
        lease = lock._visible_lease()
        wait_until(lambda: lease.deadline - monotonic() < late)
        try:
            lock.release()
        except LockLost:
            outcomes.append(name)

    in_threads(len(names), lambda number: cycle(names[number], number / 3000 - 0.01))
    wait_until(lambda: sorted(record.name for record in told) == sorted(outcomes))


def test_locks_that_are_not_renewed_send_nothing_and_wake_nobody(client):
    """Neither while they are held, nor when they are released one after another."""
    lock = Lock(client, "a", auto_renewal=False)
    with lock:
        pass
    thread = server_of(client).watchdog._thread
    for _ in range(100):
        with lock:
            pass
    assert not thread.event.clear()
    assert watchdogs_of(client) == 1


ASKING = """
import signal, sys
from django_redislock.core import Lock
from django_redislock.server_url import client_from_url

lock = Lock(client_from_url(sys.argv[1]), "a", expire=300, auto_renewal=False)
lock.acquire()
lease, seen = lock._visible_lease(), []
signal.signal(signal.SIGALRM, lambda *_: seen.append(lease.note_loss(lease.ending)))
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
while len(seen) < 3000:
    lease._losses.clear()
    lease.note_loss(lease.ending)
signal.setitimer(signal.ITIMER_REAL, 0)
print("done")
"""


@pytest.mark.processes
def test_a_signal_handler_that_asks_for_the_loss_that_is_being_noted_hangs_nobody(redis_url):
    run = subprocess.run(
        [sys.executable, "-c", ASKING, redis_url], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.stdout, run.stderr) == ("done\n", "")
