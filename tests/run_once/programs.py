"""What the processes of these tests run."""

from __future__ import annotations

import asyncio
import io
import signal
import time
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandParser

from django_redislock import Leader
from django_redislock.management import LockedCommand
from tests.support.processes import say


class Command(LockedCommand):
    lock_name = "import:{source}"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("source")

    def handle(self, *args: Any, **options: Any) -> str:
        assert not {"lock_timeout", "skip_if_locked", "no_lock"} & options.keys()
        self.lock.raise_if_lost()
        say(fence=self.lock.fence)
        if options["source"] == "slow":
            input()
        return f"imported {options['source']}"


def import_slowly(url: str) -> None:
    """Run the command until a line comes."""
    settings.DJANGO_REDISLOCK = {"URL": url}
    call_command(Command(), "slow", stdout=io.StringIO())


def stand_for_election(url: str, expire: float) -> None:
    """Be a candidate until SIGTERM; say when each term begins and ends."""
    settings.DJANGO_REDISLOCK = {"URL": url, "RETRY_FOR": 0.2}
    candidate = Leader("scheduler", on_elected=_elected, on_lost=_ended, expire=expire)
    signal.signal(signal.SIGTERM, lambda *_: candidate.stop())
    say(stands=True)
    candidate.run()


def stand_in_a_loop(url: str, expire: float) -> None:
    """Do the same in an event loop."""
    settings.DJANGO_REDISLOCK = {"URL": url, "RETRY_FOR": 0.2}

    async def run() -> None:
        async def elected(term: Any) -> None:
            _elected(term)

        candidate = Leader("scheduler", on_elected=elected, on_lost=_ended, expire=expire)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, candidate.stop)
        say(stands=True)
        await candidate.arun()

    asyncio.run(run())


def _elected(term: Any) -> None:
    say(event="elected", fence=term.fence, at=time.monotonic())


def _ended(term: Any) -> None:
    at = time.monotonic()
    say(event="ended", lost=None if term.lost is None else term.lost.code, at=at)
