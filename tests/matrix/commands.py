"""How processes of their own and schedulers hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
from celery import Celery
from celery.beat import Scheduler

from django_redislock.celery.beat import LeaderMixin
from django_redislock.exceptions import LockLost, LossRecord
from django_redislock.run_once.command_line import BUSY, LOST
from tests.support.managed import Managed

from .cell import Place

LOOK = 0.01


class _Command:
    """A command that runs under ``redislock run`` until it is told to end."""

    def __init__(self, at: Place) -> None:
        limit = () if at.timeout is None else ("--timeout", f"{at.timeout}s")
        self._name = at.name
        self._process = Managed(
            *(
                "redislock",
                "run",
                at.name,
                "--expire",
                f"{at.expire}s",
                *limit,
                "--",
                "sh",
                "-c",
                "echo inside $$; cat",
            ),
            DJANGO_REDISLOCK={"URL": at.url},
        )

    def starts(self) -> None:
        """Wait until it runs, or raise why it does not."""
        while not self._process.out.endswith("\n"):
            self._raise_for(self._process.process.poll())
            time.sleep(LOOK)

    @property
    def lost(self) -> Any:
        """Its end before it was told to: the process that holds the lock may still wait for the server."""
        number = self._process.out.split()[-1]
        return None if psutil.pid_exists(int(number)) else "it was ended"

    def ends(self) -> None:
        self._process.end_input()
        self._raise_for(self._process.wait())

    def _raise_for(self, status: int | None) -> None:
        if status == BUSY:
            raise TimeoutError(self._process.err)
        if status == LOST:
            raise LockLost(self._name, LossRecord(self._name, "", 0, self._process.err, time.time(), "gone"))
        assert not status, self._process.err

    def close(self) -> None:
        self._process.close()


def command(at: Place) -> Callable[[Any], Any]:
    def run(body: Any) -> None:
        made = _Command(at)
        try:
            made.starts()
            body(made)
            made.ends()
        finally:
            made.close()

    return run


class _Beat(LeaderMixin, Scheduler):
    """A scheduler that keeps its schedule in memory."""


def beat(at: Place) -> Callable[[Any], Any]:
    """Let a scheduler tick until it leads."""
    app = Celery("matrix", set_as_current=False, broker="memory://")
    app.close()  # as in tasks.py

    def run(body: Any) -> None:
        scheduler = _Beat(app=app)
        scheduler.lock_name, scheduler.expire = at.name, at.expire
        try:
            while scheduler._term is None:
                pause = scheduler.tick()
                if scheduler._term is None:
                    time.sleep(pause)
            body(scheduler._term)
        finally:
            scheduler.close()

    return run
