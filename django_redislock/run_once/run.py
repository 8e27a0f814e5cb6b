"""``manage.py redislock run``: a command that runs while this process holds a lock."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError

from .. import conf
from ..connections import ask
from ..core.driver import process
from ..core.keys import milliseconds
from ..core.validation import check_expire, check_name
from ..exceptions import LockBackendError, LockLost, NotAcquired
from ..locks import lock
from ..texts import duration
from .command_line import LABEL, LOST, UNAVAILABLE, USAGE, Speech, find_program, holder_of, sentence, unreleased
from .process_group import ProcessGroup

REPORT_EVERY = 30.0
"""Seconds between two reports of the holder that the command waits for."""
GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL, where nothing else was asked for."""
LONGEST_LOOK = 0.25
"""Seconds after which the lock of a running command is looked at again, or less with a short expiry."""
KEEP = 86400.0
"""Seconds for which a run is remembered, by ``--once``, where nothing else was asked for."""
FORWARDED = [
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")
    if hasattr(signal, f"SIG{name}")  # Windows, where the module is imported only, has two of them
]


def run(options: dict[str, Any], stderr: Speech) -> int:
    """Run the command under the lock, and return the exit status.

    Raises CommandError with the exit status when the command was not run, or the lock was lost.
    """
    if os.name != "posix":
        raise CommandError("'redislock run' needs process groups: it works on Linux, macOS and other Unix systems.")
    if threading.current_thread() is not threading.main_thread():
        raise CommandError("'redislock run' handles signals: call it in the main thread.")
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a stream that was closed would be taken by a socket or a pipe of ours, and the command would get that
    os.close(number)
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
        raise CommandError(f"{sentence(error)} The command was not run.", returncode=UNAVAILABLE) from error
    except (ValueError, ImproperlyConfigured) as error:
        raise CommandError(str(error), returncode=USAGE) from error


class _Run:
    def __init__(self, options: dict[str, Any], stderr: Speech, program: str) -> None:
        self.options = options
        self.stderr = stderr
        self._say = stderr.write
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
            using=options["connection"],
            kind="command",
            until_commit=False,
        )
        # The command ends before its successor begins: the grace is before the deadline of a lock that is not renewed.
        # It is half of the expiry at most, because the first renewals come after a third of it.
        self.lead = self.lock.expire / 2
        self.grace: float = min(GRACE, self.lead) if options["grace"] is None else options["grace"]
        self.done_key: bytes | None = None
        """The key of the runs that succeeded, with ``--once``."""
        if options["once"] is not None and conf.get().enabled:
            # With the length, no two pairs of names make the same text, even if they contain colons.
            key = f"{{{conf.get().key_prefix}:run}}:done:{len(self.name)}:{self.name}:{options['once']}"
            self.done_key = key.encode()
        self.group: ProcessGroup | None = None
        self.ended_early = False
        """Whether the guard had to end the command."""
        self.waiting = False
        self.pending: list[int] = []
        """Signals that came while the command was being started."""

    def run(self) -> int:
        """Acquire the lock, run the command, release the lock, and return the exit status."""
        if not conf.get().enabled:
            self._say(f"Locks are switched off ({conf.NAME}['ENABLED'] is False): the command runs without one.")
        elif self._terminates and self.grace > self.lead:
            self._say(
                f"--grace {duration(self.grace)} is longer than half of the lock's expiry of "
                f"{duration(self.lock.expire)}: when the lock is not renewed, the command may run beside the next "
                f"holder for {duration(self.grace - self.lead)}. Give a longer --expire."
            )
        with self._signals():
            if self._is_done():
                return 0
            try:
                if not self._acquire():
                    return self._busy()
                if self._is_done():
                    return 0
                if self.pending:
                    return 128 + self.pending[0]
                status = self._run_command()
                if self.done_key is not None and status == 0:
                    status = self._remember(self.done_key)
            finally:
                self._release()
                self.stderr.flush()  # of what the log left there
            return status

    def _is_done(self) -> bool:
        if self.done_key is None:
            return False
        (found,) = self._interruptible(partial(ask, self.options["connection"], self.name, (b"GET", self.done_key)))
        if found is not None:
            self._say(f"Done already: {found.decode(errors='replace')}.")
        return found is not None

    def _acquire(self) -> bool:
        if self._interruptible(lambda: self.lock.acquire(blocking=False)):
            return True
        if self.wait == 0:
            return False
        with self._reports():
            return bool(self._interruptible(self.lock.acquire))

    def _interruptible(self, call: Any) -> Any:
        """Call a function that a signal may end: the signal raises SystemExit in it."""
        self.waiting = True
        try:
            if self.pending:
                raise SystemExit(128 + self.pending[0])
            return call()
        finally:
            self.waiting = False

    def _busy(self) -> int:
        text = f"Lock {self.name!r} is held by {holder_of(self.lock)}. The command was not run."
        if not self.options["skip"]:
            raise CommandError(text, returncode=self.options["busy_status"])
        self._say(text)
        return 0

    def _run_command(self) -> int:
        """Run the command to its end and return its exit status; raises CommandError when the lock was lost."""
        environment = os.environ | {"REDISLOCK_NAME": self.name, "REDISLOCK_FENCE": str(self.lock.fence)}
        if self._terminates:
            self.lock.raise_if_lost()
        self.group = ProcessGroup(self.program, self.command, environment, self.grace)
        try:
            with self._watched(self.group):
                for number in self.pending:
                    self.group.send(number)
                status = self.group.wait()
        finally:
            self.ended_early = self.group.close()
        return LOST if self.ended_early else status

    @contextmanager
    def _watched(self, group: ProcessGroup) -> Iterator[None]:
        """Tell the guard again and again when to end the command, until the lock is lost; then say that.

        Neither the log nor a function that listens to losses may keep the command running: each of them may stand still
        or fail. Nor may this process: when it is stopped, the guard ends the command in time.
        """
        lease = self.lock._require_lease(self.lock._acquirer())
        ended = threading.Event()

        def watch() -> None:
            told = 0.0
            while (loss := lease.noted_loss) is None:
                if self._terminates and (until := lease.deadline - min(self.grace, self.lead)) != told:
                    group.end_at(until)
                    told = until
                if ended.wait(min(LONGEST_LOOK, self.lead / 10)):
                    return
            if self._terminates:
                group.end()
            what = "is being terminated" if self._terminates else "runs on without it"
            self._say(f"Lock {self.name!r} was lost ({loss.reason}). The command {what}.")

        watcher = threading.Thread(target=watch, name="redislock run: lock", daemon=True)
        if conf.get().enabled:
            watcher.start()
        try:
            yield
        finally:
            ended.set()

    def _remember(self, key: bytes) -> int:
        if self.lock.lost and self._terminates:
            return LOST
        done = f"on {process.HOST} at {datetime.now(UTC).isoformat(' ', 'seconds')}".encode()
        keep = milliseconds(KEEP if self.options["keep"] is None else self.options["keep"])
        try:
            ask(self.options["connection"], self.name, (b"SET", key, done, b"PX", keep))
        except LockBackendError as error:
            self._say(
                f"The command succeeded, but that could not be remembered: {sentence(error)} It may be run again."
            )
            return LOST
        return 0

    def _release(self) -> None:
        try:
            self.lock.release()
        except NotAcquired:
            pass  # a signal may end the acquisition at any point, also when the lock is already held
        except LockLost as error:
            if self._terminates:
                raise CommandError(str(error), returncode=LOST) from error
        except LockBackendError as error:
            self._say(unreleased(self.lock, error))
        if self.ended_early:
            self._say(f"Lock {self.name!r} was not renewed in time, so the command was ended before the expiry.")

    @property
    def _terminates(self) -> bool:
        return bool(self.options["on_loss"] == "terminate")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Forward signals to the command's process group; a signal that is ignored here stays ignored, as by nohup."""
        before = {number: signal.getsignal(number) for number in FORWARDED}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide the exit status
        for number in before.keys() & set(FORWARDED):
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
        """Report the holder that the command waits for, at once and then at intervals."""
        acquired = threading.Event()

        def report() -> None:
            while True:
                self._say(f"Waiting for lock {self.name!r}, which is held by {holder_of(self.lock)}.")
                if acquired.wait(REPORT_EVERY):
                    return

        reporter = threading.Thread(target=report, name="redislock run", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            acquired.set()
