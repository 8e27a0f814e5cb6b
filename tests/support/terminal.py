"""A process in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from typing import Self

from .fork_server import ROOT

LEAD = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A process as leader of its own terminal, 40 lines of 123 columns, and everything that it writes."""

    def __init__(self, *command: str, env: dict[str, str]) -> None:
        self._file, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEAD, *command], cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._file, 65536):
                self.written += piece
        except OSError:  # what Linux answers when the other end is closed
            pass

    def type(self, keys: bytes) -> None:
        os.write(self._file, keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._file)
