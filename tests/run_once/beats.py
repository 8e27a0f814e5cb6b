"""Beats for the tests, and what they publish."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import redis

from django_redislock.core import held_locks
from tests.support import wait_until
from tests.support.processes import ROOT

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
        command = [sys.executable, "-m", "celery", "-A", "tests.run_once.beat_site", "beat", "-S", scheduler]
        if scheduler == PERSISTENT:
            command += ["--schedule", str(folder / "schedule")]
        self.process = subprocess.Popen(
            [*command, "--pidfile", "", "--loglevel", "INFO"],
            cwd=ROOT,
            env=environment(site),
            stdout=self.log,
            stderr=self.log,
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
    """The messages in the queue, in the order in which they came."""

    def __init__(self, broker: redis.Redis) -> None:
        self._broker = broker

    def times(self, name: str) -> list[float]:
        """Return when the entry was published."""
        found = []
        for raw in reversed(self._broker.lrange("celery", 0, -1)):
            message = json.loads(raw)
            if message["headers"]["task"] == name:
                (args, _, _) = json.loads(base64.b64decode(message["body"]))
                found.append(float(args[0]) if args else 0.0)
        return found

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
