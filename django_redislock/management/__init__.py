"""The command ``redislock``; and `LockedCommand`, a management command of which one process runs at a time."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from ..core.lock import Lock
from ..core.memory_server import GRANTS_ALL
from ..core.validation import Seconds
from ..exceptions import AcquireTimeout, LockBackendError, LockLost
from ..locks import lock
from ..run_once.command_line import BUSY, LABEL, LOST, UNAVAILABLE, USAGE, Speech, holder_of, seconds, unreleased


class LockedCommand(BaseCommand):
    """A management command that runs under a lock: ``class Command(LockedCommand): ...``.

    A command that finds the lock held ends with CommandError, which names the holder, and exit status 75; with
    ``--skip-if-locked`` it ends with 0, and with ``--lock-timeout 5m`` it first waits for the lock. ``--no-lock`` runs
    it without. When the lock was lost meanwhile the exit status is 74; it is 69 when Redis did not answer before
    the command began, and 2 when no lock can have the name or the options.
    """

    lock_name: str = ""
    """The name of the lock; empty: that of the command. A format string over the options: ``"import:{source}"``."""
    lock_timeout: Seconds | None = 0
    """How long to wait without ``--lock-timeout``; None: as the settings say."""
    lock_options: ClassVar[dict[str, Any]] = {}
    """More options of `django_redislock.lock`: `expire`, `label`, …"""

    lock: Lock = None  # type: ignore[assignment]  # until the command runs
    """The held lock: ``self.lock.raise_if_lost()`` before each irreversible step; with ``--no-lock`` never lost."""
    _own_name = ""
    _argv: tuple[str, ...] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        self._argv = tuple(argv)
        super().run_from_argv(argv)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        self._own_name = subcommand
        busy = parser.add_argument_group("lock").add_mutually_exclusive_group()
        busy.add_argument("--lock-timeout", type=seconds, metavar="TIME", help="wait for the lock; e.g. 90s, 5m, 1.5h")
        busy.add_argument("--skip-if-locked", action="store_true", help="when the lock is held: do nothing, status 0")
        busy.add_argument("--no-lock", action="store_true", help="run without the lock")
        return parser

    def execute(self, *args: Any, **options: Any) -> str | None:
        timeout, skip, unlocked = (options.pop(key, None) for key in ("lock_timeout", "skip_if_locked", "no_lock"))
        if unlocked:
            with Lock(GRANTS_ALL, self._own_name or "unlocked") as self.lock:
                return super().execute(*args, **options)
        own: dict[str, Any] = {"timeout": 0 if skip else self.lock_timeout if timeout is None else timeout}
        own["label"] = shlex.join(self._argv or (self._own_name, *map(str, args)))[:LABEL]
        try:
            held = lock(self._lock_name(options), **own | {"kind": "command"} | self.lock_options)
        except (ValueError, ImproperlyConfigured) as error:  # an option made the name too long, or is no Unicode
            raise CommandError(str(error), returncode=USAGE) from error
        with ExitStack() as stack:
            try:
                stack.enter_context(held)
            except AcquireTimeout as error:
                text = f"Lock {held.name!r} is held by {holder_of(held)}."
                if not skip:
                    raise CommandError(text, returncode=BUSY) from error
                Speech(options.get("stderr") or self.stderr).write(text)
                return None
            except LockBackendError as error:
                raise CommandError(str(error), returncode=UNAVAILABLE) from error
            self.lock = held
            try:
                output: str | None = super().execute(*args, **options)
                try:
                    stack.close()
                except LockBackendError as error:
                    Speech(self.stderr).write(unreleased(held, error))
            except LockLost as error:  # at the release, or by raise_if_lost()
                raise CommandError(str(error), returncode=LOST) from error
            return output

    def _lock_name(self, options: dict[str, Any]) -> str:
        try:
            return self.lock_name.format(**options) or self._own_name or type(self).__module__.rpartition(".")[2]
        except (KeyError, IndexError) as error:
            raise CommandError(
                f"lock_name {self.lock_name!r} names {error}, which is no option of the command."
            ) from error
