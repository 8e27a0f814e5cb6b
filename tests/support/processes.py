from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, Any

from django_redislock.core.driver import process

from .fork_server import ROOT as ROOT, start_python
from .waiting import freeze, threads_are, wait_until


def say(**values: object) -> None:
    """Print one JSON line for the test that started this process, in one piece: print() writes its end by itself."""
    sys.stdout.write(f"{json.dumps(values)}\n")
    sys.stdout.flush()


class PythonProcess:
    """A Python process of its own that runs a function of a module, or code, with Django set up.

    It talks to the test in JSON lines (`say`); code finds `say` and its arguments as `args`. The test talks to it
    through `send`, one line for one `input()`. Arguments travel as JSON.

    A new one has imported nothing before (see `fork_server`), and has all apps of the settings; others do without the
    admin.
    """

    def __init__(
        self, what: Callable[..., object] | str, *args: object, env: dict[str, str] | None = None, new: bool = False
    ) -> None:
        task = {"code": what} if isinstance(what, str) else {"module": what.__module__, "function": what.__qualname__}
        task_and_arguments = json.dumps(task | {"args": args, "new": new})
        start = partial(start_python, "-m", "tests.support.child", task_and_arguments, new=new)
        self.talk_to(start, env=os.environ | (env or {}))

    def talk_to(self, start: Callable[..., subprocess.Popen[str]], **options: Any) -> None:
        """Start a process that talks in lines, by subprocess.Popen or a function like it."""
        pipe = subprocess.PIPE
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = start(stdin=pipe, stdout=pipe, stderr=self._stderr, text=True, **options)
        self.pid = self._process.pid
        self.lines: list[dict[str, Any]] = []
        """Every line said so far."""
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def wait_for(self, timeout: float = 60, **values: object) -> dict[str, Any]:
        """Return the next line that has these values, skipping others; AssertionError when the process ends without."""

        def found() -> dict[str, Any] | None:
            ended = not self._reader.is_alive()
            while self._seen < len(self.lines):
                line = self.lines[self._seen]
                self._seen += 1
                if values.items() <= line.items():
                    return line
            assert not ended, f"The process ended without {values}; it said {self.lines}\n{self.errors}"
            return None

        line = wait_until(found, timeout, lambda: f"{values} from a process that said {self.lines}\n{self.errors}")
        assert line is not None
        return line

    def send(self, line: str = "") -> None:
        """Answer the process's next `input()`."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def finish(self, timeout: float = 90) -> list[dict[str, Any]]:
        """Wait for the end and return every line said; AssertionError when it failed or left something open."""
        status = self.wait(timeout)
        assert status == 0, f"The process ended with {status}; it said {self.lines}\n{self.errors}"
        assert "ResourceWarning" not in self.errors, self.errors
        return self.lines

    def wait(self, timeout: float = 60) -> int:
        """Wait for the end and return the exit status, negative for a signal."""
        status = self._process.wait(timeout)
        self._reader.join(timeout)
        return status

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def kill(self) -> None:
        """End it with SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        freeze(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and every process that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                pipe.close()


def fork_in_c() -> int:
    """Fork as C code does, uWSGI for example: Python calls no hook in the child, and repairs nothing there.

    A thread of the parent that asks for the GIL at that moment stays in the queue of the child's GIL for ever, because
    no hook makes the GIL anew, and glibc waits for that thread before it wakes those behind it. So the child hangs soon
    after its own threads ask for the GIL, whatever they run: that is Python's limit. A child lets two threads do that
    before it runs a line of the package or of the test; if it hangs there, another one is forked. All that it does
    later has to work, also beside locks that other threads held.
    """
    for _ in range(50):
        read, write = os.pipe()
        child = int(ctypes.PyDLL(None).fork())  # it keeps the GIL, as uWSGI does
        if child < 0:  # else its parent would end every process of this machine
            raise OSError("fork() failed")
        if child == 0:
            try:
                _hand_the_gil_over()
                os.write(write, b"+")
                os.close(read)
                os.close(write)
            except BaseException:
                os._exit(1)
            return 0
        os.close(write)
        with os.fdopen(read, "rb", 0) as said:
            if _has_begun(child, said):
                return child
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    raise AssertionError("fifty children ran no line of the test, because threads of it ask for the GIL")


def _hand_the_gil_over() -> None:
    """Let two threads ask for the GIL in turn, more often than threads of the parent may stand in its queue."""
    turn, turns = 0, threading.active_count() + 20

    def take(mine: int) -> None:
        nonlocal turn
        for number in range(mine, turns, 2):
            while turn != number:
                sum(range(10_000))  # it keeps the GIL, so that the other one has to ask for it
                time.sleep(0.0001)
            turn += 1

    other = threading.Thread(target=take, args=(1,))
    other.start()
    take(0)
    other.join()


def _has_begun(child: int, said: IO[bytes]) -> bool:
    """Whether the child says something. It hangs if all its threads sleep, look after look; on a busy machine they do
    not run, but they do not sleep."""
    looks = 0
    while looks < 5:
        if select.select([said], [], [], 0.05)[0]:
            return bool(said.read(1))
        looks = looks + 1 if threads_are(child, "S") else 0
    return False


def fork_without_our_hook() -> int:
    """Fork as Python does, but without the hook of the package, as if C code had forked."""
    reset_once, process._reset_once = process._reset_once, lambda: None
    try:
        return os.fork()
    finally:
        process._reset_once = reset_once


def in_a_fork(run: Callable[[], object]) -> None:
    """Call the function in a forked child, and in one that has called no hook of the package.

    Fail with its traceback if it raises there.
    """
    for fork in (os.fork, fork_without_our_hook):
        _in_a_child_of(fork, run)


def _in_a_child_of(fork: Callable[[], int], run: Callable[[], object]) -> None:
    read, write = os.pipe()
    child = fork()
    if child == 0:
        try:
            run()
        except BaseException:
            os.write(write, traceback.format_exc()[-4000:].encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        failure = said.read()
    _, status = os.waitpid(child, 0)
    assert not failure, f"a child by {fork.__name__}: {failure}"
    assert status == 0, f"a child by {fork.__name__} ended by signal {os.WTERMSIG(status)}"
