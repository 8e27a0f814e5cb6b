"""``manage.py redislock run``: signals, the terminal, and the end of the whole process group."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from django.core.management import call_command

from django_redislock import held_locks, lock
from django_redislock.core import Lock
from tests.support import wait_until
from tests.support.managed import MANAGE, Managed, environment
from tests.support.terminal import Terminal

pytestmark = pytest.mark.usefixtures("locks_by_url")

# A shell and a process that it started; each says which signal it got.
FAMILY = """
trap 'echo parent $1; exit 5' $1
(trap 'echo child $1; exit' $1; echo on $(sh -c 'echo $PPID'); while :; do sleep 0.05; done) &
while :; do sleep 0.05; done
"""


def names() -> list[str]:
    return [held.name for held in held_locks()]


def family(manage: Callable[..., Managed], trap: str, *options: str) -> tuple[Managed, int]:
    """Start the family; return the process and the id of the command's child."""
    process = manage("redislock", "run", "x", *options, "--", "sh", "-c", FAMILY, "family", trap)
    process.wait_for("on ")
    wait_until(lambda: process.out.endswith("\n"))
    return process, int(process.out.split()[1])


@pytest.mark.parametrize("name", ["HUP", "TERM"])
def test_signals_reach_every_process_of_the_group(manage: Callable[..., Managed], name: str) -> None:
    process, _ = family(manage, name)
    process.process.send_signal(signal.Signals[f"SIG{name}"])
    assert process.wait() == 5
    assert sorted(process.out.splitlines()[1:]) == [f"child {name}", f"parent {name}"]
    assert names() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_ends_the_command_gives_its_status(manage: Callable[..., Managed], number: int) -> None:
    process = manage("redislock", "run", "x", "--", "sh", "-c", "echo on; exec sleep 60")
    process.wait_for("on")
    process.process.send_signal(number)
    assert process.wait() == 128 + number


def test_a_signal_ends_the_wait_for_the_lock(manage: Callable[..., Managed]) -> None:
    with lock("x"):
        process = manage("redislock", "run", "x", "--", "echo", "ran")
        process.wait_for("Waiting")
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
    assert process.out == ""
    with lock("x", timeout=5):
        """Nobody waits in the queue before."""


def test_run_that_gets_a_signal_right_after_it_has_the_lock_releases_it() -> None:
    def interrupt(frame: FrameType, event: str, result: Any) -> None:
        if event == "return" and frame.f_code is Lock.acquire.__code__ and result:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    sys.setprofile(interrupt)
    try:
        with pytest.raises(SystemExit) as ended:
            call_command("redislock", "run", "x", "--", "true")
    finally:
        sys.setprofile(None)
    assert ended.value.code == 143
    assert names() == []


def test_the_lock_is_free_only_when_the_whole_group_has_ended(manage: Callable[..., Managed]) -> None:
    # The command ends at once, and leaves a process that reads the standard input.
    process = manage("redislock", "run", "x", "--", "sh", "-c", "exec 4<&0; cat <&4 & echo $$")
    wait_until(lambda: process.out.endswith("\n"))
    wait_until(lambda: not psutil.pid_exists(int(process.out)))
    assert not lock("x").acquire(timeout=1)
    assert process.process.poll() is None
    process.end_input()
    assert process.wait() == 0
    assert names() == []


def test_run_looks_less_and_less_often_for_the_last_process_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 50:
            fifo.open("w").close()  # the process that reads it ends
        wait(min(seconds, 0.01))

    wait = time.sleep
    monkeypatch.setattr(time, "sleep", pause)
    call_command("redislock", "run", "x", "--", "sh", "-c", f"cat {fifo} &")
    assert pauses[0] < 0.05
    assert pauses[49] >= 0.5, "each look reads what runs on the host"


# It leaves a process in its group whose parent, in a session of its own, never reaps it.
ZOMBIE = """
import os, time
ours, theirs = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.read(ours, 1)  # until the parent has left the group
        os._exit(0)
    os.setsid()
    os.write(theirs, b"x")
    os.close(0), os.close(1), os.close(2)
    time.sleep(600)
print(os.getpgrp(), flush=True)
"""


def test_run_ends_although_the_command_leaves_a_zombie(manage: Callable[..., Managed]) -> None:
    process = manage("redislock", "run", "x", "--", sys.executable, "-c", ZOMBIE)
    try:
        assert process.wait(30) == 0
        group = int(process.out)
        left = [each for each in psutil.process_iter() if _group_of(each) == group]
        assert [each.status() for each in left] == [psutil.STATUS_ZOMBIE]
        assert names() == []
    finally:
        for each in psutil.process_iter():
            if _group_of(each) == int(process.out):
                each.parent().kill()


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


@pytest.mark.parametrize("trap", ["USR1", "TERM"])
def test_kill_9_of_the_parent_ends_the_whole_group(manage: Callable[..., Managed], trap: str) -> None:
    process, child = family(manage, trap, "--grace", "5s")
    [shell] = [
        each for each in psutil.Process(process.pid).children() if each.pid != child and "family" in each.cmdline()
    ]
    process.process.kill()
    wait_until(lambda: not psutil.pid_exists(child) and not shell.is_running())
    wait_until(lambda: f"its command (process group {shell.pid}) was ended" in process.err)


def test_the_command_inherits_open_files_and_no_connection(manage: Callable[..., Managed]) -> None:
    process = manage("redislock", "run", "x", "--", "sh", "-c", "ls -l /proc/self/fd; echo end")
    assert process.wait() == 0
    assert "socket:" not in process.out
    assert "end" in process.out


def terminal(*command: str) -> Terminal:
    env = environment(DJANGO_REDISLOCK={"URL": os.environ["REDISLOCK_TEST_URL"]}) | {"PS1": "$ "}
    return Terminal(*command, env=env)


def test_input_and_size_of_the_terminal_go_through_and_ctrl_c_ends_the_command() -> None:
    script = "stty size; read line; echo got $line; exec sleep 60"
    with terminal(*MANAGE, "redislock", "run", "x", "--", "sh", "-c", script) as shown:
        wait_until(lambda: b"40 123" in shown.written, message=lambda: str(shown.written))
        shown.type(b"hello\n")
        wait_until(lambda: b"got hello" in shown.written, message=lambda: str(shown.written))
        shown.type(b"\x03")
        assert shown.process.wait(60) == 130
    assert names() == []


def test_a_shell_stops_and_continues_the_command_as_one_job() -> None:
    with terminal("sh", "-i") as shown:
        job = " ".join(f"'{part}'" for part in (*MANAGE, "redislock", "run", "x", "--expire", "60s", "--", "cat"))
        wait_until(lambda: b"$ " in shown.written)
        shown.type(f"{job.replace(chr(10), chr(22) + chr(10))}\n".encode())
        wait_until(names)  # or what the terminal echoes stands amid the prompts for the lines of the job
        shown.type(b"one\n")
        wait_until(lambda: shown.written.count(b"one\r\n") >= 2, message=lambda: shown.written.decode())
        shown.type(b"\x1a")
        wait_until(lambda: b"Stopped" in shown.written, message=lambda: shown.written.decode())
        shown.type(b"fg\n")
        shown.type(b"two\n")
        wait_until(lambda: shown.written.count(b"two\r\n") >= 2, message=lambda: shown.written.decode())
        shown.type(b"\x04")
        shown.type(b"echo status $((6 * 7)) $?\n")
        wait_until(lambda: b"status 42 0" in shown.written, message=lambda: shown.written.decode())
    assert names() == []
