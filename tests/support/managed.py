from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from .fork_server import start_python
from .waiting import wait_until

# A shell that starts the tests in the background makes them ignore Ctrl-C; nohup makes them ignore SIGHUP.
PROGRAM = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from django.conf import settings
for name, value in json.loads(os.environ["SETTINGS_OF_TEST"]).items():
    setattr(settings, name, value)
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", *sys.argv[1:]])
"""
MANAGE = (sys.executable, "-c", PROGRAM)


def environment(**settings: Any) -> dict[str, str]:
    """Return the environment of a management command with these settings."""
    settings = {
        "INSTALLED_APPS": ["django_redislock"],
        "ROOT_URLCONF": None,
    } | settings  # without an admin it starts sooner
    return os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings", "SETTINGS_OF_TEST": json.dumps(settings)}


class Managed:
    """A process of ``manage.py`` with these arguments, and what it writes."""

    def __init__(self, *arguments: str, stdin: int = subprocess.PIPE, **settings: Any) -> None:
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        out, err = self._files
        self.process = start_python(
            *MANAGE[1:], *arguments, env=environment(**settings), stdin=stdin, stdout=out, stderr=err
        )
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        return self._read(0)

    @property
    def err(self) -> str:
        return self._read(1)

    def _read(self, number: int) -> str:
        size = os.fstat(self._files[number].fileno()).st_size
        return os.pread(self._files[number].fileno(), size, 0).decode()

    def wait_for(self, text: str) -> None:
        """Wait until it has written the text to stdout or stderr."""

        def written() -> bool:
            ended = self.process.poll() is not None
            found = text in self.out + self.err
            assert found or not ended, f"It ended without {text!r}:\n{self.out}\n{self.err}"
            return found

        wait_until(written, message=lambda: f"{text!r} in:\n{self.out}\n{self.err}")

    def wait_for_output(self, text: str) -> None:
        """Wait until the text is in its stdout, whether it has ended or not."""
        wait_until(lambda: text in self.out, message=lambda: f"{text!r} in:\n{self.out}\n{self.err}")

    def end_input(self) -> None:
        """Close its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self, timeout: float = 60) -> int:
        """Return its exit status, negative for a signal."""
        return self.process.wait(timeout)

    def close(self) -> None:
        """End it, and with it the command."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for file in (*self._files, self.process.stdin):
            if file is not None:
                file.close()
