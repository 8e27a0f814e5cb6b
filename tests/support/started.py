from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self


class Started:
    """A program that runs, in a directory of its own, as long as a with statement."""

    def __init__(self, name: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"redislock-{name}-"))
        self.log = self.directory / "server.log"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        raise NotImplementedError

    def end(self) -> None:
        """End it, however it is."""
        raise NotImplementedError

    def remove(self) -> None:
        """End it, however it is, and remove its directory."""
        try:
            self.end()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def popen(self, *command: object, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process that writes to the log, and that no signal from the terminal reaches."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                list(map(str, command)),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **options,
            )

    def why(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-3000:]
