"""``manage.py redislock doctor``."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.core.management.base import CommandError

from django_redislock.core.listing import contention
from tests.support import RedisServer

pytestmark = pytest.mark.usefixtures("locks_by_url")

CHECKS = [
    "connection",
    "version",
    "eviction",
    "persistence",
    "replicas",
    "round trip",
    "clock",
    "socket timeout",
    "acquire",
    "renew",
    "release",
    "wait",
    "many locks",
]


def doctor(*arguments: str) -> tuple[str, int]:
    """Return what it wrote and its exit status."""
    output = io.StringIO()
    try:
        call_command("redislock", "doctor", *arguments, stdout=output, stderr=io.StringIO(), no_color=True)
    except CommandError as error:
        return output.getvalue(), error.returncode
    return output.getvalue(), 0


def findings(*arguments: str) -> tuple[dict[str, dict[str, str]], int]:
    """Return what it found on the connection of the URL, by check."""
    output, status = doctor("--connection", "url", "--format", "json", *arguments)
    return {finding["check"]: finding for finding in json.loads(output)}, status


@contextmanager
def configured(client: redis.Redis, **options: str) -> Iterator[None]:
    """Change the server's configuration for a while."""
    names = {name.replace("_", "-"): value for name, value in options.items()}
    before = {name: client.config_get(name)[name] for name in names}
    for name, value in names.items():
        client.config_set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            client.config_set(name, value)


def test_a_good_server(client: redis.Redis) -> None:
    with configured(client, appendonly="yes"):
        found, status = findings()
    assert status == 0
    assert list(found) == CHECKS
    # How far away a busy machine is, is another matter.
    assert {name for name, finding in found.items() if finding["status"] != "ok"} <= {"round trip"}
    assert {finding["connection"] for finding in found.values()} == {"url"}
    assert client.keys("*:lock:*") == []
    assert client.keys("*:queue:*") == []
    assert contention(client).names == {}, "a trial is no wait of the site"
    assert sum(minute.waits for minute in contention(client).minutes) == 0


def test_one_line_for_each_finding(client: redis.Redis) -> None:
    output, status = doctor()
    *lines, last = output.splitlines()
    assert status == 0
    assert len(lines) == len(CHECKS)
    assert last.startswith("ok       default  cache: A value was computed")
    assert lines[0].startswith("ok       url  connection: ")
    assert lines[3].startswith("advice   url  persistence: ")


def test_whatever_is_not_ok_comes_with_advice(client: redis.Redis) -> None:
    with configured(client, maxmemory="500mb", maxmemory_policy="allkeys-lru"):
        found, status = findings()
    assert status == 1
    assert found["eviction"]["status"] == "problem"
    assert "noeviction" in found["eviction"]["advice"]
    assert "right to compute" not in found["eviction"]["advice"]
    assert all(bool(finding["advice"]) == (finding["status"] != "ok") for finding in found.values())
    with configured(client, maxmemory_policy="allkeys-lru"):
        assert findings()[0]["eviction"]["status"] == "ok", "without a limit nothing is evicted"


def test_a_server_that_cannot_be_reached(settings: Any) -> None:
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    found, status = findings()
    assert status == 1
    assert found["connection"]["status"] == "problem"
    assert found["connection"]["advice"]
    assert list(found) == ["connection"]  # once
    assert "refused. Start it" in doctor("--connection", "url")[0]


def test_the_caches_of_a_server_that_is_gone_are_not_tried(settings: Any) -> None:
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
    settings.CACHES = {"default": cache, "other": cache}
    settings.DJANGO_REDISLOCK = {}
    output, status = doctor()
    assert status == 1
    assert [line.split()[:3] for line in output.splitlines()] == [["problem", "default", "connection:"]]


def test_a_cache_that_keeps_nothing_is_a_problem(settings: Any, redis_url: str) -> None:
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": redis_url, "TIMEOUT": 0}
    settings.CACHES = {"default": cache | {"OPTIONS": {"LOCK": {"EXPIRE": "no"}}}}
    output, status = doctor("--connection", "default")
    assert status == 1
    assert "CACHES['default']['OPTIONS']['LOCK']['EXPIRE'] is 'no'" in output


def test_an_alias_that_is_no_redis(settings: Any) -> None:
    settings.CACHES = settings.CACHES | {"memory": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    settings.DJANGO_REDISLOCK = {"CACHE_ALIAS": "memory"}
    found, status = findings("--connection", "memory")
    assert status == 1
    assert found["settings"]["status"] == "problem"


def test_a_socket_timeout_longer_than_the_life_of_a_lock(settings: Any, redis_url: str) -> None:
    settings.DJANGO_REDISLOCK = {"URL": f"{redis_url}?socket_timeout=40", "EXPIRE": 30}
    found, status = findings()
    assert status == 1
    assert found["socket timeout"]["status"] == "problem"
    assert "socket_timeout" in found["socket timeout"]["advice"]


@pytest.fixture
def restricted(own_server: RedisServer, settings: Any) -> Any:
    """Return a function that lets the locks log in as a user of these rules."""

    def restrict(*rules: str) -> None:
        with own_server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules)
        settings.DJANGO_REDISLOCK = {"URL": own_server.url.replace("//", "//app:secret@")}

    return restrict


@pytest.mark.processes
def test_a_user_without_permissions(restricted: Any) -> None:
    restricted("~*", "&*", "+@read", "+@connection")
    found, status = findings()
    assert status == 1
    assert "redislock doctor --acl" in found["permissions (acquire)"]["advice"]
    assert found["permissions (INFO)"]["status"] == "advice"


@pytest.mark.processes
def test_a_user_who_may_not_subscribe(restricted: Any) -> None:
    restricted("~*", "resetchannels", "+@all")
    found, status = findings()
    assert status == 0
    assert found["permissions (wait)"]["status"] == "advice"
    assert "redislock doctor --acl" in found["permissions (wait)"]["advice"]


@pytest.mark.processes
def test_every_connection_is_examined(own_server: RedisServer, settings: Any, client: redis.Redis) -> None:
    second = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": own_server.url}
    settings.CACHES = settings.CACHES | {"second": second}
    own_server.kill()
    output, status = doctor("--format", "json")
    assert status == 1
    by_connection = {finding["connection"]: finding["status"] for finding in json.loads(output)}
    assert by_connection["second"] == "problem"
    assert by_connection["url"] == "ok"
    assert findings()[1] == 0
