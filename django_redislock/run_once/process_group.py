"""A command in a process group of its own, which ends with this process at the latest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .guard import ENDED, LOOK_EVERY, is_alive

LONGEST_PAUSE = 0.5
"""Seconds between two looks at a group that stays for long: each look reads the state of all processes of the host."""
HELPER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]


class ProcessGroup:
    """A command and the processes that it starts.

    The command gets this process's standard streams and, where this process has it, the foreground of the terminal. A
    guard, a process in a session of its own, ends the group when it is told to, when the time is over that it was told
    last, and when this process is killed: SIGTERM and, after the grace, SIGKILL.
    """

    def __init__(self, program: str, command: Sequence[str], environment: Mapping[str, str], grace: float) -> None:
        self._running = True
        self._terminal = Terminal()
        read, write = os.pipe()
        self._pipe = write
        try:
            try:
                self._guard = subprocess.Popen(  # noqa: S603 - no shell
                    [*HELPER, "guard", str(grace)], stdin=read, stdout=subprocess.DEVNULL, start_new_session=True
                )
            finally:
                os.close(read)
            os.set_inheritable(write, True)
            # The command inherits the files that this process has inherited, and none that Python opened.
            self._process = subprocess.Popen(  # noqa: S603 - no shell
                [*HELPER, "start", str(write), program, *command], env=environment, process_group=0, close_fds=False
            )
        except BaseException:
            os.close(write)
            raise
        os.set_inheritable(write, False)
        self.id = self._process.pid
        if all(map(os.isatty, range(3))):  # else a pager may be part of the job: the terminal is lent when it is read
            self._terminal.lend(self.id)

    def send(self, number: int) -> None:
        """Send a signal to the group, if any process of it is left."""
        if self._running:
            with suppress(ProcessLookupError, PermissionError):  # they run as another user
                os.killpg(self.id, number)

    def end_at(self, until: float) -> None:
        """Let the guard end the group at this time of the lock's clock, instead of the time that it was told before."""
        self._tell(f"until {until!r}")

    def end(self) -> None:
        """Let the guard end the group now."""
        self._tell("lost")

    def _tell(self, line: str) -> None:
        try:
            os.write(self._pipe, f"{line}\n".encode())
        except OSError:  # somebody killed the guard, and nobody else would end the command in time
            self.send(signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of the whole group, and return the command's exit status as a shell does: 128 + n for signal
        n."""
        while True:
            _, status = os.waitpid(self.id, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            self._on_stop(os.WSTOPSIG(status))
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        pause = LOOK_EVERY
        while is_alive(self.id):
            with suppress(ChildProcessError):  # process 1 of a container inherits the orphans
                os.waitpid(-self.id, os.WNOHANG)
            time.sleep(pause)
            pause = min(1.1 * pause, LONGEST_PAUSE)
        self._running = False
        self._terminal.take_back()
        return code if code >= 0 else 128 - code

    def close(self) -> bool:
        """Dismiss the guard, and return whether it has ended the group before its time.

        If an error ended the wait for the group, the guard ends the group, or the command would run on without lock.
        """
        self._terminal.close()
        if self._running:
            self.end()
        else:
            with suppress(BrokenPipeError):  # it has ended the group, or somebody killed it
                os.write(self._pipe, b"done\n")
        os.close(self._pipe)
        has_ended = self._guard.wait() == ENDED
        if self._running:
            self.send(signal.SIGKILL)  # the guard has done it, unless somebody killed the guard
            self._process.wait()
        return has_ended and not self._running

    def _on_stop(self, number: int) -> None:
        """Do what the shell expects when the command was stopped, because this process is part of the job control."""
        wants_terminal = number in (signal.SIGTTIN, signal.SIGTTOU)
        if wants_terminal and self._terminal.lend(self.id):
            self.send(signal.SIGCONT)
        elif wants_terminal or self._terminal.lent:
            lent = self._terminal.lent
            self._terminal.take_back()
            os.killpg(0, signal.SIGSTOP)  # until the shell continues the job, in the foreground or in the background
            if lent:
                self._terminal.lend(self.id)
            self.send(signal.SIGCONT)


class Terminal:
    """The controlling terminal, if there is one: its foreground is lent to the command."""

    def __init__(self) -> None:
        self.lent = 0
        """The process group that has the foreground."""
        try:
            self._file: int | None = os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY)
        except OSError:
            self._file = None

    def lend(self, group: int) -> bool:
        """Put the group into the foreground, if this process is there."""
        if self._file is None:
            return False
        with suppress(OSError):  # the terminal is gone
            if os.tcgetpgrp(self._file) == os.getpgrp():
                os.tcsetpgrp(self._file, group)
                self.lent = group
                return True
        return False

    def take_back(self) -> None:
        """Take the foreground back, if the group still has it."""
        if self._file is None or not self.lent:
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # sent to a background process that does it
        with suppress(OSError):
            if os.tcgetpgrp(self._file) == self.lent:
                os.tcsetpgrp(self._file, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.lent = 0

    def close(self) -> None:
        """Take the foreground back, and close its file."""
        self.take_back()
        if self._file is not None:
            os.close(self._file)
