"""``manage.py redislock``."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.core.management.base import CommandError

from django_redislock import inventory, lock as make_lock
from django_redislock.core import Lock
from django_redislock.management.commands.redislock import seconds
from django_redislock.signals import lock_force_released
from tests.support import RedisServer, Server
from tests.support.admin_pages import held, hold, next_millisecond
from tests.support.managed import Managed

pytestmark = pytest.mark.usefixtures("locks_by_url")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    def type_(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    type_("")
    return type_


def run(*arguments: str) -> str:
    output = io.StringIO()
    call_command("redislock", *arguments, stdout=output, stderr=io.StringIO())
    return output.getvalue()


def run_json(*arguments: str) -> list[dict[str, Any]]:
    return json.loads(run(*arguments, "--format", "json"))


# list


def test_list(client: redis.Redis) -> None:
    lock = hold(client, "invoice:42", label="billing", expire=90)
    next_millisecond(client)
    hold(client, "celery:rebuild:1", kind="celery", auto_renewal=True).release()
    hold(client, "celery:rebuild:2", kind="celery")
    heading, first, second = run("list").splitlines()
    assert heading.split()[:2] == ["NAME", "KIND"]
    assert first.startswith("invoice:42 ")
    for text in ("billing on ", str(lock.fence), "1 min", "not renewed", "url"):
        assert text in first
    assert second.startswith("celery:rebuild:2 ")

    found, _ = run_json("list")
    info = lock.owner()
    assert info is not None
    assert (found["name"], found["connection"], found["fence"]) == ("invoice:42", "url", lock.fence)
    assert found["acquired_at"] == info.acquired_at.isoformat()
    assert 80 < found["ttl"] <= 90
    assert found["auto_renewal"] is False


def test_ids_are_shown_only_when_asked_for(client: redis.Redis) -> None:
    id = str(hold(client, "a").id)
    for arguments in (["list"], ["show", "a"]):
        for form in ("table", "json"):
            assert id not in run(*arguments, "--format", form)
            assert id in run(*arguments, "--format", form, "--id")


def test_nothing_held() -> None:
    assert (run("list"), run_json("list")) == ("No held locks found.\n", [])


def test_filters(client: redis.Redis) -> None:
    hold(client, "a", kind="lock")
    hold(client, "b", kind="cache")
    assert [lock["name"] for lock in run_json("list", "--kind", "cache")] == ["b"]
    assert [lock["name"] for lock in run_json("list", "--connection", "url")] == ["a", "b"]
    assert run_json("list", "--older-than", "1h") == []
    next_millisecond(client)
    assert len(run_json("list", "--older-than", "0.001")) == 2


def test_no_escape_sequence_reaches_the_terminal(client: redis.Redis) -> None:
    lock = hold(client, "\x1b[2Jgone\n", label="\x1b[2J", kind="\x1b[2J")
    id, _, rest = client.get(lock._keys.lock).partition(b"\n")
    client.set(lock._keys.lock, id + b"\x1b[2J\n" + rest)  # another program may write anything
    for output in (run("list", "--id"), run("show", "\x1b[2Jgone\n", "--id")):
        assert "\x1b" not in output
        assert r"\x1b[2Jgone\n" in output
    assert run_json("list")[0]["name"] == "\x1b[2Jgone\n"


def test_durations() -> None:
    given = {"90": 90, "90s": 90, "5m": 300, "1.5h": 5400, "2d": 172800, "0": 0}
    assert {text: seconds(text) for text in given} == given
    for text in ("", "m", "5 m", "5x", "-5m", "nan", "inf", "1e3", "五"):
        with pytest.raises(CommandError, match="not a duration"):
            run("list", f"--older-than={text}")


def test_a_list_that_is_cut_says_so(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "LIMIT", 2)
    for name in "abc":
        hold(client, name)
    output, errors = io.StringIO(), io.StringIO()
    call_command("redislock", "list", "--format", "json", stdout=output, stderr=errors)
    assert len(json.loads(output.getvalue())) == 2
    assert "more than 2 locks" in errors.getvalue()
    for form, written in (("table", ""), ("json", "[]\n")):
        output, errors = io.StringIO(), io.StringIO()
        # The one that hangs for hours may be behind those that were read: "No held locks found." was no answer.
        with pytest.raises(CommandError, match="one of the others may") as unknown:
            call_command("redislock", "list", "--older-than=1h", "--format", form, stdout=output, stderr=errors)
        assert (unknown.value.returncode, output.getvalue()) == (1, written)
        assert "more than 2 locks" in errors.getvalue()


# show


def test_show(client: redis.Redis) -> None:
    lock = hold(client, "invoice:42", label="billing")
    output = run("show", "invoice:42")
    for text in ("invoice:42", "billing", str(lock.fence), "not renewed", "waiting     0"):
        assert text in output
    assert run_json("show", "invoice:42")[0]["label"] == "billing"
    assert run_json("show", "invoice:42")[0]["queue"] == []


def test_show_names_those_who_wait_with_host_process_and_time(client: redis.Redis, listen: Callable[..., None]) -> None:
    channels = [f"redislock:wake:0:{pid}:web%1b" for pid in range(7, 30)]
    listen(*channels)
    queue = hold(client, "a")._keys.queue
    for number, channel in enumerate(channels):
        client.zadd(queue, {f"{channel}\n1": (client.time()[0] - 90) * 1_000_000 + number})
    [line] = [line for line in run("show", "a").splitlines() if line.startswith("waiting")]
    assert re.match(r"waiting     23: web\\x1b pid 7 for 1 min 3\d s, web\\x1b pid 8 for ", line)
    assert line.endswith(", …")
    first = run_json("show", "a")[0]["queue"][0]
    assert (first["host"], first["pid"]) == ("web\x1b", 7)
    assert 90 <= first["seconds"] < 120


def test_a_name_that_nobody_holds_or_that_no_lock_can_have() -> None:
    for arguments in (["show", "nothing"], ["release", "nothing", "--yes"]):
        with pytest.raises(CommandError, match="The lock 'nothing' is not held now"):
            run(*arguments)
    with pytest.raises(CommandError, match="1 to 1000 bytes"):
        run("show", "x" * 1001)


# release


def test_release_after_yes(client: redis.Redis, answers: Any) -> None:
    lock = hold(client, "stuck", label="nightly[7]")
    answers("y\n")
    errors = io.StringIO()
    output = io.StringIO()
    call_command("redislock", "release", "stuck", stdout=output, stderr=errors)
    assert not held(client, "stuck")
    assert output.getvalue() == "Released stuck.\n"
    for text in ("stuck", "nightly[7]", str(lock.fence), "The holder is not stopped", "[y/N]"):
        assert text in errors.getvalue()


def test_release_is_refused_without_a_yes_and_a_dry_run_releases_nothing(client: redis.Redis, answers: Any) -> None:
    hold(client, "stuck")
    for answer in ("", "\n", "n\n", "no\n", "yesterday\n"):
        answers(answer)
        with pytest.raises(CommandError, match="Not confirmed") as error:
            run("release", "stuck")
        assert error.value.returncode == 1
    assert "nothing was released" in run("release", "stuck", "--dry-run", "--yes")
    assert held(client, "stuck")


def test_release_of_a_certain_id(client: redis.Redis, answers: Any) -> None:
    lock = hold(client, "stuck")
    for id in ("other", str(lock.id)[:6], ""):
        with pytest.raises(CommandError, match="held by another id"):
            run("release", "stuck", "--id", id, "--yes")
    assert lock.owned()
    run("release", "stuck", "--id", str(lock.id), "--yes")
    assert not held(client, "stuck")


def test_release_leaves_a_later_holder_alone(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hold(client, "stuck")

    class Slow(io.StringIO):
        def readline(self, *args: Any) -> str:
            first.release()
            hold(client, "stuck")
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Slow())
    with pytest.raises(CommandError, match="holder changed or the lock ended"):
        run("release", "stuck")
    assert held(client, "stuck")


def test_who_released_is_told(client: redis.Redis, answers: Any, caplog: pytest.LogCaptureFixture) -> None:
    received: list[dict[str, Any]] = []

    def receive(**data: Any) -> None:
        received.append(data)

    lock = hold(client, "stuck")
    lock_force_released.connect(receive)
    try:
        with caplog.at_level(logging.INFO, "django_redislock"):
            run("release", "stuck", "--yes")
    finally:
        lock_force_released.disconnect(receive)
    assert not held(client, "stuck")
    [record] = [record for record in caplog.records if "'stuck'" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "command line" in record.getMessage()
    assert str(lock.id) not in record.getMessage()
    [data] = received
    assert data["name"] == "stuck"
    assert data["fence"] == lock.fence
    assert data["user"].startswith("command line")


def test_a_user_without_a_name_may_release(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user id is in no list."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    hold(client, "stuck")
    run("release", "stuck", "--yes")
    assert not held(client, "stuck")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stuck"], "It is unknown whether the lock was released"),
        (["--task", "shop.build"], "Released 0 locks, then Redis failed"),
    ],
)
def test_a_release_that_redis_does_not_answer_says_what_is_known(
    own_server: RedisServer, settings: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": own_server.url, "RETRY_FOR": 0.2}

    class Late(io.StringIO):
        def readline(self, size: int = -1) -> str:
            own_server.kill()
            return "y\n"

    with own_server.client() as client:
        hold(client, "stuck", auto_renewal=False)
        hold(client, "celery:shop.build:1", kind="celery", label="shop.build[1]", auto_renewal=False)
    monkeypatch.setattr(sys, "stdin", Late())
    with pytest.raises(CommandError, match=message):
        run("release", *arguments)


# Connections


def test_an_unknown_connection() -> None:
    for arguments in (["list"], ["show", "a"], ["release", "a"]):
        with pytest.raises(CommandError, match=r"no connection 'elsewhere'\. The connections are: url"):
            run(*arguments, "--connection", "elsewhere")


def test_a_connection_that_only_using_names(settings: Any, server: Server) -> None:
    """``redislock run --connection sessions`` takes a lock there, which could be neither shown nor released."""
    stock = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": server.url_of_db(1)}
    memory = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    settings.CACHES = settings.CACHES | {"sessions": stock, "memory": memory}
    assert make_lock("nightly", using="sessions").acquire()
    for action in (["list"], ["show", "nightly"], ["release", "nightly", "--yes"], ["doctor"]):
        assert ("sessions" if action == ["doctor"] else "nightly") in run(*action, "--connection", "sessions")
    assert not make_lock("nightly", using="sessions").locked()
    with pytest.raises(CommandError, match="There is no connection 'memory'"):
        run("list", "--connection", "memory")


def test_a_lock_on_two_connections(client: redis.Redis, settings: Any, server: Server, answers: Any) -> None:
    other = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": server.url_of_db(1)}
    settings.CACHES = settings.CACHES | {"other": other}
    with redis.Redis.from_url(server.url_of_db(1)) as second:
        second.flushdb()
        here = hold(client, "stuck")
        there = hold(second, "stuck")
        assert {lock["connection"] for lock in run_json("list")} == {"url", "other"}
        assert len(run_json("show", "stuck")) == 2
        with pytest.raises(CommandError, match="--connection"):
            run("release", "stuck", "--yes")
        run("release", "stuck", "--yes", "--connection", "other")
        assert here.owned()
        assert not there.owned()


@pytest.mark.processes
def test_a_connection_that_is_down(client: redis.Redis, settings: Any, own_server: RedisServer, answers: Any) -> None:
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": own_server.url}
    settings.CACHES = settings.CACHES | {"second": cache}
    hold(client, "near")
    own_server.kill()
    output = io.StringIO()
    with pytest.raises(CommandError, match="'second' could not be read"):
        call_command("redislock", "list", "--format", "json", stdout=output)
    assert [lock["name"] for lock in json.loads(output.getvalue())] == ["near"]
    with pytest.raises(CommandError, match="'second' could not be read"):
        run("show", "far")
    with pytest.raises(CommandError, match="'second' could not be read"):
        call_command("redislock", "show", "near", stdout=output)
    assert "name        near" in output.getvalue()
    errors = io.StringIO()
    call_command("redislock", "release", "near", "--yes", stdout=output, stderr=errors)
    assert "'second' could not be read" in errors.getvalue()
    assert not held(client, "near")


@pytest.mark.parametrize(
    ("raw", "message"), [({"EXPIRES": 1}, "EXPIRES"), ({"ENABLED": False}, "switched off"), ([], "must be a dict")]
)
def test_settings_in_the_way(settings: Any, raw: Any, message: str) -> None:
    settings.DJANGO_REDISLOCK = raw
    for arguments in (["list"], ["show", "a"], ["release", "a", "--yes"]):
        with pytest.raises(CommandError, match=message):
            run(*arguments)


def test_nothing_read_is_no_empty_list(settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    for form in ("table", "json"):
        output = io.StringIO()
        with pytest.raises(CommandError, match="'url' could not be read"):
            call_command("redislock", "list", "--format", form, stdout=output)
        assert output.getvalue() == ""


def test_djangos_own_options_may_follow_the_action(client: redis.Redis) -> None:
    hold(client, "a")
    for option in ("--no-color", "--settings=tests.settings", "--traceback", "--skip-checks"):
        assert "a " in run("list", option)


# As a process


@pytest.mark.processes
def test_exit_status_and_streams(client: redis.Redis) -> None:
    hold(client, "stuck")

    def manage(*arguments: str, input: str = "") -> tuple[int, str]:
        with closing(Managed("redislock", *arguments)) as process:
            process.process.stdin.write(input.encode())
            process.end_input()
            return process.wait(), process.out

    status, listed = manage("list", "--format", "json")
    assert status == 0
    assert json.loads(listed)[0]["name"] == "stuck"
    assert manage("show", "nothing")[0] == 1
    assert manage("release", "stuck", input="n\n") == (1, "")
    assert Lock(client, "stuck").locked()
    assert manage("release", "stuck", input="y\n")[0] == 0
    assert manage("release", "stuck", "--yes")[0] == 1
    assert manage()[0] == 2


def test_a_key_that_no_lock_wrote_is_named_and_the_other_locks_are_listed(client: redis.Redis) -> None:
    hold(client, "good")
    client.set(hold(client, "bad")._keys.lock, "of another program")
    output, errors = io.StringIO(), io.StringIO()
    call_command("redislock", "list", stdout=output, stderr=errors)
    assert "good" in output.getvalue()
    assert errors.getvalue().strip() == "Connection 'url' has 1 lock whose value no lock wrote: 'bad'."
    (line,) = run("watch", "--once", "--format", "json").splitlines()
    assert json.loads(line)["foreign"] == {"url": ["bad"]}
