"""What cannot work is an error at the first call that says what to do, and the doctor and the checks say it before."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command

from django_redislock import alock, get_client, lock
from django_redislock.core.driver.effects import advice_for
from django_redislock.core.driver.registry import close_unused, server_of
from django_redislock.doctor import diagnose, inspect
from django_redislock.exceptions import LockBackendError
from tests.core.test_async_clients import tls_server
from tests.support import Cluster, OneNode, RedisServer, free_port, running_sentinel, wait_until
from tests.support.twemproxy import twemproxy

pytestmark = pytest.mark.processes


class Wrong(NamedTuple):
    """A deployment that cannot work, and words of the advice of the first call and of the doctor."""

    start: Callable[[], AbstractContextManager[dict[str, Any]]]
    at_first: str
    check: str
    before: str
    id: str


@contextmanager
def unknown_service() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, running_sentinel(Path(folder)) as port:
        yield {"URL": f"redis+sentinel://127.0.0.1:{port}/other/0"}


@contextmanager
def wrong_authority() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        server, port, _ = tls_server(Path(folder))
        with server:
            yield {"URL": f"rediss://127.0.0.1:{port}/0"}


@contextmanager
def no_certificate() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        server, port, certificate = tls_server(Path(folder), tls_auth_clients="yes")
        with server:
            yield {"URL": f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}", "RETRY_FOR": 0.2}


@contextmanager
def no_slots() -> Iterator[dict[str, Any]]:
    with OneNode() as node, node.client() as client:
        client.execute_command("CLUSTER DELSLOTSRANGE", 0, 16383)
        yield {"URL": f"redis+cluster://127.0.0.1:{node.port}", "RETRY_FOR": 0.2}


@contextmanager
def with_password(credentials: str) -> Iterator[dict[str, Any]]:
    with RedisServer() as server:
        with server.client() as client:
            client.config_set("requirepass", "secret")
        yield {"URL": server.url.replace("//", f"//{credentials}")}


@contextmanager
def too_few_replicas() -> Iterator[dict[str, Any]]:
    with RedisServer() as server:
        yield {"URL": server.url, "MIN_REPLICAS": 1}


@contextmanager
def nodes_that_cannot_be_reached() -> Iterator[dict[str, Any]]:
    """As behind an address translation: the nodes name each other by addresses that are not for clients."""
    with Cluster() as cluster:
        ports = {free_port() for _ in cluster.nodes}
        for node, port in zip(cluster.nodes, ports, strict=True):
            cluster.ask(node, "CONFIG SET", "cluster-announce-port", port)

        def told(node: Any) -> set[int]:
            return {int(address.rpartition(":")[2]) for address in cluster.known_to(node)}

        wait_until(lambda: all(told(node) == ports for node in cluster.nodes))
        yield {"URL": f"redis+cluster://127.0.0.1:{cluster.nodes[0].port}"}


CASES = {
    "unknown service": Wrong(
        unknown_service,
        "know no service 'other': give the name of their line 'sentinel monitor",
        "connection",
        "Correct the name of the service",
        "redislock.E005",
    ),
    "wrong CA": Wrong(
        wrong_authority, "as ssl_ca_certs, and connect by a name", "connection", "as ssl_ca_certs", "redislock.E005"
    ),
    "no certificate": Wrong(no_certificate, "did not answer", "connection", "give ssl_certfile and", "redislock.E005"),
    "no password": Wrong(
        lambda: with_password(""), "The server wants a password", "connection", "wants a password", "redislock.E005"
    ),
    "wrong password": Wrong(
        lambda: with_password("app:wrong@"),
        "refused .* Correct the user and the password",
        "connection",
        "Correct the user and the password in",
        "redislock.E005",
    ),
    "too few replicas": Wrong(
        too_few_replicas,
        r"0 of 1 replicas .*Check the replicas and their links .*or lower min_replicas",
        "min_replicas",
        "Connect more replicas, or lower",
        "redislock.E008",
    ),
    "unreachable nodes": Wrong(
        nodes_that_cannot_be_reached,
        "none of them can be reached from here. Give the client an address_remap, or set cluster-announce-ip",
        "connection",
        "give the client an address_remap, or set cluster-announce-ip",
        "redislock.E005",
    ),
    "a Cluster that was not created": Wrong(
        no_slots,
        "CLUSTERDOWN No node",
        "connection",
        "give each slot a node: redis-cli --cluster fix",
        "redislock.E005",
    ),
}


def told_by_the_doctor(*arguments: str) -> str:
    output = io.StringIO()
    with pytest.raises(CommandError) as ended:
        call_command("redislock", "doctor", *arguments, stdout=output, stderr=io.StringIO(), no_color=True)
    assert ended.value.returncode == 1
    return output.getvalue()


@pytest.mark.parametrize("case", CASES)
def test_the_first_call_says_what_to_do_and_the_doctor_and_the_checks_say_it_before(settings: Any, case: str) -> None:
    wrong = CASES[case]
    with wrong.start() as options:
        settings.DJANGO_REDISLOCK = options
        with pytest.raises(LockBackendError, match=wrong.at_first):
            lock("a").acquire(blocking=False)
        with pytest.raises(LockBackendError, match=wrong.at_first):
            asyncio.run(alock("b").acquire(blocking=False))

        told = told_by_the_doctor("--connection", "url")
        said = [line for line in told.splitlines() if line.startswith(f"problem  url  {wrong.check}: ")]
        assert said, told
        assert wrong.before in said[0]

        assert run_checks(tags=["redislock"]) == []
        messages = run_checks(tags=["redislock"], include_deployment_checks=True)
        hints = [message.hint or "" for message in messages if message.id == wrong.id]
        assert any(wrong.before in hint for hint in hints), messages
        close_unused()


def test_the_doctor_and_the_checks_inspect_the_primary_of_a_sentinel(sentinel: int, settings: Any) -> None:
    settings.DJANGO_REDISLOCK = {"URL": f"redis+sentinel://127.0.0.1:{sentinel}/main/0"}
    (finding,) = [finding for finding in inspect(server_of(get_client())) if finding.check == "connection"]
    assert finding.status == "ok"
    close_unused()


def test_a_server_without_lua_is_told_by_the_first_call_and_by_the_doctor(settings: Any, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.conf"
    renamed.write_text('rename-command EVAL ""\nrename-command EVALSHA ""')
    with RedisServer(include=str(renamed)) as server:
        settings.DJANGO_REDISLOCK = {"URL": server.url}
        for acquire in (lambda: lock("a").acquire(), lambda: asyncio.run(alock("b").acquire())):
            with pytest.raises(LockBackendError, match="runs no Lua scripts, which locks need: load its Lua module"):
                acquire()
        told = told_by_the_doctor()
        assert "acquire: LockBackendError: Redis refused a command" in told
        assert "load its Lua module" in told
        close_unused()


def test_a_server_that_refuses_time_in_scripts_is_told_by_the_first_call_and_by_the_doctor(
    settings: Any, tmp_path: Path
) -> None:
    renamed = tmp_path / "renamed.conf"  # as TIME now a command that no script may use, the server answers as theirs
    renamed.write_text("rename-command TIME NOW\nrename-command SAVE TIME")
    with RedisServer(include=str(renamed)) as server:
        settings.DJANGO_REDISLOCK = {"URL": server.url}
        for acquire in (lambda: lock("a").acquire(), lambda: asyncio.run(alock("b").acquire())):
            with pytest.raises(
                LockBackendError, match=r"command is not allowed from script.* some serverless services"
            ):
                acquire()
        told = told_by_the_doctor()
        assert told.count("some serverless services refuse TIME") == told.count("problem  ") == 2
        assert "acquire: LockBackendError: Redis refused a command" in told
        close_unused()


def test_the_words_of_redis_6_2_that_replicates_whole_scripts_get_their_advice() -> None:
    said = (
        "Write commands not allowed after non deterministic commands. Call redis.replicate_commands() at the start of "
        "your script in order to switch to single commands replication mode."
    )
    assert "set lua-replicate-commands to yes" in advice_for(said)


def test_the_doctor_finds_a_proxy_that_spreads_keys_over_several_servers(settings: Any) -> None:
    with RedisServer() as one, RedisServer() as other, twemproxy(one, other) as url:
        settings.DJANGO_REDISLOCK = {"URL": url}
        told = told_by_the_doctor("--connection", "url")
        (line,) = [line for line in told.splitlines() if line.startswith("problem  url  many locks: ")]
        assert "16 locks were held at once, and" in line
        assert "were not renewed" in line
        assert "A proxy that spreads keys over several servers (twemproxy) is not supported" in told
        close_unused()


def test_before_one_server_the_doctor_finds_that_locks_work_and_that_the_proxy_has_no_channels(settings: Any) -> None:
    with RedisServer() as server, twemproxy(server) as url:
        settings.DJANGO_REDISLOCK = {"URL": url}
        findings = {finding.check: finding for finding in diagnose(get_client())}
        assert {findings[check].status for check in ("acquire", "renew", "release", "many locks")} == {"ok"}
        assert findings["permissions (wait)"].status == "advice"
        close_unused()
