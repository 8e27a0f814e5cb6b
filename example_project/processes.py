"""Processes of the demo: each with a log file, in a group of its own, and none left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Failed(Exception):
    """Something did not come about; the message is for people."""


class Process:
    """A process that is started at once and writes into a log file."""

    def __init__(self, name: str, command: Sequence[object], log: Path, pass_fds: Iterable[int] = ()) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as file:
            self._popen = subprocess.Popen(
                [str(part) for part in command],
                cwd=Path(__file__).parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=tuple(pass_fds),
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends the others in order
                preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Wait until the log says `text`; raises Failed when the process ends instead."""

        def said() -> bool:
            if text in self.log.read_text(errors="replace"):
                return True
            if self._popen.poll() is not None:
                raise Failed(f"{self.name} ended with status {self._popen.returncode}:\n{tail(self.log)}")
            return False

        wait_until(said, timeout, f"{self.name} says {text!r}; its log:\n{tail(self.log)}")

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._popen.poll()

    def ask_to_end(self) -> None:
        self._popen.terminate()

    def end(self, grace: float = 8) -> None:
        """Wait until the process has ended by itself, and kill what is left of its group."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(grace)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()


def end_all(processes: Sequence[Process]) -> None:
    """End the processes; the first one, on which the others depend, comes last."""
    for group in (processes[1:], processes[:1]):
        for process in group:
            process.ask_to_end()
        for process in group:
            process.end()


def tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def wait_until(condition: Callable[[], T], timeout: float, what: str) -> T:
    """Return the first true answer of `condition`; raises Failed when there is none within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise Failed(f"Not within {timeout:g} s: {what}")
        time.sleep(0.02)
    return answer


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Make the kernel end this new process when the demo is killed and cannot do it itself (Linux only)."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
