"""Lock objects that are dropped, copied or pickled, threads that end without releasing, and errors that are pickled."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import socket
import weakref
from contextlib import ExitStack, suppress

import pytest
import redis.asyncio

from django_redislock import (
    AcquireTimeout,
    AlreadyAcquired,
    LockBackendError,
    LockError,
    LockLost,
    LossRecord,
    NotAcquired,
    StaleFence,
    TaskAlreadyRunning,
)
from django_redislock.core import AsyncLock, Lock
from django_redislock.core.driver import effects
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.core.operations import reset_call
from tests.support import client_at, enter, free_port, in_thread, wait_until
from tests.support.locks import AsyncRLock, RLock


def test_a_dropped_lock_object_is_not_renewed(make_lock, client, caplog):
    lock = make_lock(client, "a", expire=0.5)
    lock.acquire()
    del lock
    gc.collect()
    wait_until(lambda: not make_lock(client, "a").locked())
    wait_until(lambda: "garbage-collected" in caplog.text)


def refused(client, proxy):
    with client_at(f"redis://127.0.0.1:{free_port()}") as nobody:
        Lock(nobody, "b").acquire(blocking=False)


def not_subscribed(client, proxy):
    with Lock(client, "b"), client_at(proxy.url, socket_timeout=0.5) as behind:
        enter(Lock(behind, "c"))
        proxy.deafen()
        Lock(behind, "b").acquire(timeout=0.5)


def some_of_many_that_no_lock_wrote(client, proxy):
    server, locks = server_of(client), [lock_keys("redislock", name) for name in "bc"]
    for keys in locks:
        client.rpush(keys.lock, "1")
    raise server.run(effects.with_retries_each("b", [reset_call(keys, None) for keys in locks], 0.0, [server] * 2))[0]


@pytest.mark.parametrize("fail", [refused, not_subscribed, some_of_many_that_no_lock_wrote], ids=lambda f: f.__name__)
def test_an_error_does_not_keep_a_lock_object_that_its_function_has_dropped(client, proxy, monkeypatch, fail):
    """In a cycle with its frames, it kept the variables of all callers until the garbage collector ran: their locks
    were renewed until then."""
    monkeypatch.setattr(effects, "retry_for", 0.01)

    def hold_and_fail():
        lock = Lock(client, "a")
        lock.acquire()
        try:
            fail(client, proxy)
        except LockBackendError:  # `pytest.raises` would keep it
            failed.append(True)
        return weakref.ref(lock)

    failed = []
    gc.disable()
    try:
        assert hold_and_fail()() is None
    finally:
        gc.enable()
    assert failed


async def test_a_connection_that_nobody_accepts_does_not_keep_what_its_task_has_dropped():
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # more than its queue takes: what comes then is dropped
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(silent.getsockname())
        client = redis.asyncio.Redis(port=silent.getsockname()[1], socket_connect_timeout=0.2)

        async def drop_and_fail():
            dropped = Lock(client, "b")
            with suppress(LockBackendError):
                acquired.append(await AsyncLock(client, "a").acquire(timeout=0.1))
            return weakref.ref(dropped)

        acquired = []
        gc.disable()
        try:
            dropped = await drop_and_fail()
            await asyncio.sleep(0)
            assert dropped() is None
        finally:
            gc.enable()
        assert not acquired


def test_a_thread_that_ends_without_releasing_leaves_nothing_renewed(make_lock, client, caplog):
    """The end is told to those who go on: its work may have been handed to another thread."""
    told = []
    lock = make_lock(client, "a", expire=0.5, on_lost=told.append)
    in_thread(lock.acquire)
    wait_until(lambda: told)
    wait_until(lambda: not lock.locked())  # the holder's belief ends first
    assert "ended without releasing" in caplog.text
    assert len(told) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=lambda function: function.__name__)
def test_a_copy_is_a_new_lock_object_that_has_acquired_nothing(client, copied):
    lock = Lock(client, "a", expire=12, label="mine")
    with lock:
        twin = copied(lock)
        with pytest.raises(NotAcquired):
            twin.release()
        assert not twin.acquire(blocking=False)
        assert lock.owned()
    with twin:
        assert (twin.owner().expire, twin.owner().label) == (12, "mine")
        with pytest.raises(NotAcquired):
            lock.release()


@pytest.mark.parametrize("kind", [Lock, RLock, AsyncLock, AsyncRLock])
def test_pickling_a_lock_tells_what_to_pass_instead(client, kind):
    with pytest.raises(TypeError, match=r"Pass the name \('a'\), and the id .* Lock\(client, name, id=id\)"):
        pickle.dumps(kind(client, "a"))


@pytest.mark.parametrize(
    "error",
    [
        LockError("a"),
        NotAcquired("a"),
        AlreadyAcquired("a"),
        AcquireTimeout("a", 3.0),
        LockLost("a", LossRecord("a", "id", 7, "why", 1.5, "expired")),
        StaleFence("a", 7),
        LockBackendError("a", "ConnectionError: gone"),
        TaskAlreadyRunning("a", "worker 1", 2.5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle_and_carry_their_data(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.name == "a"
    assert copy.__dict__ == error.__dict__
    assert str(copy) == str(error)
    assert str(type(error)(*error.args)) == str(error)
