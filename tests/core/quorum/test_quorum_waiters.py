"""A quorum lock that is waited for: what is said at the end of the time, and when servers come and go meanwhile."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from django_redislock.core import Lock, QuorumLock, quorum
from django_redislock.core.driver.registry import server_of
from django_redislock.exceptions import LockBackendError
from tests.support import Proxy, begin, client_at, wait_until

SERVERS = 5


@pytest.mark.slow
def test_servers_that_fall_silent_in_the_last_moment_make_the_end_of_the_time_no_error(clients, servers, monkeypatch):
    """They answered the attempt before it, a moment ago: the lock was held."""
    attempts, ask = [], QuorumLock._ask

    def counted(lock, *args):
        attempts.append(lock)
        if len(attempts) == 3:
            for proxy in proxies:
                proxy.stall()
        return ask(lock, *args)

    monkeypatch.setattr(quorum, "HEARD", 20)
    with ExitStack() as stack:
        for client in clients[1:]:
            stack.enter_context(Lock(client, "a", expire=60))
        proxies = [stack.enter_context(Proxy(server.url)) for server in servers[1:]]
        behind = [stack.enter_context(client_at(proxy.url, socket_timeout=0.5)) for proxy in proxies]
        lock = QuorumLock([clients[0], *behind], "a")
        monkeypatch.setattr(QuorumLock, "_ask", counted)
        assert lock.acquire(timeout=1) is False
        assert len(attempts) >= 3
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


def test_a_waiter_survives_that_one_server_after_the_other_is_restarted(clients, servers):
    """The errors of different hours were added up: with the third one, most of the servers counted as away."""
    for client in clients:
        Lock(client, "a", expire=300, auto_renewal=False).acquire()
    lock = QuorumLock(clients, "a", timeout=120)
    waiting = begin(lock.acquire)
    for server, client in zip(servers[:3], clients, strict=False):
        server.stop()
        wait_until(lambda client=client: waiting.done() or server_of(client) in lock._left_out)
        server.start()
    assert waiting.result(60)
