"""A quorum lock most of whose servers do not answer in their first time: how long it waits for the silent ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from django_redislock.core import Lock, quorum
from django_redislock.core.clock import monotonic
from django_redislock.core.driver import effects
from django_redislock.core.driver.registry import server_of
from tests.support import Proxy, client_at, wait_until, within
from tests.support.locks import held_on

SERVERS = 5
OPTIONS = {"socket_timeout": 60}
LATE = 0.3
"""Seconds after which a slow server answers: later than in its first time."""


@pytest.fixture(autouse=True)
def _own_times(_wait_for_answers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(quorum, "LEFT_OUT", 60)


@pytest.fixture
def proxies(servers) -> Iterator[list[Proxy]]:
    """A proxy before each of two servers, which answer at once until they are made slow."""
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(server.url)) for server in servers[1:3]]


@pytest.fixture
def behind(clients, proxies) -> Iterator[list[redis.Redis]]:
    """The clients; those of the second and the third server are behind the proxies."""
    with ExitStack() as stack:
        slow = [stack.enter_context(client_at(proxy.url, socket_timeout=60)) for proxy in proxies]
        yield [clients[0], *slow, *clients[3:]]


def is_given_up(client: redis.Redis) -> bool:
    """Whether a call that its server executes now, or later, gets nothing."""
    return bool(client.keys("*:undone:*"))


def test_a_try_does_not_wait_for_a_silent_server_when_most_have_answered(
    make_quorum, servers, clients, proxies, behind
):
    """Two refused it, and two that were slow granted it as they were asked again: it waited for the fifth one."""
    servers[0].pause()
    for proxy in proxies:
        proxy.delay_replies(LATE)
    lock = make_quorum(behind, "a", expire=600)
    lock._left_out[server_of(clients[0])] = monotonic() + 60  # so a thread asks it last
    with Lock(clients[3], "a"), Lock(clients[4], "a"), within(30):  # of a minute
        assert lock.acquire(blocking=False) is False
    servers[0].resume()
    wait_until(lambda: is_given_up(clients[0]) and held_on(clients) == [0] * SERVERS)


def test_a_lock_that_most_servers_granted_does_not_wait_for_a_silent_one_which_keeps_nothing(
    make_quorum, servers, clients, proxies, behind
):
    for server in servers[3:]:
        server.pause()
    for proxy in proxies:
        proxy.delay_replies(LATE)
    lock = make_quorum(behind, "a", expire=600)
    with within(30):  # of a minute
        assert lock.acquire(blocking=False)
    for server in servers[3:]:
        server.resume()
    wait_until(lambda: all(map(is_given_up, clients[3:])) and held_on(clients) == [1, 1, 1, 0, 0])
    lock.release()
    wait_until(lambda: held_on(clients) == [0] * SERVERS)


def test_an_extension_gives_slow_servers_all_their_time_when_another_one_has_lost_its_part(
    make_quorum, clients, proxies, behind, monkeypatch
):
    """Three of five had answered: two extended it, and one had lost it. The slow ones had their short time only."""
    monkeypatch.setattr(effects, "retry_for", 0.0)
    lock = make_quorum(behind, "a", expire=600)
    assert lock.acquire()
    wait_until(lambda: held_on(clients) == [1] * SERVERS)
    Lock(clients[0], "a").reset()
    for proxy in proxies:
        proxy.delay_replies(LATE)
    assert lock.extend()
    lock.release()
    wait_until(lambda: held_on(clients) == [0] * SERVERS)
