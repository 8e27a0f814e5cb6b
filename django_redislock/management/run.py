"""``manage.py redislock run``: a command that runs while this process holds a lock."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import threading
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser, OutputWrapper

from .. import conf
from ..core.lock import Lock
from ..core.validation import check_expire, check_name
from ..exceptions import LockBackendError, LockLost
from ..locks import lock
from .done_runs import DoneRuns
from .durations import seconds
from .process_group import ProcessGroup

USAGE, UNAVAILABLE, LOST, BUSY = 2, 69, 74, 75
"""Exit statuses: bad arguments (argparse's), and EX_UNAVAILABLE, EX_IOERR and EX_TEMPFAIL of sysexits.h."""
REPORT_EVERY = 30.0
"""Seconds between two reports for whom the command waits."""
LABEL = 200
"""Characters of a command line that are shown where the lock is listed."""
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


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
            "Waits for the lock NAME, runs the command, and passes its exit status on (128 + n for signal n). Exit status "
            "75: busy; 74: the lock was lost; 69: Redis did not answer; 126, 127: the command cannot be executed."
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
        "--grace", type=seconds, default=10.0, metavar="TIME", help="time between SIGTERM and SIGKILL (10s)"
    )
    parser.add_argument("--label", metavar="TEXT", help="shown with the lock instead of the command line")


def run(options: dict[str, Any], stderr: OutputWrapper) -> int:
    """Run the command under the lock, and return the exit status.

    Raises CommandError with the exit status when the command was not run, or the lock was lost.
    """
    if os.name != "posix":
        raise CommandError("'redislock run' needs process groups: it works on Linux, macOS and other Unix systems.")
    if threading.current_thread() is not threading.main_thread():
        raise CommandError("'redislock run' handles signals: call it in the main thread.")
    try:
        check_name(options["name"])
        if options["once"] is not None:
            check_name(options["once"], "--once")
        elif options["keep"] is not None:
            raise ValueError("--keep needs --once")
        for option in ("expire", "max_hold", "keep"):
            if options[option] is not None:
                check_expire(options[option], f"--{option.replace('_', '-')}")
        return _Run(options, stderr, find_program(options["command"])).run()
    except LockBackendError as error:
        raise CommandError(f"{error}. The command was not run.", returncode=UNAVAILABLE) from error
    except (ValueError, ImproperlyConfigured) as error:
        raise CommandError(str(error), returncode=USAGE) from error


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


class _Run:
    def __init__(self, options: dict[str, Any], stderr: OutputWrapper, program: str) -> None:
        self.options = options
        self.stderr = stderr
        self.program = program
        self.command: list[str] = options["command"]
        self.name: str = options["name"]
        self.wait = 0.0 if options["skip"] else options["timeout"]
        self.lock = lock(
            self.name,
            expire=options["expire"],
            max_hold=options["max_hold"],
            timeout=self.wait,
            label=options["label"] or shlex.join(self.command)[:LABEL],
            on_lost=self._on_lost,
            using=options["connection"],
            kind="command",
            until_commit=False,
        )
        self.group: ProcessGroup | None = None
        self.waiting = False
        self.pending: list[int] = []
        """Signals that came while the command was being started."""

    def run(self) -> int:
        """Do it all and return the exit status."""
        if not conf.get().enabled:
            self._say(f"Locks are switched off ({conf.NAME}['ENABLED'] is False): the command runs without one.")
        done = None
        if self.options["once"] is not None and conf.get().enabled:
            done = DoneRuns(self.name, self.options["once"], self.options["keep"], self.options["connection"])
        with self._signals():
            if self._is_done(done):
                return 0
            if not self._acquire():
                return self._busy()
            try:
                if self._is_done(done):
                    return 0
                if self.pending:
                    return 128 + self.pending[0]
                status = self._run_command()
                if done is not None and status == 0:
                    status = self._remember(done)
            finally:
                self._release()
            return status

    def _is_done(self, done: DoneRuns | None) -> bool:
        found = self._interruptible(done.find) if done is not None else None
        if found is not None:
            self._say(f"Done already: {found}.")
        return found is not None

    def _acquire(self) -> bool:
        if self._interruptible(lambda: self.lock.acquire(blocking=False)):
            return True
        if self.wait == 0:
            return False
        with self._reports():
            return bool(self._interruptible(self.lock.acquire))

    def _interruptible(self, call: Any) -> Any:
        """Call what a signal may end: it raises SystemExit there."""
        self.waiting = True
        try:
            if self.pending:
                raise SystemExit(128 + self.pending[0])
            return call()
        finally:
            self.waiting = False

    def _busy(self) -> int:
        text = f"Lock {self.name!r} is held by {_holder(self.lock)}. The command was not run."
        if not self.options["skip"]:
            raise CommandError(text, returncode=self.options["busy_status"])
        self._say(text)
        return 0

    def _run_command(self) -> int:
        """Run the command to its end and return its exit status; raises CommandError when the lock was lost."""
        environment = os.environ | {"REDISLOCK_NAME": self.name, "REDISLOCK_FENCE": str(self.lock.fence)}
        self.lock.raise_if_lost()
        self.group = ProcessGroup(self.program, self.command, environment, self.options["grace"])
        try:
            for number in self.pending:
                self.group.send(number)
            if self.lock.lost and self._terminates:  # before there was a group to be terminated
                self.group.terminate()
            return self.group.wait()
        finally:
            self.group.close()

    def _remember(self, done: DoneRuns) -> int:
        if self.lock.lost and self._terminates:
            return LOST
        try:
            done.remember()
        except LockBackendError as error:
            self._say(f"The command succeeded, but that could not be remembered: {error}. It may be run again.")
            return LOST
        return 0

    def _release(self) -> None:
        try:
            self.lock.release()
        except LockLost as error:
            if self._terminates:
                raise CommandError(str(error), returncode=LOST) from error
        except LockBackendError as error:
            self._say(f"The lock could not be released and ends by its expiry of {self.lock.expire:g} s: {error}")

    @property
    def _terminates(self) -> bool:
        return bool(self.options["on_loss"] == "terminate")

    def _on_lost(self, lost: Lock) -> None:
        what = "is being terminated" if self._terminates else "runs on without it"
        self._say(f"Lock {self.name!r} was lost ({lost.lost.reason if lost.lost else ''}). The command {what}.")
        if self._terminates and self.group is not None:
            self.group.terminate()

    def _say(self, text: str) -> None:
        self.stderr.write(text)
        self.stderr.flush()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Forward signals to the command's process group; what is ignored here stays ignored, as by nohup."""
        before = {number: signal.getsignal(number) for number in FORWARDED}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide the exit status
        for number in before.keys() & FORWARDED:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.group is not None:
            self.group.send(number)
        elif self.waiting:
            raise SystemExit(128 + number)
        else:
            self.pending.append(number)

    @contextmanager
    def _reports(self) -> Iterator[None]:
        """Say for whom the command waits, now and then again and again."""
        acquired = threading.Event()

        def report() -> None:
            while True:
                self._say(f"Waiting for lock {self.name!r}, which is held by {_holder(self.lock)}.")
                if acquired.wait(REPORT_EVERY):
                    return

        reporter = threading.Thread(target=report, name="redislock run", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            acquired.set()


def _holder(lock: Lock) -> str:
    try:
        info = lock.owner()
    except LockBackendError as error:
        return f"an unknown holder ({error.cause})"
    return "nobody any more" if info is None else f"{info.holder} for {info.age:.0f} s"


def _status(text: str) -> int:
    if not text.isdecimal() or int(text) > 255:
        raise ArgumentTypeError(f"{text!r} is not an exit status from 0 to 255")
    return int(text)
