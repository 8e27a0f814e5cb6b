"""What a quorum lock leaves behind when it is dropped, when a server answers too late, and when the program ends."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack

import pytest

from django_redislock.core import Lock, QuorumLock, events
from tests.support import Proxy, client_at, wait_until
from tests.support.locks import held_on

SERVERS = 3


class Interrupt(BaseException):
    """Of a signal handler."""


@pytest.mark.parametrize("call", ["extend", "release"])
def test_a_server_that_is_away_does_not_keep_a_quorum_lock_that_its_function_has_dropped(servers, clients, call):
    """Its error led to the frame with the list of the tasks, one of which had the error."""
    servers[2].kill()
    gc.disable()
    try:

        def use():
            lock = QuorumLock(clients, "a", expire=30)
            lock.acquire()
            acquisition = weakref.ref(*lock._leases.values())
            getattr(lock, call)()
            return acquisition

        dropped = use()
        wait_until(lambda: dropped() is None, timeout=10)
    finally:
        gc.enable()


def test_an_acquisition_that_was_interrupted_as_it_was_reported_is_no_loss(clients, monkeypatch):
    def interrupt(event, details):
        raise Interrupt

    told = []
    lock = QuorumLock(clients, "a", on_lost=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(events, "listeners", [interrupt])
        with pytest.raises(Interrupt):
            lock.acquire()
    wait_until(lambda: held_on(clients) == [0] * SERVERS)
    assert lock.lost is None
    assert lock.acquire(blocking=False)
    lock.release()
    assert not told


ENDS_INSIDE = """
from contextlib import ExitStack
from django_redislock.core import QuorumLock
from tests.support import client_at

def hold():
    with QuorumLock([client_at(url) for url in args], "a", expire=3):
        yield

held = hold()
next(held)
"""


def test_a_program_that_ends_inside_a_block_of_a_generator_does_not_hang(servers, clients, run_python):
    process = run_python(ENDS_INSIDE, *(server.url for server in servers), new=True)
    assert process.wait() == 0


@pytest.mark.parametrize("held_elsewhere", [False, True])
def test_what_a_slow_server_grants_too_late_is_given_back(make_quorum, clients, servers, monkeypatch, held_elsewhere):
    monkeypatch.undo()  # it is about how long an answer is waited for
    with Proxy(servers[2].url) as proxy, client_at(proxy.url) as behind, ExitStack() as stack:
        lock = make_quorum([*clients[:2], behind], "a")
        with lock:
            pass
        if held_elsewhere:
            stack.enter_context(Lock(clients[0], "a"))
            stack.enter_context(Lock(clients[1], "a"))
        proxy.delay_replies(0.4)
        assert lock.acquire(blocking=False) is not held_elsewhere
        wait_until(lambda: held_on(clients[2:]) == [0])
        if not held_elsewhere:
            lock.release()
    wait_until(lambda: held_on(clients) == [0] * SERVERS)
