"""A candidate whose server refuses: for a time, or for good."""

from __future__ import annotations

import asyncio
import socketserver
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from django_redislock import Leader, LockBackendError, leader
from django_redislock.core.driver.effects import Operation, Sleep
from django_redislock.run_once.election import Stopped, _until_stopped, refused_for_good
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


def test_the_name_of_a_leader_is_no_reason_to_give_up() -> None:
    """Each name with a word of an error's text ended the candidate at the first outage."""
    assert not refused_for_good(LockBackendError("unauthenticated-carts", "ConnectionError: Connection refused"))
    assert refused_for_good(LockBackendError("carts", "ResponseError: unauthenticated multibulk length"))


class RefusesTls(socketserver.BaseRequestHandler):
    """Answers a client that shows no certificate as TLS does."""

    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"\x15\x03\x03\x00\x02\x02\x28")  # the alert handshake_failure


def test_leader_raises_when_the_settings_of_tls_are_wrong(settings: Any) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), RefusesTls) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        settings.DJANGO_REDISLOCK = {"URL": f"rediss://127.0.0.1:{server.server_address[1]}"}
        failed: list[LockBackendError] = []

        def stand() -> None:
            try:
                candidate.run()
            except LockBackendError as error:
                failed.append(error)

        candidate = Leader("scheduler", on_elected=print)
        thread = threading.Thread(target=stand)
        thread.start()
        thread.join(5)
        candidate.stop()
        thread.join()
        server.shutdown()
    assert [error.cause for error in failed if "ssl_certfile" in error.cause]


def test_a_candidate_that_is_stopped_while_redis_is_away_stops_at_the_next_pause() -> None:
    """Behind Sentinel its call is repeated for 40 seconds, and the process was killed before it had stopped."""

    def acquire() -> Operation[bool]:
        while True:
            yield Sleep(0.5)

    steps = _until_stopped(acquire(), lambda: True)
    next(steps)
    with pytest.raises(Stopped):
        steps.send(None)
