"""A quorum lock that is waited for: what is said at the end of the time, and when servers come and go meanwhile."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from django_redislock.core import Lock, QuorumLock, quorum_lease
from django_redislock.core.clock import monotonic
from django_redislock.exceptions import LockBackendError
from tests.support import Proxy, begin, client_at, queued, wait_until

SERVERS = 5


@pytest.mark.slow
def test_servers_that_fall_silent_in_the_last_moment_make_the_end_of_the_time_no_error(clients, servers, monkeypatch):
    """They answered the attempt before it, a moment ago: the lock was held."""

    class Attempt(quorum_lease.Round):
        def __init__(self, lease, until):
            if monotonic() > until - quorum_lease.ANSWER and lease.heard > 0:
                late.append(self)
                for proxy in proxies:
                    proxy.stall()
            super().__init__(lease, until)

    monkeypatch.setattr(quorum_lease, "Round", Attempt)
    monkeypatch.setattr(quorum_lease, "ANSWER", 0.15)
    monkeypatch.setattr(quorum_lease, "PATIENCE", 20)
    late = []
    with ExitStack() as stack:
        for client in clients[1:]:  # the first one grants its part, so that there are many attempts
            stack.enter_context(Lock(client, "a", expire=60))
        proxies = [stack.enter_context(Proxy(server.url)) for server in servers[1:]]
        behind = [stack.enter_context(client_at(proxy.url)) for proxy in proxies]
        lock = QuorumLock([clients[0], *behind], "a")
        while not late:
            assert lock.acquire(timeout=1) is False
        for proxy in proxies:
            proxy.heal()


@pytest.mark.slow
def test_a_majority_that_stays_silent_is_an_error_also_for_a_waiter_without_a_time_limit(servers, monkeypatch):
    """The locks of the others were acquired and given back again and again, and nobody was told."""
    monkeypatch.undo()  # it is about how long an answer is waited for
    with ExitStack() as stack:
        behind = [stack.enter_context(server.client(socket_timeout=1.5)) for server in servers]
        with QuorumLock(behind, "a"):
            pass
        for server in servers[:3]:
            server.pause()
        waiting = begin(QuorumLock(behind, "a").acquire)
        with pytest.raises(LockBackendError):
            waiting.result(20)


def test_a_waiter_survives_that_one_server_after_the_other_is_restarted(clients, servers, monkeypatch):
    """The errors of different hours were added up: with the third one, most of the servers counted as away."""
    attempts = []
    make = quorum_lease.Round
    monkeypatch.setattr(quorum_lease, "Round", lambda *args: attempts.append(make(*args)) or attempts[-1])
    monkeypatch.setattr(quorum_lease, "LEFT_OUT", 0)
    for client in clients:
        Lock(client, "a", expire=300, auto_renewal=False).acquire()
    lock = QuorumLock(clients, "a", timeout=120)

    def wait():
        with lock:
            return True

    waiting = begin(wait)
    wait_until(lambda: all(queued(client, "a") for client in clients))
    for server in servers[:3]:
        server.stop()
        wait_until(lambda server=server: waiting.done() or failed(attempts, server))
        server.start()
    assert waiting.result(60)


def failed(attempts, server):
    """Return whether the waiter has seen that the server is away."""
    return any(of.settings["port"] == server.port for attempt in attempts for of in list(attempt.errors))
