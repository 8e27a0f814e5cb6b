"""The snippets of docs/run-once.rst and docs/howto.rst, as printed."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from typing import Any

import django
import pytest
from celery import Celery, _state
from celery.utils.imports import symbol_by_name

from django_redislock import held_locks, lock
from django_redislock.celery import SingleInstanceMixin
from django_redislock.management.commands.redislock import Command
from tests.support import wait_until
from tests.support.processes import ROOT

pytestmark = pytest.mark.usefixtures("locks_by_url")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.rst").read_text()
    found = re.findall(rf"\.\. code-block:: {language}\n\n((?:    .*\n|\n)+)", text)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


def block(page: str, word: str) -> str:
    [found] = [each for each in blocks(page, "python") if word in each]
    return found


def lines(page: str) -> list[list[str]]:
    return [
        shlex.split(line.removeprefix("$ "))
        for each in blocks(page, "console")
        for line in each.splitlines()
        if line.startswith("$ ") and "NAME [options]" not in line
    ]


@pytest.mark.parametrize("page", ["run-once", "howto"])
def test_every_command_line_is_understood(page: str) -> None:
    seen = 0
    for words in lines(page):
        if "redislock" in words:
            arguments = words[words.index("redislock") + 1 :]
            parsed = Command().create_parser("manage.py", "redislock").parse_args(arguments)
            assert parsed.command == arguments[arguments.index("--") + 1 :] != []
        else:
            assert words[:2] == ["celery", "-A"]
            if "DatabaseScheduler" not in words[words.index("--scheduler") + 1]:  # it needs its app installed
                assert symbol_by_name(words[words.index("--scheduler") + 1]).__name__ == "PersistentScheduler"
        seen += 1
    assert seen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_consumer_runs_in_one_thread_at_a_time_and_is_elected_again() -> None:
    handled: list[tuple[str, int]] = []
    running = threading.Semaphore(1)
    go_on = threading.Event()

    def feed() -> Iterator[str]:
        assert running.acquire(blocking=False), "two consumers"
        try:
            for number in range(2):
                yield f"message {number}"
                wait_until(go_on.is_set)
        finally:
            running.release()
        raise SystemExit  # ends the thread of the snippet

    names: dict[str, Any] = {"feed": feed, "handle": lambda message, fence: handled.append((message, fence))}
    exec(block("howto", "post_fork"), names)
    for _ in range(2):
        names["post_fork"](None, None)
    wait_until(lambda: handled)
    wait_until(lambda: [held.waiting for held in held_locks()] == [1])
    assert len(handled) == 1
    go_on.set()
    wait_until(lambda: len(handled) == 4)
    assert len({fence for _, fence in handled}) == 2
    wait_until(lambda: not any("(consume)" in thread.name for thread in threading.enumerate()))


def test_the_task_is_a_single_instance_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    monkeypatch.setattr(_state._tls, "current_app", None)  # afterwards, that of other tests again
    with Celery("howto", broker="memory://"):
        exec(block("howto", "send_invoice"), names)
        assert names["send_invoice"].run(3) == "sent 3"
        assert isinstance(names["send_invoice"], SingleInstanceMixin)


def test_the_blocks_of_a_leader_run_as_printed() -> None:
    handled = []
    names: dict[str, Any] = {}
    exec(block("run-once", "with leader("), names)
    names["lead"](["a"], lambda message, fence: handled.append(message))
    assert handled == ["a"]


def test_the_candidate_starts_and_stops_as_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import signal

    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    candidate = threading.Thread(target=exec, args=(block("run-once", "candidate.run()"), {}))
    candidate.start()
    written: list[str] = []
    wait_until(lambda: written.append(capsys.readouterr().out) or "leads" in written[-1])
    handlers[signal.SIGTERM]()
    candidate.join()
    assert capsys.readouterr().out == "it leads no longer\n"


def test_the_locked_command_and_the_scheduler_run_as_printed() -> None:
    from django.core.management import call_command
    from django.core.management.base import CommandError

    saved: list[str] = []
    names: dict[str, Any] = {"rows_of": lambda source: [source], "save": saved.append, "__name__": "snippet"}
    exec(block("run-once", "LockedCommand"), names)
    call_command(names["Command"](), "prices")
    with lock("import:prices"), pytest.raises(CommandError, match="import:prices"):
        call_command(names["Command"](), "prices")
    assert saved == ["prices"]
    exec(block("run-once", "ReportScheduler"), names)
    assert names["ReportScheduler"].lock_name == "beat of the reports"


@pytest.mark.skipif(django.VERSION < (6, 0), reason="Django has tasks from 6.0 on")
def test_the_task_of_django_is_made_as_printed() -> None:
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(block("run-once", "django.tasks"), names)
    assert names["export"].call(3) is None
