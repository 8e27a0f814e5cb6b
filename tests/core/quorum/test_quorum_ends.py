"""What a quorum lock leaves behind when it is dropped, when a server answers too late, and when the program ends."""

from __future__ import annotations

import gc
import weakref

import pytest

from django_redislock.core import Lock, QuorumLock, events
from django_redislock.core.driver.side_by_side import left_out
from tests.support import Proxy, client_at, queued, wait_until
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
    assert "the program ends" in process.errors


@pytest.mark.slow
def test_a_request_that_a_slow_server_answers_too_late_does_not_wait_in_its_queue(clients, servers):
    """It waited there as long as the lock of that server was held, and kept the quorum lock alive."""
    with Proxy(servers[2].url) as proxy, client_at(proxy.url, socket_timeout=2) as behind:
        slow = [*clients[:2], behind]
        QuorumLock(slow, "warm").acquire()
        with Lock(clients[2], "a"):
            proxy.delay_replies(0.4)
            left_out.clear()  # a slow machine answered the first acquisition too late
            with QuorumLock(slow, "a"):
                wait_until(lambda: queued(clients[2], "a"))
            wait_until(lambda: not queued(clients[2], "a"), timeout=10)
