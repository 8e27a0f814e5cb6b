"""What the tasks note down while they run, in files that the tests read: the oracle of every test with workers."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support import wait_until

DIRECTORY = "REDISLOCK_TEST_RUN_LOG"


class RunLog:
    """The events of all tasks that carry one name, and whether their bodies may end."""

    def __init__(self, name: str, directory: str | None = None) -> None:
        self.name = name
        directory = directory or os.environ[DIRECTORY]
        self._file = Path(directory, f"{name}.jsonl")
        self._may_end = Path(directory, f"{name}.may-end")

    def note(self, event: str, **values: object) -> None:
        """Append one line; short lines of several processes do not mix."""
        line = json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **values}) + "\n"
        with self._file.open("a") as file:
            file.write(line)

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return what was noted, in the order of its writing."""
        text = self._file.read_text() if self._file.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if event in (None, line["event"])]

    def wait_for(self, event: str, count: int = 1, timeout: float = 60) -> dict[str, Any]:
        """Wait until this was noted so often, and return the last one."""
        wait_until(
            lambda: len(self.events(event)) >= count, timeout, lambda: f"{count} x {event!r}; there are {self.events()}"
        )
        return self.events(event)[count - 1]

    def at_once(self) -> int:
        """Return how many runs went on at the same time, at most."""
        return 1 + max(Counter(line["run"] for line in self.events("overlap")).values(), default=0)

    def let_bodies_end(self) -> None:
        self._may_end.touch()

    def wait_until_bodies_may_end(self, timeout: float = 120) -> None:
        wait_until(self._may_end.exists, timeout)

    @contextmanager
    def run(self, task_id: str | None) -> Iterator[None]:
        """Note the start and the end of a run, and every other run that it finds going on.

        Of two that overlap, one at least finds the other: each notes its start before it looks. A run whose process
        died has ended.
        """
        run = uuid.uuid4().hex
        self.note("start", run=run, id=task_id)
        noted = self.events()  # once: of two readings, the second had a start that came after an end between them
        over = {line["run"] for line in noted if line["event"] == "end"} | {run}
        for line in noted:
            if line["event"] == "start" and line["run"] not in over and _lives(line["pid"]):
                self.note("overlap", run=run, other=line["run"])
        try:
            yield
        finally:
            self.note("end", run=run, id=task_id)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
