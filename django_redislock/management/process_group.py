"""A command in a process group of its own, which ends with this process at the latest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

HELPER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]


class ProcessGroup:
    """A command and the processes that it starts.

    The command gets this process's standard streams and, where this process has it, the foreground of the terminal. A
    guard, a process in a session of its own, ends the group when this process is killed.
    """

    def __init__(self, program: str, command: Sequence[str], environment: Mapping[str, str], grace: float) -> None:
        self.grace = grace
        self._kill: threading.Timer | None = None
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

    def send(self, number: int) -> bool:
        """Send a signal to the group, and return whether any process of it is left; 0 sends nothing."""
        if not self._running:
            return False
        try:
            os.killpg(self.id, number)
        except ProcessLookupError:
            return False
        except PermissionError:  # they run as another user, or only wait to be reaped (macOS)
            pass
        return True

    def terminate(self) -> None:
        """Send SIGTERM now, and SIGKILL when the grace is over; from any thread."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # a stopped process gets SIGTERM only when it goes on
        self._kill = threading.Timer(self.grace, self.send, (signal.SIGKILL,))
        self._kill.daemon = True
        self._kill.start()

    def wait(self) -> int:
        """Wait for the end of the whole group, and return the command's exit status as a shell does: 128 + n for signal
        n."""
        while True:
            _, status = os.waitpid(self.id, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            self._on_stop(os.WSTOPSIG(status))
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        while self.send(0):
            with suppress(ChildProcessError):  # process 1 of a container inherits the orphans
                os.waitpid(-self.id, os.WNOHANG)
            time.sleep(0.02)
        self._running = False
        self._terminal.take_back()
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """Dismiss the guard after the end of the group."""
        self._terminal.close()
        if self._kill is not None:
            self._kill.cancel()
        with suppress(BrokenPipeError):  # somebody killed it
            os.write(self._pipe, b"done\n")
        os.close(self._pipe)
        self._guard.wait()

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
        """Close its file."""
        if self._file is not None:
            os.close(self._file)
