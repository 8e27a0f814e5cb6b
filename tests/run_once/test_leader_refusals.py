"""A candidate whose server refuses: for a time, or for good."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from django_redislock import Leader, LockBackendError, leader
from tests.support import RedisServer, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["OOM", "BUSY"])
@pytest.mark.parametrize("tasks", [False, True], ids=["thread", "task"])
def test_leader_run_outlasts_a_temporary_refusal(
    settings: Any, own_server: RedisServer, caplog: pytest.LogCaptureFixture, fault: str, tasks: bool
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": own_server.url, "RETRY_FOR": 0}
    with own_server.client() as client, own_server.client(socket_timeout=60) as other:
        script = threading.Thread(target=lambda: suppressed(other.eval, "while true do end", 0))
        if fault == "OOM":
            client.config_set("maxmemory", "1")
        else:
            client.config_set("busy-reply-threshold", "20")
            script.start()
            wait_until(lambda: "BUSY" in str(suppressed(client.ping)))
        candidate = Leader("scheduler", on_elected=lambda term: candidate.stop())
        thread = threading.Thread(target=lambda: asyncio.run(candidate.arun()) if tasks else candidate.run())
        thread.start()
        try:
            wait_until(lambda: "refused a command" in caplog.text or not thread.is_alive())
            assert thread.is_alive()
        finally:
            if fault == "OOM":
                client.config_set("maxmemory", "0")
            else:
                client.script_kill()
                script.join()
            thread.join(30)
            candidate.stop()
            thread.join(30)
        assert not thread.is_alive()


def suppressed(call: Callable[..., object], *arguments: Any) -> object:
    try:
        return call(*arguments)
    except redis.RedisError as error:
        return error


def test_a_server_that_refuses_is_an_error(settings: Any, own_server: RedisServer) -> None:
    with own_server.client() as client:
        client.acl_setuser("nobody", enabled=True, nopass=True, commands=["+ping"])
    settings.DJANGO_REDISLOCK = {"URL": own_server.url.replace("redis://", "redis://nobody:x@")}
    with pytest.raises(LockBackendError, match=r"NOPERM|permission"), leader("scheduler"):
        pass
    with pytest.raises(LockBackendError, match=r"NOPERM|permission"):
        Leader("scheduler", on_elected=print).run()
