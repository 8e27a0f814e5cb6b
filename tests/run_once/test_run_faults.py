"""``manage.py redislock run``: the lock is lost, and Redis goes away."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

import psutil
import pytest
from django.core.management import CommandError, call_command

from django_redislock import LockLost, lock
from django_redislock.run_once.guard import ENDED
from django_redislock.run_once.process_group import HELPER
from django_redislock.run_once.run import _Run
from tests.support import Proxy, RedisServer, freeze, wait_until
from tests.support.managed import MANAGE, Managed, environment
from tests.support.processes import ROOT

UNTIL_TERM = "trap 'echo terminated; exit 0' TERM; echo on; while :; do sleep 0.05; done"
UNTIL_KILL = "trap '' TERM; echo on; while :; do sleep 0.05; done"
UNTIL_INPUT = "echo on; cat; echo done"


def has_ended(command: psutil.Process) -> bool:
    return not command.is_running() or command.status() == psutil.STATUS_ZOMBIE


def start(manage: Callable[..., Managed], script: str, *options: str, **settings: object) -> Managed:
    process = manage("redislock", "run", "x", *options, "--", "sh", "-c", script, **settings)
    process.wait_for("on")
    return process


@pytest.mark.usefixtures("locks_by_url")
def test_a_lost_lock_ends_the_command_with_sigterm(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_TERM, "--expire", "6s", "--once", "v1")
    assert lock("x").reset(by="anna", reason="it hangs")
    assert process.wait() == 74
    assert process.out == "on\nterminated\n"
    assert "Lock 'x' was lost (anna force-released it at " in process.err
    again = manage("redislock", "run", "x", "--once", "v1", "--", "echo", "ran")
    assert again.wait() == 0
    assert again.out == "ran\n"  # the terminated run is not remembered, although it ended with 0


@pytest.mark.usefixtures("locks_by_url")
def test_a_recalled_lock_ends_the_command_and_is_held_until_it_has_ended(manage: Callable[..., Managed]) -> None:
    process = start(manage, "trap '' TERM; echo on; while :; do sleep 0.05; done", "--expire", "3s", "--grace", "1s")
    assert lock("x").recall(by="anna", reason="a deploy")
    with lock("x", timeout=30):
        pids = [int(line) for line in process.out.split() if line.isdecimal()]
        assert not any(map(psutil.pid_exists, pids))
    assert process.wait() == 74
    assert "Lock 'x' was lost (anna asked for it back at " in process.err


@pytest.mark.usefixtures("locks_by_url")
def test_a_command_that_ignores_sigterm_is_killed_when_the_grace_is_over(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_KILL, "--expire", "1s", "--grace", "0.3s")
    lock("x").reset()
    assert process.wait() == 74


@pytest.mark.usefixtures("locks_by_url")
def test_with_warn_the_command_runs_on_and_its_status_counts(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_INPUT, "--expire", "1s", "--on-loss", "warn")
    lock("x").reset()
    process.wait_for("runs on without it")
    process.end_input()
    assert process.wait() == 0
    assert process.out == "on\ndone\n"


@pytest.mark.usefixtures("locks_by_url")
def test_a_lock_is_renewed_for_max_hold_only(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_TERM, "--expire", "3s", "--max-hold", "0.5s")
    assert process.wait() == 74
    assert process.out == "on\nterminated\n"


def test_redis_goes_away_while_the_command_runs(manage: Callable[..., Managed], own_server: RedisServer) -> None:
    process = start(manage, UNTIL_TERM, "--expire", "3s", DJANGO_REDISLOCK={"URL": own_server.url, "RETRY_FOR": 0.2})
    own_server.kill()
    assert process.wait() == 74
    assert process.out == "on\nterminated\n"
    assert "was not renewed in time, so the command was ended before the expiry" in process.err


# It needs most of its grace to stop, and says the time for as long as it runs, also when it is killed.
SLOW_STOP = """
import os, signal, sys, time
def run(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        os.write(1, f"{time.time()}\\n".encode())
        time.sleep(0.05)
def stop(*_):
    run(0.9)
    sys.exit()
signal.signal(signal.SIGTERM, stop)
os.write(1, f"{os.getpid()}\\n".encode())
run(600)
"""


@pytest.mark.parametrize("fault", ["cut off", "parent killed", "parent stopped"])
def test_run_ends_a_command_that_stops_slowly_before_the_next_holder_begins(
    manage: Callable[..., Managed], proxy: Proxy, redis_url: str, fault: str
) -> None:
    options = ("redislock", "run", "x", "--expire", "3s", "--grace", "1.4s", "--", sys.executable, "-c", SLOW_STOP)
    first = manage(*options, DJANGO_REDISLOCK={"URL": proxy.url, "RETRY_FOR": 0.2})
    wait_until(lambda: first.out.count("\n") > 1)
    command = psutil.Process(int(first.out.split()[0]))
    second = manage(*options)
    second.wait_for("Waiting")
    if fault == "cut off":
        proxy.black_hole()
    elif fault == "parent killed":
        first.process.kill()
    else:
        freeze(first.process.pid)
    wait_until(lambda: second.out.count("\n") > 1, message=lambda: second.err)
    wait_until(lambda: has_ended(command))
    assert float(first.out.split()[-1]) <= float(second.out.split()[1])
    if fault == "parent stopped":
        first.process.send_signal(signal.SIGCONT)
        assert first.wait() == 74


@pytest.mark.usefixtures("locks_by_url")
def test_run_says_that_the_command_may_run_beside_the_next_holder_with_a_grace_longer_than_half_of_the_expiry(
    manage: Callable[..., Managed],
) -> None:
    long = manage("redislock", "run", "x", "--expire", "4s", "--grace", "10s", "--", "true")
    assert long.wait() == 0
    assert "beside the next holder for 8.0 s. Give a longer --expire." in long.err
    for options in (("--grace", "10s"), ("--expire", "4s"), ("--expire", "4s", "--grace", "10s", "--on-loss", "warn")):
        quiet = manage("redislock", "run", "x", *options, "--", "true")
        assert (quiet.wait(), quiet.err) == (0, "")


@pytest.mark.usefixtures("locks_by_url")
@pytest.mark.parametrize(("on_loss", "status", "output"), [("warn", 0, "ran\n"), ("terminate", 74, "")])
def test_run_whose_lock_is_lost_before_the_command_begins_does_what_on_loss_says(
    capfd: pytest.CaptureFixture[str], on_loss: str, status: int, output: str
) -> None:
    def depose(frame: FrameType, event: str, result: object) -> None:
        if event == "call" and frame.f_code is _Run._run_command.__code__:
            sys.setprofile(None)
            lock("x").reset()
            with suppress(LockLost):
                frame.f_locals["self"].lock.extend()

    sys.setprofile(depose)
    try:
        call_command("redislock", "run", "x", "--on-loss", on_loss, "--", "echo", "ran")
        found = 0
    except CommandError as error:
        found = error.returncode
    finally:
        sys.setprofile(None)
    assert (found, capfd.readouterr().out) == (status, output)


@pytest.mark.usefixtures("locks_by_url")
def test_a_command_that_cannot_be_watched_is_ended_before_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran on without lock and guard, beside the next one."""
    start_thread, commands = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "redislock run: lock":
            commands.extend(running())
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    def running() -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and "3600" in child.cmdline()]

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        call_command("redislock", "run", "x", "--", "sleep", "3600")
    assert commands
    assert not running()
    assert not lock("x").locked()


def test_a_guard_that_hears_of_the_loss_before_it_knows_the_group_ends_the_group_all_the_same() -> None:
    """It ended itself, and the command ran on without lock."""
    with (
        subprocess.Popen(["sleep", "3600"], process_group=0) as command,
        subprocess.Popen([*HELPER, "guard", "5"], stdin=subprocess.PIPE, start_new_session=True) as guard,
    ):
        assert guard.stdin is not None
        os.write(guard.stdin.fileno(), b"lost\n")
        wait_until(lambda: fcntl.ioctl(guard.stdin, termios.FIONREAD, b"1234") == bytes(4), message="it was read")
        os.write(guard.stdin.fileno(), b"group %d\n" % command.pid)
        try:
            assert command.wait(20) == -signal.SIGTERM
            assert guard.wait(20) == ENDED
        finally:
            command.kill()
            guard.kill()


def test_redis_is_away_when_the_command_ends(manage: Callable[..., Managed], own_server: RedisServer) -> None:
    options = {"DJANGO_REDISLOCK": {"URL": own_server.url, "RETRY_FOR": 0.2}}
    plain = start(manage, UNTIL_INPUT, **options)
    once = manage("redislock", "run", "y", "--once", "v1", "--", "sh", "-c", UNTIL_INPUT, **options)
    once.wait_for("on")
    own_server.kill()
    for process in (plain, once):
        process.end_input()
    assert plain.wait() == 0
    assert "The lock could not be released and ends by its expiry of 30 s" in plain.err
    assert once.wait() == 74
    assert "could not be remembered" in once.err
    assert plain.out == once.out == "on\ndone\n"


def test_redis_goes_away_while_the_command_waits_for_the_lock(
    manage: Callable[..., Managed], own_server: RedisServer
) -> None:
    options = {"DJANGO_REDISLOCK": {"URL": own_server.url, "RETRY_FOR": 0.2}}
    start(manage, UNTIL_INPUT, **options)
    waiter = manage("redislock", "run", "x", "--", "echo", "ran", **options)
    waiter.wait_for("Waiting")
    own_server.kill()
    assert waiter.wait() == 69
    assert waiter.out == ""
    assert "The command was not run." in waiter.err


@pytest.fixture(params=["no reader", "full", "closed"])
def silenced(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str
) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], Path]]]:
    """Start ``redislock run`` with a stderr that cannot be written; return the process and the file of its output."""
    with ExitStack() as stack:

        def start(*arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
            read, write = os.pipe()
            redirect = {"no reader": "", "full": "2>/dev/full", "closed": "2>&-"}[request.param]
            output = tmp_path / "output"
            process = subprocess.Popen(
                ["sh", "-c", f'exec "$@" {redirect}', "sh", *MANAGE, "redislock", "run", "x", *arguments],
                cwd=ROOT,
                env=environment(DJANGO_REDISLOCK={"URL": redis_url}),
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(output.open("wb")),
                stderr=write,
            )
            os.close(write)
            os.close(read)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process, output

        yield start


@pytest.mark.usefixtures("locks_by_url")
def test_run_whose_stderr_cannot_be_written_ends_the_command_when_the_lock_is_lost(
    silenced: Callable[..., tuple[subprocess.Popen[bytes], Path]],
) -> None:
    process, output = silenced("--expire", "6s", "--", "sh", "-c", f"exec 2>/dev/null; {UNTIL_TERM}")
    wait_until(lambda: output.read_text() == "on\n")
    assert lock("x").reset()
    assert process.wait(60) == 74
    assert output.read_text() == "on\nterminated\n"


@pytest.mark.usefixtures("locks_by_url")
def test_run_whose_stderr_cannot_be_written_is_killed_and_a_command_that_ignores_sigterm_ends(
    silenced: Callable[..., tuple[subprocess.Popen[bytes], Path]],
) -> None:
    process, output = silenced("--grace", "0.3s", "--", "sh", "-c", f"echo $$; {UNTIL_KILL}")
    wait_until(lambda: output.read_text().endswith("on\n"))
    command = psutil.Process(int(output.read_text().split()[0]))
    process.kill()
    wait_until(lambda: has_ended(command))


@pytest.mark.usefixtures("locks_by_url")
def test_run_whose_stderr_cannot_be_written_has_the_exit_status_of_a_busy_lock(
    silenced: Callable[..., tuple[subprocess.Popen[bytes], Path]],
) -> None:
    with lock("x"):
        process, output = silenced("--timeout", "0.1s", "--", "echo", "ran")
        assert process.wait(60) == 75
    assert output.read_text() == ""
