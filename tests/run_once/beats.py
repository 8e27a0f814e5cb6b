"""Beats for the tests, and what they publish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import redis

from django_redislock.core import held_locks
from tests.support import wait_until
from tests.support.fork_server import ROOT, start_python

PERSISTENT = "django_redislock.celery.beat:PersistentScheduler"
DATABASE = "django_redislock.celery.beat:DatabaseScheduler"


def environment(site: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a process with this site."""
    return os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings", "BEAT_SITE": json.dumps(site)}


def migrate(**site: Any) -> None:
    """Create the tables of the site's database."""
    code = "import tests.run_once.beat_site, django; django.setup(); django.core.management.call_command('migrate')"
    subprocess.run(
        [sys.executable, "-c", f"import django.core.management; {code}"],
        cwd=ROOT,
        env=environment(site | {"entries": {}}),
        stdout=subprocess.DEVNULL,
        check=True,
    )


class Beat:
    """A process of ``celery beat`` with a folder of its own, as on a host of its own."""

    def __init__(self, folder: Path, scheduler: str, **site: Any) -> None:
        folder.mkdir()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        command = ["-m", "celery", "-A", "tests.run_once.beat_site", "beat", "--scheduler", scheduler]
        if scheduler == PERSISTENT:
            command += ["--schedule", str(folder / "schedule")]
        self.process = start_python(
            *command,
            *("--pidfile", "", "--loglevel", "INFO"),
            env=environment(site),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.pid = self.process.pid

    def said(self) -> str:
        """Return everything that it has logged."""
        return os.pread(self.log.fileno(), 1_000_000, 0).decode()

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until it has logged the text so often."""

        def found() -> bool:
            assert self.process.poll() is None, self.said()
            return self.said().count(text) >= times

        wait_until(found, message=lambda: f"{text!r} in:\n{self.said()}")

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.log.close()


class Published:
    """The messages in the queue, in the order they came. Use it in a with statement: a thread looks for them."""

    def __init__(self, broker: redis.Redis) -> None:
        self._broker = broker
        self._found: list[tuple[str, float]] = []
        self._closed = threading.Event()
        self._looker = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._looker.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed.set()
        self._looker.join()

    def _look(self) -> None:
        while not self._closed.wait(0.02):
            new = self._broker.lrange("celery", 0, -1 - len(self._found))  # the newest one is the first
            self._found += [(json.loads(raw)["headers"]["task"], time.time()) for raw in reversed(new)]

    def times(self, name: str) -> list[float]:
        """Return when the entry was published, to some hundredths of a second."""
        return [at for task, at in list(self._found) if task == name]

    def count(self, name: str) -> int:
        """Return how often the entry was published."""
        return len(self.times(name))

    def wait_for_more(self, name: str, more: int) -> None:
        """Wait until the entry was published so often from now on."""
        enough = self.count(name) + more
        wait_until(lambda: self.count(name) >= enough, message=lambda: f"{self.count(name)} of {enough}")


def leader_of(client: redis.Redis, beats: list[Beat], *but: Beat) -> Beat:
    """Wait until one of the beats leads that is none of those, and return it."""

    def found() -> Beat | None:
        pids = [held.pid for held in held_locks(client)]
        return next((beat for beat in beats if beat.pid in pids and beat not in but), None)

    found_beat = wait_until(found, message=lambda: "\n".join(beat.said() for beat in beats))
    assert found_beat is not None
    return found_beat
