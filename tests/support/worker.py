from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

from .fork_server import start_python
from .waiting import wait_until


class Worker:
    """A Celery worker in processes of its own, on a queue of its own name. Use it in a with statement."""

    def __init__(
        self,
        name: str,
        pool: str,
        log: Path,
        *options: str,
        number: int = 0,
        concurrency: int = 4,
        env: dict[str, str] | None = None,
    ) -> None:
        self.queue = name
        self.pool = pool
        self.hostname = f"{name}-{number}@{socket.gethostname()}"
        self._log = log
        command = ["-m", "celery", "-A", "tests.support.celery_site.app", "worker", f"--queues={name}"]
        command += [
            f"--pool={pool}",
            f"--concurrency={concurrency}",
            f"--hostname={self.hostname}",
            "--loglevel=INFO",
        ]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat", *options]
        environment = os.environ | {"DJANGO_SETTINGS_MODULE": "tests.support.celery_site.settings"} | (env or {})
        with log.open("wb") as output:
            self._process = start_python(
                *command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                new=pool == "gevent",  # which patches what is imported after it
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def wait_ready(self, timeout: float = 120) -> Self:
        """Wait until it takes tasks."""

        def ready() -> bool:
            assert self._process.poll() is None, self.log
            return f"{self.queue}-" in self.log and " ready." in self.log

        wait_until(ready, timeout, "the worker is ready")
        return self

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def signal(self, signum: int) -> None:
        """Send a signal to the main process."""
        self._process.send_signal(signum)

    def wait(self, timeout: float = 60) -> int:
        """Wait until it has ended, and return its exit status."""
        return self._process.wait(timeout)

    def kill(self) -> None:
        """End the main process and its children, as the loss of the host does."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Let it end in an orderly way, and leave none of its processes."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=15)
        self.kill()
