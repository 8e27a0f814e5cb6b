"""What is given up is given back, in whatever order the undo and its call arrive."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress

import pytest
from redis.exceptions import ResponseError

from django_redislock.celery.execution_lock import Delivery, ExecutionLock
from django_redislock.core import Lock, Semaphore, acquirers, attempt, base, lock as lock_module, operations
from django_redislock.core.driver import connection, effects, os_threads, server
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError
from tests.support import TimeLimit, client_at, in_a_fork, wait_until
from tests.support.interruptions import interrupted_at_each_point

KEYS = lock_keys("redislock", "a")
OURS = base, operations, attempt, acquirers, lock_module


def task(client, **options):
    lock = ExecutionLock(client, "a", expire=600).with_name("a", **options)
    lock.delivery = Delivery("message", "message:0", known=True)
    return lock


MAKE = {
    "lock": lambda client: Lock(client, "a", expire=600),
    "lock by an id": lambda client: Lock(client, "a", expire=600, id="given"),
    "re-entrant lock": lambda client: Lock(client, "a", expire=600, reentrant=True),
    "semaphore": lambda client: Semaphore(client, "a", 2, expire=600),
    "task": task,
    "task with a limit": lambda client: task(client, limit=2),
}


@pytest.fixture(params=list(MAKE)[:4])
def lock(client, request):
    return MAKE[request.param](client)


@pytest.fixture(params=MAKE)
def request_of(client, request):
    """Return a function that makes the request for one attempt by a new object."""

    def make():
        made = MAKE[request.param](client)._new_request(threading.current_thread(), 0.0)
        made.attempt.pending = True
        return made

    return make


def is_free(client):
    return not any(client.keys(f"*:{kind}:*") for kind in ("lock", "queue"))


def works(client):
    """Return whether the janitor of this server has something to do."""
    return server_of(client).janitor._worker.value is not None


def entries(client):
    return {key: client.zrange(key, 0, -1) for key in client.keys("*:queue:*")}


def call_of(request):
    return request.call(b"channel", True, b"").with_text()


# The three orders


def test_a_call_that_arrives_before_its_undo_is_undone(client, request_of):
    request = request_of()
    assert isinstance(server_of(client).call(call_of(request)), int | bytes)
    request.attempt.give_up()
    wait_until(lambda: is_free(client))


def test_a_call_that_arrives_after_its_undo_gets_nothing(client, request_of):
    request = request_of()
    undo = request.attempt._undo().with_text()
    assert server_of(client).call(undo) == server_of(client).call(undo) == 0
    with pytest.raises(ResponseError, match="given up before this call arrived"):
        server_of(client).call(call_of(request))
    assert is_free(client)
    (note,) = client.keys("*:undone:*")
    assert 240_000 < client.pttl(note) <= 300_000, "TCP may deliver the call two minutes later"


def test_a_call_that_arrives_after_its_undo_gets_no_place_in_the_queue(client, request_of):
    holders = [request_of(), request_of()]
    for holder in holders:
        server_of(client).call(call_of(holder))
    request = request_of()
    server_of(client).call(request.attempt._undo().with_text())
    before = entries(client)
    with suppress(ResponseError):  # a copy of a message is refused first
        server_of(client).call(call_of(request))
    assert entries(client) == before


def test_an_undo_between_a_call_and_its_repetition_ends_both(client, request_of):
    request = request_of()
    server_of(client).call(call_of(request))
    server_of(client).call(request.attempt._undo().with_text())
    with pytest.raises(ResponseError, match="given up before this call arrived"):
        server_of(client).call(call_of(request))
    assert is_free(client)


def test_an_undo_that_arrives_late_leaves_the_next_acquisition_by_the_same_object_or_id(client, request_of):
    given_up, successor = request_of(), request_of()
    server_of(client).call(call_of(given_up))
    server_of(client).call(given_up.attempt._undo().with_text())
    assert isinstance(server_of(client).call(call_of(successor)), int | bytes)
    held = client.keys("*:lock:*")
    assert len(held) == 1
    server_of(client).call(given_up.attempt._undo().with_text())
    assert client.keys("*:lock:*") == held


# What ends an attempt


def test_an_acquire_that_is_interrupted_at_any_instruction_holds_nothing_and_leaves_the_object_usable(client, lock):
    """A soft time limit in the last lines left the lock held and renewed, or a note of "under way" for ever: each task
    of a prefork child failed from then on."""
    entered, unreal = [], 0
    points = interrupted_at_each_point(lambda _: entered.append(lock.__enter__()), *OURS, as_signals=True)
    for number in points:  # noqa: B007
        if not entered and lock._leases:  # as a function of Python returns to one, no handler runs
            unreal += 1
            entered.append(lock)
        if not entered:
            wait_until(lambda: is_free(client))
            lock.__enter__()
        lock.__exit__(None, None, None)
        assert not lock._blocks
        entered.clear()
    assert number > 50
    assert unreal <= 1


def test_an_exit_that_is_interrupted_at_any_instruction_but_its_first_leaves_no_lock(client, lock):
    """Before its first instruction Python lets nobody notice that a handler raised."""
    lock.__enter__()
    for point in interrupted_at_each_point(lambda _: lock.__exit__(None, None, None), *OURS, as_signals=True):
        if point > 1:
            wait_until(lambda: is_free(client))
            lock.__enter__()
    lock.release()
    assert point > 40


def test_exceptions_right_after_a_reply_leave_neither_threads_nor_connections(redis_url, client):
    """Each left a thread and a connection for 30 s."""
    with client_at(redis_url, client_name="interrupted") as ours:
        lock = Lock(ours, "a", expire=600)
        lock.acquire()
        lock.release()
        drivers = connection, server, effects
        for _ in interrupted_at_each_point(
            lambda _: lock.acquire(blocking=False) and lock.release(), *drivers, as_signals=True
        ):
            if lock._leases:
                lock.release()
        wait_until(lambda: is_free(client) and not works(ours))
        names = [each["name"] for each in client.client_list()]
        assert names.count("interrupted") <= 2
        assert not [each.name for each in threading.enumerate() if "unanswered" in each.name]


def test_a_lock_whose_grant_got_lost_with_the_server_is_free_when_the_server_is_back(proxy, client, monkeypatch):
    """It stayed for 594 s, though the caller got an error and nobody held it."""
    monkeypatch.setattr(effects, "retry_for", 0.3)
    with client_at(proxy.url, socket_timeout=0.5) as behind:
        with Lock(behind, "warm"):
            pass
        proxy.drop_next_reply(containing=b"EVALSHA")
        with proxy.refusing("-LOADING the server loads its data", b"EVAL"), pytest.raises(LockBackendError):
            stall_after_drop(proxy, Lock(behind, "a", expire=600))
        proxy.heal()
        wait_until(lambda: not client.exists(KEYS.lock))


def stall_after_drop(proxy, lock):
    lock.acquire()


def test_a_try_that_failed_after_a_repeated_call_takes_nothing_when_the_first_call_arrives(proxy, redis_url, client):
    """It arrived when the holder had released, and held the lock for its whole expiry."""
    with client_at(proxy.url) as behind:
        with Lock(behind, "warm"):
            pass
        holder = Lock(client, "a", expire=600)
        holder.acquire()
        late = proxy.deliver_late(containing=b"EVALSHA")
        assert not Lock(behind, "a", expire=600).acquire(blocking=False)
        holder.release()
        wait_until(lambda: client.keys("*:undone:*"))
        late.deliver.set()
        assert late.delivered.wait(20)
        assert not client.exists(KEYS.lock)


def test_a_silent_server_holds_up_no_other_ones_undos(own_server, redis_url, client):
    with own_server.client() as silent, ExitStack() as stack:
        stack.callback(own_server.resume)
        for each in (silent, client):
            with Lock(each, "warm"):
                pass
        requests = [
            Lock(each, "a", expire=600)._new_request(threading.current_thread(), 0.0) for each in (silent, client)
        ]
        for request, each in zip(requests, (silent, client), strict=True):
            server_of(each).call(call_of(request))
            request.attempt.pending = True
        own_server.pause()
        for request in requests:
            request.attempt.give_up()
        wait_until(lambda: not client.exists(KEYS.lock))
        wait_until(lambda: not works(client))
        assert works(silent)
        own_server.resume()
        wait_until(lambda: not silent.exists(KEYS.lock))


def test_a_forked_child_gives_back_nothing_of_its_parents(client):
    request = Lock(client, "a", expire=600)._new_request(threading.current_thread(), 0.0)
    server_of(client).call(call_of(request))
    request.attempt.pending = True

    def child():
        request.attempt.give_up()
        assert not works(client)

    in_a_fork(child)
    assert client.exists(KEYS.lock)


def test_a_signal_while_the_thread_starts_keeps_no_call_for_ever(client, monkeypatch):
    def interrupted(*args):
        monkeypatch.undo()
        raise TimeLimit

    request = Lock(client, "a", expire=600)._new_request(threading.current_thread(), 0.0)
    server_of(client).call(call_of(request))
    request.attempt.pending = True
    monkeypatch.setattr(os_threads, "start_raw", interrupted)
    with pytest.raises(TimeLimit):
        request.attempt.give_up()
    wait_until(lambda: not client.exists(KEYS.lock))
