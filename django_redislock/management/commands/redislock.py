"""``manage.py redislock``: list, show, watch or force-release the held locks, diagnose the servers, or run a
command."""

from __future__ import annotations

import json
import signal
import sys
import time
from argparse import SUPPRESS
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, no_translations

from ... import conf
from ...connections import client_of_alias, clients, connection_names, get_client
from ...core.driver.registry import server_of
from ...doctor import Finding, diagnose, diagnose_cache, least_rights, notes
from ...inventory import HeldLockRow, Listing, read
from ...models import HeldLock
from ...run_once.command_line import ActionParser, Speech, add_parser, seconds, silence
from ...run_once.run import run
from ...texts import visible
from ..output import lines_of, missing, plain, plain_with_queue, table, words_of
from ..selection import find_lock, raise_if_unread, release_lock, release_task, unread


def interval(text: str) -> float:
    """Return the seconds between two readings, at least a tenth of a second."""
    return max(0.1, seconds(text))


class Command(BaseCommand):
    help = (
        "Lists, shows, watches or force-releases the locks held now, diagnoses the servers, or runs a command. "
        "Exit status 1: not found, not confirmed, failed, or a problem was found."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        actions: Any = parser.add_subparsers(
            dest="action", required=True, metavar="list|show|release|watch|doctor|run", parser_class=ActionParser
        )

        common = CommandParser(add_help=False, parents=[_django_options()])
        common.add_argument("--connection", metavar="ALIAS", help="only this connection")
        form = CommandParser(add_help=False)
        form.add_argument("--format", choices=["table", "json"], default="table")
        output = CommandParser(add_help=False, parents=[form])
        output.add_argument(
            "--id", action="store_true", help="show the owner ids; with its owner id a lock can be released"
        )
        which = CommandParser(add_help=False)
        which.add_argument("--older-than", type=seconds, default=0.0, metavar="TIME", help="e.g. 90s, 5m, 1.5h, 2d")
        which.add_argument("--kind", choices=[kind for kind, _ in HeldLock._meta.get_field("kind").flatchoices])

        actions.add_parser("list", parents=[common, output, which], help="list the locks held now, oldest first")

        show = actions.add_parser("show", parents=[common, output], help="show everything known about one lock")
        show.add_argument("name", help="the name of the lock, or a unique beginning of it")

        release = actions.add_parser("release", parents=[common], help="force-release one lock, or the locks of a task")
        release.add_argument("name", nargs="?", help="the name of the lock, or a unique beginning of it")
        release.add_argument("--task", metavar="NAME", help="release the locks of this task, or of this group")
        release.add_argument("--waiting", action="store_true", help="with --task: only the locks of waiting messages")
        release.add_argument(
            "--match",
            metavar="PATTERN",
            help="with --task: only the locks whose key or arguments match, e.g. 'report:*'",
        )
        release.add_argument(
            "--gently",
            action="store_true",
            help="only ask the holder to give it back: it is not renewed any more, and nobody else gets it before",
        )
        release.add_argument("--id", help="release only if the owner id is this one")
        release.add_argument(
            "--reason", default="", metavar="TEXT", help="the reason, for the former holder and the log"
        )
        release.add_argument("--yes", action="store_true", help="do not ask")
        release.add_argument("--dry-run", action="store_true", help="only show what would be released")

        watch = actions.add_parser("watch", parents=[common, output, which], help="show the list again and again")
        watch.add_argument(
            "--interval", type=interval, default=2.0, metavar="TIME", help="the time between two readings, e.g. 5s"
        )
        watch.add_argument("--once", action="store_true", help="read once")

        doctor = actions.add_parser(
            "doctor", parents=[common, form], help="diagnose the connections, with a trial lock on each"
        )
        doctor.add_argument(
            "--acl", action="store_true", help="only print the least rights of the users of Redis, as ACL SETUSER lines"
        )
        add_parser(actions, [common])

    @no_translations
    def handle(self, *args: Any, action: str, **options: Any) -> None:
        """Run one of the actions."""
        if action == "run":
            # Django writes the text of an error to it, too, and then ends with the status of the error.
            self.stderr = Speech(self.stderr)
            status = run(options, self.stderr)
            if status:
                sys.exit(status)
            return
        self._check(options["connection"])
        try:
            self._run(action, options)
            self.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            silence(self.stdout)
            sys.exit(128 + signal.SIGPIPE)  # as the shell says it of others

    def _run(self, action: str, options: dict[str, Any]) -> None:
        if action == "list":
            self._list(options)
        elif action == "show":
            rows, failed = find_lock(options["name"], options["connection"])
            self._print(rows, options, lines_of, plain_with_queue)
            raise_if_unread(failed)
        elif action == "watch":
            self._watch(options)
        elif action == "doctor":
            self._doctor(options)
        elif options["task"] is None:
            release_lock(self, options)
        else:
            release_task(self, options)

    def _check(self, connection: str | None) -> None:
        try:
            known = connection_names()
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if not conf.get().enabled:
            raise CommandError(f"Locks are switched off: {conf.NAME}['ENABLED'] is False.")
        # A lock of another alias, as of `redislock run --connection sessions`, could be neither shown nor released.
        if connection is not None and connection not in known and client_of_alias(connection)[0] is None:
            raise CommandError(f"There is no connection {connection!r}. The connections are: {', '.join(known)}.")

    def _list(self, options: dict[str, Any]) -> None:
        rows, listing = self._read(options)
        unseen = listing.cut and not rows  # the filters saw only the locks that were read
        # After a failure, or of a list that is cut, "No held locks found." may be wrong.
        if rows or not (listing.failed or (unseen and options["format"] == "table")):
            self._print(rows, options, table)
        for remark in missing(listing):
            self.stderr.write(remark)
        raise_if_unread(listing.failed)
        if unseen:
            raise CommandError("None of the locks that were read matches the options; one of the others may.")

    def _read(self, options: dict[str, Any]) -> tuple[list[HeldLockRow], Listing]:
        listing = read(options["connection"])
        rows = [
            row
            for row in listing.rows
            if row.held.age >= options["older_than"] and options["kind"] in (None, row.info.kind)
        ]
        rows.sort(key=lambda row: row.held.age, reverse=True)
        return rows, listing

    def _watch(self, options: dict[str, Any]) -> None:
        pause = None if options["once"] else options["interval"]
        try:
            if options["format"] == "json":
                self._stream(options, pause)
            else:
                self._draw(options, pause)
        except KeyboardInterrupt:
            pass

    def _stream(self, options: dict[str, Any], pause: float | None) -> None:
        """Write a line of JSON for each reading."""
        while True:
            rows, listing = self._read(options)
            locks = [plain(row, options["id"]) for row in rows]
            read = {"locks": locks, "failed": listing.failed, "cut": listing.cut, "foreign": listing.foreign}
            self.stdout.write(json.dumps(read))
            self.stdout.flush()
            if pause is None:
                return raise_if_unread(listing.failed)
            time.sleep(pause)

    def _draw(self, options: dict[str, Any], pause: float | None) -> None:
        try:
            from ..watch_table import watch
        except ImportError as error:
            raise CommandError(
                f"'redislock watch' needs rich ({error}): pip install 'django-redislock[watch]'. "
                "'redislock watch --format json' and 'redislock list' do not need it."
            ) from error
        failed: dict[str, str] = {}

        def read_lines() -> tuple[list[dict[str, str]], list[str]]:
            rows, listing = self._read(options)
            failed.clear()
            failed.update(listing.failed)
            return [words_of(row, options["id"]) for row in rows], [*unread(listing.failed), *missing(listing)]

        output: Any = self.stdout
        watch(read_lines, output._out, pause)  # the wrapped stream, because the wrapper ends each piece with a newline
        raise_if_unread(failed)

    def _doctor(self, options: dict[str, Any]) -> None:
        found, failed = clients(options["connection"])
        names = [options["connection"]] if options["connection"] else connection_names()
        if options["acl"]:
            # Of all, because several that lead to one database may have keys, or users, of their own.
            each = {alias: get_client(alias) for alias in names if alias not in failed}
            self.stderr.write("\n".join(f"{alias}: {note}" for alias, client in each.items() for note in notes(client)))
            lines = [line for alias, client in each.items() for line in least_rights(alias, client)]
            self.stdout.write("\n".join(dict.fromkeys(lines)))
            raise_if_unread(failed)
            return
        advice = f"Correct CACHES or {conf.NAME}; 'manage.py check' gives details."
        findings = [(name, Finding("settings", "problem", why, advice)) for name, why in failed.items()]
        dead = set()
        for connection, client in found.items():
            diagnosis = list(diagnose(client))
            findings += [(connection, finding) for finding in diagnosis]
            if diagnosis[0].status == "problem":
                dead.add(server_of(client).place)
        findings += _diagnose_caches(names, failed, dead)
        if options["format"] == "json":
            self.stdout.write(
                json.dumps([{"connection": at} | finding._asdict() for at, finding in findings], indent=2)
            )
        else:
            colours = {"ok": self.style.SUCCESS, "advice": self.style.WARNING, "problem": self.style.ERROR}
            for connection, finding in findings:
                status = colours[finding.status](finding.status.ljust(7))
                text = visible(f"{finding.message.rstrip('.')}. {finding.advice}".strip())
                self.stdout.write(f"{status}  {connection}  {finding.check}: {text}")
        wrong = sum(finding.status == "problem" for _, finding in findings)
        if wrong:
            raise CommandError(f"Problems found: {wrong}.")

    def _print(self, rows: list[HeldLockRow], options: dict[str, Any], table: Any, data: Any = plain) -> None:
        if options["format"] == "json":
            text = json.dumps([data(row, options["id"]) for row in rows], indent=2)
        else:
            text = table(rows, options["id"])
        self.stdout.write(text)


def _django_options() -> CommandParser:
    """Return Django's own options, so that they may also follow the action. Without them nothing changes."""
    parser = CommandParser(add_help=False, argument_default=SUPPRESS)
    for option in ("--settings", "--pythonpath"):
        parser.add_argument(option, help=SUPPRESS)
    for option in ("--traceback", "--no-color", "--force-color", "--skip-checks"):
        parser.add_argument(option, action="store_true", help=SUPPRESS)
    parser.add_argument("-v", "--verbosity", type=int, choices=range(4), help=SUPPRESS)
    return parser


def _diagnose_caches(names: list[str], failed: dict[str, str], dead: set[Any]) -> list[tuple[str, Finding]]:
    """Return the findings about the caches of this package, without the caches of dead servers."""
    found = []
    for name in names:
        if name in failed or name not in settings.CACHES or server_of(get_client(name)).place in dead:
            continue
        finding = diagnose_cache(name)
        if finding is not None:
            found.append((name, finding))
    return found
