from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from django_redislock.core import AsyncQuorumLock, QuorumLock, quorum_lease
from django_redislock.core.driver.side_by_side import left_out
from tests.support import RedisServer
from tests.support.tasks import lock_for_threads


@pytest.fixture(autouse=True)
def _wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stands still for a second or two is waited for; an attempt ends when enough have answered."""
    monkeypatch.setattr(quorum_lease, "ANSWER", 30)
    monkeypatch.setattr(quorum_lease, "PATIENCE", 30)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Iterator[list[RedisServer]]:
    """So many servers as the module says in SERVERS."""
    with ExitStack() as stack:
        yield [stack.enter_context(RedisServer()) for _ in range(request.module.SERVERS)]


@pytest.fixture
def servers(started: list[RedisServer]) -> Iterator[list[RedisServer]]:
    """Servers of which a test may stop some."""
    yield started
    for server in started:
        if server.process is None:
            server.start()
        server.resume()


@pytest.fixture
def clients(servers: list[RedisServer], request: pytest.FixtureRequest) -> Iterator[list[redis.Redis]]:
    """A client of each server, which is empty; the module may give the clients' OPTIONS."""
    options = getattr(request.module, "OPTIONS", {})
    with ExitStack() as stack:
        found = [stack.enter_context(server.client(**options)) for server in servers]
        for client in found:
            client.flushall()
        left_out.clear()
        yield found


@pytest.fixture(params=["thread", "task"])
def make_quorum(request: pytest.FixtureRequest) -> type:
    """``make_quorum(clients, name, …)``: a QuorumLock, or an AsyncQuorumLock that is used like one."""
    if request.param == "thread":
        return QuorumLock
    return lock_for_threads(request.getfixturevalue("tasks"), AsyncQuorumLock)
