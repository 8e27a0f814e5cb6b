"""``manage.py redislock run``: what it runs, when, and its exit status."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.core.management.base import CommandError

from django_redislock import held_locks, lock
from tests.support.admin_pages import rewrite
from tests.support.managed import Managed

pytestmark = pytest.mark.usefixtures("locks_by_url")


def run(*arguments: str) -> tuple[int, str]:
    """Run it in this process; return the exit status and what it said."""
    said = io.StringIO()
    try:
        call_command("redislock", "run", *arguments, stderr=said)
    except SystemExit as end:
        return int(str(end.code)), said.getvalue()
    except CommandError as error:
        return error.returncode, f"{said.getvalue()}{error}"
    return 0, said.getvalue()


@pytest.mark.parametrize(("command", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill $$", 143)])
def test_the_exit_status_of_the_command_is_passed_on(command: str, status: int) -> None:
    assert run("x", "--", "sh", "-c", command) == (status, "")
    assert list(held_locks()) == []


def test_the_command_gets_the_name_and_the_fence_of_the_lock_that_it_runs_under(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with lock("shop:import") as before:
        fence = before.fence
    assert run("shop:import", "--", "sh", "-c", "echo $REDISLOCK_NAME $REDISLOCK_FENCE")[0] == 0
    name, given = capfd.readouterr().out.split()
    assert name == "shop:import"
    assert int(given) > fence


def test_options_of_the_command_are_not_options_of_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("x", "--timeout", "5s", "--", "echo", "--timeout", "--", "--skip", "-v")[0] == 0
    assert capfd.readouterr().out == "--timeout -- --skip -v\n"


@pytest.mark.parametrize(
    ("options", "label"), [((), "sh -c 'echo on; cat'"), (("--label", "nightly import"), "nightly import")]
)
def test_while_it_runs_the_lock_is_listed_with_its_command_line_or_label(
    manage: Callable[..., Managed], options: tuple[str, ...], label: str
) -> None:
    process = manage("redislock", "run", "import", *options, "--expire", "40s", "--", "sh", "-c", "echo on; cat")
    process.wait_for("on")
    [held] = held_locks()
    assert (held.name, held.kind, held.label, held.pid) == ("import", "command", label, process.pid)
    assert held.expire == 40
    process.end_input()
    assert process.wait() == 0
    assert list(held_locks()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("x",), 2, "Write the command after two hyphens"),
        (("x", "--"), 2, "Write the command after two hyphens"),
        (("x", "--", ""), 2, "Write the command after two hyphens"),
        (("x", "echo", "on"), 1, "write two hyphens before the command: -- echo on"),
        (("", "--", "true"), 2, "name must have 1 to 1000"),
        (("n" * 1001, "--", "true"), 2, "name must have 1 to 1000"),
        (("x", "--skip", "--timeout", "3", "--", "true"), 1, "not allowed with argument --skip"),
        (("x", "--skip", "--no-wait", "--", "true"), 1, "not allowed with argument --skip"),
        (("x", "--timeout", "soon", "--", "true"), 1, "'soon' is not a duration"),
        (("x", "--expire", "0", "--", "true"), 2, "--expire must be between"),
        (("x", "--max-hold", "0", "--", "true"), 2, "--max-hold must be between"),
        (("x", "--keep", "1h", "--", "true"), 2, "--keep needs --once"),
        (("x", "--once", "", "--", "true"), 2, "--once must have 1 to 1000"),
        (("x", "--busy-status", "256", "--", "true"), 1, "'256' is not an exit status"),
        (("x", "--on-loss", "ignore", "--", "true"), 1, "invalid choice: 'ignore'"),
        (("x", "--connection", "nowhere", "--", "true"), 2, "nowhere"),
        (("x", "--", "no-such-command"), 127, "no-such-command: command not found"),
        (("x", "--", "./no-such-file"), 127, "./no-such-file: command not found"),
        (("x", "--", "/etc/passwd"), 126, "/etc/passwd: cannot be executed"),
        (("x", "--", "/etc"), 126, "/etc: cannot be executed"),
    ],
)
def test_bad_input_is_said_before_the_lock_is_taken(
    arguments: tuple[str, ...], status: int, said: str, client: redis.Redis
) -> None:
    found, text = run(*arguments)
    assert (found, said in text) == (status, True), text
    assert client.keys("*") == []


def test_run_runs_a_script_without_an_interpreter_line_by_the_shell(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script"
    script.write_text('echo "$0" "$1"\nexit 3\n')
    script.chmod(0o755)
    assert run("x", "--", str(script), "two words")[0] == 3
    assert capfd.readouterr().out == f"{script} two words\n"  # as with timeout and nohup


def test_run_of_a_program_that_the_system_refuses_has_the_status_of_a_shell(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter")
    program.chmod(0o755)
    assert run("x", "--", str(program))[0] == 127
    assert "No such file" in capfd.readouterr().err
    program.write_text("#!/etc")
    assert run("x", "--", str(program))[0] == 126
    assert list(held_locks()) == []


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--skip",), 0),
        (("--no-wait",), 75),
        (("--timeout", "0.05s"), 75),
        (("--no-wait", "--busy-status", "9"), 9),
    ],
)
def test_while_the_lock_is_held_nothing_is_run_and_the_holder_is_named(
    options: tuple[str, ...], status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with lock("x", label="the other one"):
        found, said = run("x", *options, "--", "echo", "ran")
    assert found == status
    assert "Lock 'x' is held by the other one on " in said
    assert f"pid {os.getpid()}" in said
    assert capfd.readouterr().out == ""


def test_a_waiter_says_for_whom_it_waits_and_runs_when_the_lock_is_free(manage: Callable[..., Managed]) -> None:
    with lock("x", label="the other one"):
        process = manage("redislock", "run", "x", "--", "echo", "ran")
        process.wait_for("Waiting for lock 'x', which is held by the other one on ")
        assert process.out == ""
    assert process.wait() == 0
    assert process.out == "ran\n"
    assert process.err.count("Waiting") == 1


def test_run_says_how_long_the_lock_is_held_as_the_lists_do_and_shows_no_control_characters(
    client: redis.Redis,
) -> None:
    with lock("x", label="\x1b[2J\rnobody") as held:
        rewrite(client, held, younger_by=-548)
        status, said = run("x", "--skip", "--", "true")
    assert status == 0
    assert r"Lock 'x' is held by \x1b[2J\rnobody on " in said
    assert "for 9 min 8 s. The command was not run." in said


def test_it_is_said_again_while_the_wait_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_redislock.run_once.run.REPORT_EVERY", 0.05)
    free = threading.Event()

    def hold() -> None:
        with lock("x", label="the other one"):
            held.set()
            free.wait(30)

    held = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    threading.Timer(0.5, free.set).start()
    status, said = run("x", "--", "true")
    holder.join()
    assert status == 0
    assert said.count("Waiting for lock 'x'") >= 2


def test_a_run_that_succeeded_is_remembered_and_one_that_failed_is_not(
    capfd: pytest.CaptureFixture[str], client: redis.Redis
) -> None:
    assert run("x", "--once", "v1", "--", "sh", "-c", "echo failed; exit 4")[0] == 4
    assert run("x", "--once", "v1", "--keep", "1h", "--", "echo", "first")[0] == 0
    status, said = run("x", "--once", "v1", "--", "echo", "second")
    assert (status, said.startswith("Done already: on ")) == (0, True)
    assert run("x", "--once", "v2", "--", "echo", "other key")[0] == 0
    assert run("y", "--once", "v1", "--", "echo", "other lock")[0] == 0
    assert run("x", "--", "echo", "without a key")[0] == 0
    assert capfd.readouterr().out.splitlines() == ["failed", "first", "other key", "other lock", "without a key"]
    lives = sorted(client.pttl(key) for key in client.keys("*:done:*"))
    assert 3_500_000 < lives[0] <= 3_600_000
    assert 86_300_000 < lives[-1] <= 86_400_000


def test_a_waiter_finds_the_run_done_that_it_waited_for(manage: Callable[..., Managed], tmp_path: Path) -> None:
    count = f"echo ran >> {tmp_path / 'log'}"
    first = manage("redislock", "run", "x", "--once", "v1", "--", "sh", "-c", f"echo on; cat; {count}")
    first.wait_for("on")
    waiters = [manage("redislock", "run", "x", "--once", "v1", "--", "sh", "-c", count) for _ in range(2)]
    for waiter in waiters:
        waiter.wait_for("Waiting")
    first.end_input()
    assert [process.wait() for process in (first, *waiters)] == [0, 0, 0]
    assert ["Done already" in waiter.err for waiter in waiters] == [True, True]
    assert (tmp_path / "log").read_text() == "ran\n"


def test_with_locks_switched_off_the_command_runs_and_that_is_said(
    settings: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    status, said = run("x", "--once", "v1", "--", "echo", "ran")
    assert (status, capfd.readouterr().out) == (0, "ran\n")
    assert "Locks are switched off" in said


def test_in_another_thread_than_the_main_one_it_refuses_to_run() -> None:
    found: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: found.append(run("x", "--", "true")))
    thread.start()
    thread.join()
    assert found == [(1, "'redislock run' handles signals: call it in the main thread.")]


def test_the_signal_handlers_of_the_caller_are_left_as_they_were() -> None:
    import signal

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD]
    before = [signal.getsignal(number) for number in numbers]
    run("x", "--", "true")
    assert [signal.getsignal(number) for number in numbers] == before


def test_without_redis_nothing_is_run(settings: Any, capfd: pytest.CaptureFixture[str]) -> None:
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0", "RETRY_FOR": 0}
    for options in ((), ("--once", "v1"), ("--skip",)):
        status, said = run("x", *options, "--", "echo", "ran")
        assert (status, "The command was not run." in said, ".." in said) == (69, True, False), said
    assert capfd.readouterr().out == ""
