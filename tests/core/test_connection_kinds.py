"""The private parts of redis-py: which ones are used, where, and that the installed version still has them."""

from __future__ import annotations

import ast
import asyncio
import socket
from pathlib import Path

import pytest
import redis
from redis import exceptions
from redis.asyncio import Redis as AsyncRedis

import django_redislock
from django_redislock.core.driver.connection import new_connection
from django_redislock.core.driver.kinds import (
    close_at_once,
    inherited_settings,
    is_at_end,
    new_async_connection,
    parse_error,
    settings_of,
    socket_of,
    transport_of,
)
from tests.project import private_names
from tests.support import wait_until

PACKAGE = Path(django_redislock.__file__).parent
PRIVATE = {
    name
    for each in private_names.PRIVATE
    if each.module.startswith("redis.") and "core/driver/kinds.py" in each.used_in
    for name in each.names.split()
}
"""The private parts of redis-py that the package uses in one module; `_parsers` is the module of `parse_error`."""


def private_parts_in(path: Path) -> set[str]:
    """Return the names in `PRIVATE` that are attributes of foreign objects, and redis-py's private modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            found.update(arg.value for arg in node.args if isinstance(arg, ast.Constant) and arg.value in PRIVATE)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("redis."):
            found.update(part for part in (node.module or "").split(".") if part.startswith("_"))
    return found


def test_one_module_uses_the_private_parts_of_redis_py_and_they_are_all_named_here():
    found = {path.relative_to(PACKAGE).as_posix(): private_parts_in(path) for path in PACKAGE.rglob("*.py")}
    assert {name: parts for name, parts in found.items() if parts} == {"core/driver/kinds.py": PRIVATE}


def test_the_socket_of_a_connection_is_there_while_it_is_connected(redis_url):
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        connection = client.connection_pool.make_connection()
        assert socket_of(connection) is None
        connection.connect()
        found = socket_of(connection)
        assert isinstance(found, socket.socket)
        found.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert found.recv(100) == b"+PONG\r\n"
        connection.disconnect()
        assert socket_of(connection) is None


@pytest.mark.parametrize("kind", [redis.Redis, AsyncRedis])
def test_the_settings_of_a_pool_are_those_of_its_client(kind):
    settings = settings_of(kind(host="somewhere", port=7, db=3).connection_pool)
    assert (settings["host"], settings["port"], settings["db"]) == ("somewhere", 7, 3)


async def test_the_transport_of_an_asyncio_connection_is_open_until_the_connection_is_closed(redis_url):
    pool = redis.Redis.from_url(redis_url).connection_pool
    connection = new_async_connection(pool.connection_class, settings_of(pool))
    close_at_once(connection)  # before it is connected there is nothing to close
    await connection.connect()
    transport = transport_of(connection)
    assert isinstance(transport, asyncio.Transport)
    assert not transport.is_closing()
    close_at_once(connection)
    assert transport.is_closing()


@pytest.mark.parametrize("by_task", [False, True])
def test_a_server_that_does_not_answer_is_connected_to_once_in_an_attempt(proxy, by_task):
    patience = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
    pool = redis.Redis.from_url(proxy.url, client_name="any").connection_pool  # it has to say its name
    make = new_async_connection if by_task else new_connection
    connection = make(pool.connection_class, inherited_settings(settings_of(pool)) | patience)
    proxy.deafen()
    with pytest.raises(exceptions.TimeoutError):
        if by_task:
            asyncio.run(connection.connect())
        else:
            connection.connect()
    wait_until(lambda: proxy.unheard)
    assert proxy.unheard == 1


async def test_a_connection_that_the_server_closed_is_at_its_end(client, redis_url):
    pool = redis.Redis.from_url(redis_url, client_name="doomed").connection_pool
    connection = new_async_connection(pool.connection_class, settings_of(pool))
    await connection.connect()
    assert not is_at_end(connection)
    (own,) = [found for found in client.client_list() if found["name"] == "doomed"]
    client.client_kill_filter(_id=own["id"])
    await asyncio.to_thread(wait_until, lambda: is_at_end(connection))
    close_at_once(connection)


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("NOSCRIPT No matching script.", exceptions.NoScriptError, "No matching script."),
        ("NOPERM No permissions.", exceptions.NoPermissionError, "No permissions."),
        ("WRONGPASS invalid password", exceptions.AuthenticationError, "invalid password"),
        ("CROSSSLOT Keys in request", exceptions.ClusterCrossSlotError, "Keys in request"),
        ("OOM command not allowed", exceptions.OutOfMemoryError, "command not allowed"),
        ("ERR syntax error", exceptions.ResponseError, "syntax error"),
        ("WRONGTYPE Operation", exceptions.ResponseError, "WRONGTYPE Operation"),
    ],
)
def test_the_first_word_of_an_error_reply_decides_its_exception(line, kind, text):
    error = parse_error(line)
    assert type(error) is kind
    assert str(error) == text
