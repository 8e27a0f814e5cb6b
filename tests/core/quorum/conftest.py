from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from django_redislock.core import AsyncQuorumLock, QuorumLock, quorum
from django_redislock.core.driver import async_server
from tests.support import RedisServer
from tests.support.tasks import lock_for_threads

SCRIPTS = ("eval", "evalsha")


@pytest.fixture(autouse=True)
def _wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is waited for. A test that is about how long a server is waited for undoes it."""
    monkeypatch.setattr(quorum, "SHORTEST_ANSWER", 1.0)
    monkeypatch.setattr(async_server, "LAST_MOMENT", 1.0)


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
        yield found


@pytest.fixture
def calls(clients: list[redis.Redis]) -> Callable[[], int]:
    """Return how many scripts the first server was asked to run."""
    return lambda: sum(clients[0].info("commandstats").get(f"cmdstat_{each}", {}).get("calls", 0) for each in SCRIPTS)


@pytest.fixture(params=["thread", "task"])
def make_quorum(request: pytest.FixtureRequest) -> type:
    """``make_quorum(clients, name, …)``: a QuorumLock, or an AsyncQuorumLock that is used like one."""
    if request.param == "thread":
        return QuorumLock
    return lock_for_threads(request.getfixturevalue("tasks"), AsyncQuorumLock)
