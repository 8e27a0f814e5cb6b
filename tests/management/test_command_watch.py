"""``manage.py redislock watch``."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.core.management.base import CommandError

from tests.support import wait_until
from tests.support.admin_pages import hold, next_millisecond
from tests.support.managed import MANAGE, environment
from tests.support.processes import ROOT
from tests.support.terminal import Terminal


@pytest.fixture(autouse=True)
def _settings(settings: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DJANGO_REDISLOCK = {"URL": redis_url}
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str) -> str:
    output = io.StringIO()
    call_command("redislock", "watch", "--once", *arguments, stdout=output, stderr=io.StringIO())
    return output.getvalue()


def test_once_as_a_table(client: redis.Redis) -> None:
    lock = hold(client, "invoice:42", label="billing", expire=90)
    next_millisecond(client)
    hold(client, "celery:rebuild", kind="celery")
    summary, heading, first, second = run().splitlines()
    assert summary.strip().endswith("2 held")
    assert heading.split()[:2] == ["NAME", "KIND"]
    assert first.startswith("invoice:42 ")
    for text in ("billing on ", "not renewed"):
        assert text in first
    assert str(lock.fence) not in first
    assert "url" not in first  # the only connection
    assert second.startswith("celery:rebuild ")
    assert "celery:rebuild" not in run("--kind", "lock")


def test_nothing_of_a_name_or_holder_is_cut_in_a_narrow_terminal(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    name, label = (
        "celery:reports.tasks.rebuild_report:" + "5f1c9a" * 8,
        "reports.tasks.rebuild_report[0b6c8f0e-3b60-4a52]",
    )
    hold(client, name, kind="celery", label=label, expire=4000)
    output = run()
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 100
    _, heading, *lines = output.splitlines()
    begins, kind, holder = (heading.index(word) for word in ("NAME", "KIND", "HOLDER"))
    assert "".join(line[begins:kind].strip() for line in lines) == name
    assert "".join(line[holder:].strip() for line in lines).startswith(label[:20])
    assert len(lines) <= 4


def test_an_owner_id_leaves_the_name_its_place(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns the id took all that was left, and neither name nor holder was shown."""
    monkeypatch.setenv("COLUMNS", "80")
    id = str(hold(client, "invoice:42").id)
    _, heading, *lines = run("--id").splitlines()
    for word, text in (("NAME", "invoice:42"), ("ID", id)):
        at = heading.index(f"{word} ")
        assert "".join(line[at:].split("  ")[0].strip() for line in lines) == text


def test_ids_are_shown_only_when_asked_for(client: redis.Redis) -> None:
    id = str(hold(client, "invoice:42").id)
    for form in ("table", "json"):
        assert id not in run("--format", form)
        assert id in run("--format", form, "--id")
    [lock] = json.loads(run("--format", "json"))["locks"]
    assert lock["name"] == "invoice:42"


def test_names_are_no_markup_and_no_escape_sequences(client: redis.Redis) -> None:
    hold(client, "[red]x[/red]\x1b[2J")
    output = run()
    assert r"[red]x[/red]\x1b[2J" in output
    assert "\x1b" not in output


def test_a_connection_that_is_down(settings: Any) -> None:
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    for form in ("table", "json"):
        output = io.StringIO()
        with pytest.raises(CommandError, match="'url' could not be read"):
            call_command("redislock", "watch", "--once", "--format", form, stdout=output, stderr=io.StringIO())
        assert "0 held" not in output.getvalue()


def test_without_rich_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, client: redis.Redis) -> None:
    for name in [name for name in sys.modules if name == "rich" or name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "django_redislock.management.watch_table", raising=False)
    with pytest.raises(CommandError, match=r"pip install 'django-redislock\[watch\]'"):
        run()
    assert json.loads(run("--format", "json"))["locks"] == []


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["watch", "--format", "json", "--interval", "0.1s"], ["list"], ["watch"]])
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_traceback(
    client: redis.Redis, redis_url: str, arguments: list[str]
) -> None:
    for number in range(1000):  # more than fits into a pipe
        hold(client, f"{number} {'x' * 300}")
    env = environment(DJANGO_REDISLOCK={"URL": redis_url})
    env.pop("PYTHONUNBUFFERED", None)  # with it, Python forgets what a pipe did not take, and raises nothing
    command = [*MANAGE, "redislock", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert len(process.stdout.read(100)) == 100
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors
    assert process.returncode in (1, 128 + signal.SIGPIPE)  # rich ends with 1


# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "redislock", "watch", *sys.argv[1:]])
"""


def terminal(*arguments: str) -> Terminal:
    env = os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings", "TERM": "xterm", "LINES": "40"}
    return Terminal(sys.executable, "-c", PROGRAM, *arguments, env=env)


@pytest.mark.processes
def test_live_in_a_terminal_until_interrupted(client: redis.Redis) -> None:
    first = hold(client, "first-lock")
    with terminal("--interval", "0.1s") as shown:
        wait_until(lambda: b"first-lock" in shown.written)
        hold(client, "second-lock")
        wait_until(lambda: b"second-lock" in shown.written)
        first.release()

        def gone() -> bool:
            seen = len(shown.written)
            wait_until(lambda: b"1 held" in shown.written[seen:])
            return b"first-lock" not in shown.written[seen:]

        wait_until(gone)
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(60) == 0


@pytest.mark.processes
def test_of_more_locks_than_the_terminal_has_lines_the_remarks_are_seen(client: redis.Redis) -> None:
    """They were below the table, and what does not fit was cut: nobody learnt that a connection was down."""
    for number in range(60):
        hold(client, f"lock-{number}")
    client.set(hold(client, "odd")._keys.lock, "of another program")
    with terminal() as shown:
        wait_until(lambda: b"60 held" in shown.written and b"no lock wrote: 'odd'" in shown.written)
        wait_until(lambda: b"lock-0" in shown.written)
