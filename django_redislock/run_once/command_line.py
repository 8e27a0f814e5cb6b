"""What the commands that run under a lock share: exit statuses, durations, a stderr that never fails, and the arguments
of ``manage.py redislock run``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser, OutputWrapper
from django.utils import translation

from ..core.lock import Lock
from ..exceptions import LockBackendError
from ..texts import duration, visible

USAGE, UNAVAILABLE, LOST, BUSY = 2, 69, 74, 75
"""Exit statuses: bad arguments (argparse's), and EX_UNAVAILABLE, EX_IOERR and EX_TEMPFAIL of sysexits.h."""
LABEL = 200
"""Characters of a command line that are shown where the lock is listed."""
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """Return the seconds of a duration such as 90, 90s, 5m, 1.5h or 2d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a duration; write 90s, 5m, 1.5h or 2d")
    return float(match[1]) * UNITS[match[2]]


UNWRITABLE = OSError, ValueError, AttributeError
"""What a stream raises that has no reader or no room, that was closed, or that was closed before Python started."""


def silence(stream: Any) -> None:
    """Let nothing more be written, because it would fail once more when Python ends, with the exit status 120."""
    with suppress(*UNWRITABLE), Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


class Speech(OutputWrapper):
    """A stderr whose failures change nothing."""

    def __init__(self, out: Any) -> None:  # because the stubs want a TextIO, and Django wraps a wrapper, too
        super().__init__(out)

    def write(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Write and flush a line, if that can be done."""
        with suppress(*UNWRITABLE):
            super().write(*args, **kwargs)
        self.flush()

    def flush(self) -> None:
        """Write what is left, or forget it."""
        try:
            super().flush()
        except UNWRITABLE:
            silence(self)


def holder_of(lock: Lock) -> str:
    """Return who holds the lock, in English words, like the sentence around it."""
    try:
        info = lock.owner()
    except LockBackendError as error:
        return f"an unknown holder ({error.cause})"
    with translation.override(None):  # as a decorator it restores the language of whichever thread came last
        return "nobody any more" if info is None else f"{visible(info.holder)} for {duration(info.age)}"


def sentence(error: object) -> str:
    """Return the text of the error as a sentence; many errors of the system end with a full stop."""
    return f"{str(error).rstrip('.')}."


def unreleased(lock: Lock, error: LockBackendError) -> str:
    """Return what to say when the lock could not be released."""
    return f"The lock could not be released and ends by its expiry of {duration(lock.expire)}: {sentence(error)}"


class ActionParser(CommandParser):
    """The parser of an action; where the default of `command` is a list, it takes everything after ``--``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what is before the first ``--``."""
        if self.get_default("command") is None:
            return super().parse_known_args(args, namespace)
        at = args.index("--") if "--" in args else len(args)
        namespace, extra = super().parse_known_args(args[:at], namespace)
        namespace.command = args[at + 1 :]
        if extra and not namespace.command and not extra[0].startswith("-"):
            self.error(f"write two hyphens before the command: -- {shlex.join(extra)}")
        return namespace, extra


def add_parser(actions: Any, parents: list[CommandParser]) -> None:
    """Add the action to those of the command."""
    parser = actions.add_parser(
        "run",
        parents=parents,
        help="run a command while holding a lock",
        usage="manage.py redislock run NAME [options] -- COMMAND [ARGUMENTS]",
        description=(
            "Waits for the lock NAME, runs the command, and passes its exit status on (128 + n for signal n). Exit "
            "status 75: busy; 74: the lock was lost; 69: Redis did not answer; 126, 127: the command cannot be "
            "executed."
        ),
    )
    parser.set_defaults(command=[])
    parser.add_argument("name", metavar="NAME", help="the name of the lock")
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument("--timeout", type=seconds, metavar="TIME", help="wait so long at most; e.g. 90s, 5m, 1.5h, 2d")
    wait.add_argument("--no-wait", action="store_const", dest="timeout", const=0.0, help="as --timeout 0")
    wait.add_argument("--skip", action="store_true", help="when the lock is held: do nothing, with exit status 0")
    parser.add_argument(
        "--busy-status", type=_status, default=BUSY, metavar="N", help="exit status when the lock is held (75)"
    )
    parser.add_argument(
        "--once", metavar="KEY", help="do nothing, with exit status 0, after a run of this key that succeeded"
    )
    parser.add_argument("--keep", type=seconds, metavar="TIME", help="with --once: remember the run for so long (1d)")
    parser.add_argument("--expire", type=seconds, metavar="TIME", help="expiry of the lock without renewal")
    parser.add_argument("--max-hold", type=seconds, metavar="TIME", help="renew the lock for so long at most")
    parser.add_argument(
        "--on-loss",
        choices=["terminate", "warn"],
        default="terminate",
        help="what to do when the lock is lost: end the command, or only say so",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        metavar="TIME",
        help="time between SIGTERM and SIGKILL (10s, but half of the expiry at most)",
    )
    parser.add_argument("--label", metavar="TEXT", help="shown with the lock instead of the command line")


def find_program(command: list[str]) -> str:
    """Return the path of the command's program; raises CommandError as a shell does, and ValueError for no command."""
    if not command or not command[0]:
        raise ValueError("Write the command after two hyphens: redislock run NAME [options] -- COMMAND [ARGUMENTS]")
    found = shutil.which(command[0])
    if found is not None:
        return found
    folders = [""] if os.sep in command[0] else os.get_exec_path()
    if any(Path(folder, command[0]).exists() for folder in folders):
        raise CommandError(f"{command[0]}: cannot be executed", returncode=126)
    raise CommandError(f"{command[0]}: command not found", returncode=127)


def _status(text: str) -> int:
    if not text.isdecimal() or int(text) > 255:
        raise ArgumentTypeError(f"{text!r} is not an exit status from 0 to 255")
    return int(text)
