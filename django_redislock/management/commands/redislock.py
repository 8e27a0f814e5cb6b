"""``manage.py redislock``: list or watch the held locks, show one, force-release one, examine the servers, run a command."""

from __future__ import annotations

import getpass
import json
import sys
import time
from argparse import SUPPRESS
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, no_translations

from ... import conf
from ...connections import connection_names, get_client
from ...core.driver.place import place_of
from ...core.validation import check_name
from ...doctor import Finding
from ...doctor_trials import examine, examine_cache
from ...exceptions import LockBackendError
from ...inventory import Listing, Row, clients, find, force_release, read
from ...models import HeldLock, visible
from ...task_names import is_waiting
from ..durations import seconds
from ..output import counted, cut, plain, record, table, unread, words_of
from ..run import run
from ..run_arguments import ActionParser, add_parser
from ..which import chosen, did_you_mean, held_names, near, of_task

WARNING = "The holder is not stopped. If it still runs, two holders will overlap."

MESSAGES = (
    "No message is deleted: a message that is still in its queue will run, and a second one may be published now."
)
SHOWN = 20
"""Locks that are shown at most before the question whether to release them."""


def interval(text: str) -> float:
    """Return the seconds between two looks: a tenth of one at least."""
    return max(0.1, seconds(text))


class Command(BaseCommand):
    help = (
        "Lists or watches the locks held now, shows one, force-releases one, examines the servers, or runs a command under a lock. "
        "Exit status 1: not found, refused, failed, or something is wrong."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        actions: Any = parser.add_subparsers(
            dest="action", required=True, metavar="list|show|release|watch|doctor|run", parser_class=ActionParser
        )

        common = CommandParser(add_help=False, parents=[_of_every_command()])
        common.add_argument("--connection", metavar="ALIAS", help="look only at this connection")
        form = CommandParser(add_help=False)
        form.add_argument("--format", choices=["table", "json"], default="table")
        output = CommandParser(add_help=False, parents=[form])
        output.add_argument("--id", action="store_true", help="show the owner ids: the right to release")
        which = CommandParser(add_help=False)
        which.add_argument("--older-than", type=seconds, default=0.0, metavar="TIME", help="e.g. 90s, 5m, 1.5h, 2d")
        which.add_argument("--kind", choices=[kind for kind, _ in HeldLock._meta.get_field("kind").flatchoices])

        actions.add_parser("list", parents=[common, output, which], help="list the locks held now, oldest first")

        show = actions.add_parser("show", parents=[common, output], help="show everything known about one lock")
        show.add_argument("name", help="the name of the lock, or a unique beginning of it")

        release = actions.add_parser(
            "release", parents=[common], help="take one lock, or all locks of a task, from the holder"
        )
        release.add_argument("name", nargs="?", help="the name of the lock, or a unique beginning of it")
        release.add_argument("--task", metavar="NAME", help="release the locks of this task")
        release.add_argument("--waiting", action="store_true", help="with --task: only the locks of messages that wait")
        release.add_argument(
            "--match",
            metavar="PATTERN",
            help="with --task: only the locks whose key or arguments match, as in 'report:*'",
        )
        release.add_argument("--id", help="release only if the owner id is this one")
        release.add_argument(
            "--reason", default="", metavar="TEXT", help="why: reported to the former holder and in the log"
        )
        release.add_argument("--yes", action="store_true", help="do not ask")
        release.add_argument("--dry-run", action="store_true", help="only show what would be released")

        watch = actions.add_parser("watch", parents=[common, output, which], help="show the list again and again")
        watch.add_argument("--interval", type=interval, default=2.0, metavar="TIME", help="between two looks; e.g. 5s")
        watch.add_argument("--once", action="store_true", help="look once")

        actions.add_parser("doctor", parents=[common, form], help="examine the connections and try a lock on each")
        add_parser(actions, [common])

    @no_translations
    def handle(self, *args: Any, action: str, **options: Any) -> None:
        """Run one of the actions."""
        if action == "run":
            status = run(options, self.stderr)
            if status:
                sys.exit(status)
            return
        self._check(options["connection"])
        if action == "list":
            self._list(options)
        elif action == "show":
            self._print(self._find(options), options, record)
        elif action == "watch":
            self._watch(options)
        elif action == "doctor":
            self._doctor(options)
        elif options["task"] is None:
            self._release(options)
        else:
            self._release_of_task(options)

    def _check(self, connection: str | None) -> None:
        try:
            known = connection_names()
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if not conf.get().enabled:
            raise CommandError(f"Locks are switched off: {conf.NAME}['ENABLED'] is False.")
        if connection is not None and connection not in known:
            raise CommandError(f"There is no connection {connection!r}. Known are: {', '.join(known)}.")

    def _list(self, options: dict[str, Any]) -> None:
        rows, listing = self._read(options)
        if rows or not listing.failed:  # a connection that could not be read has no empty list
            self._print(rows, options, table)
        for remark in cut(listing):
            self.stderr.write(remark)
        self._fail(listing.failed)

    def _read(self, options: dict[str, Any]) -> tuple[list[Row], Listing]:
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
        """Write a line of JSON for each look."""
        while True:
            rows, listing = self._read(options)
            locks = [plain(row, options["id"]) for row in rows]
            self.stdout.write(json.dumps({"locks": locks, "failed": listing.failed, "cut": listing.cut}))
            self.stdout.flush()
            if pause is None:
                return self._fail(listing.failed)
            time.sleep(pause)

    def _draw(self, options: dict[str, Any], pause: float | None) -> None:
        try:
            from ..watch_table import watch
        except ImportError as error:
            raise CommandError(
                f"'redislock watch' needs rich ({error}): pip install 'django-redislock[watch]'. "
                "'redislock watch --format json' and 'redislock list' do without."
            ) from error
        failed: dict[str, str] = {}

        def look() -> tuple[list[dict[str, str]], list[str]]:
            rows, listing = self._read(options)
            failed.clear()
            failed.update(listing.failed)
            return [words_of(row, options["id"]) for row in rows], [*unread(listing.failed), *cut(listing)]

        output: Any = self.stdout
        watch(look, output._out, pause)  # what it wraps, because it would end the line after each piece
        self._fail(failed)

    def _doctor(self, options: dict[str, Any]) -> None:
        found, failed = clients(options["connection"])
        advice = f"Correct CACHES or {conf.NAME}; 'manage.py check' tells more."
        findings = [(name, Finding("settings", "problem", why, advice)) for name, why in failed.items()]
        dead = set()
        for connection, client in found.items():
            looked = list(examine(client))
            findings += [(connection, finding) for finding in looked]
            if looked[0].status == "problem":
                dead.add(place_of(client.connection_pool))
        findings += _of_caches([options["connection"]] if options["connection"] else connection_names(), failed, dead)
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

    def _find(self, options: dict[str, Any], *, whole: bool = False) -> list[Row]:
        """Return the lock of that name: one row for each connection on which it is held, one at least.

        A unique beginning stands for the name, unless the `whole` is wanted.
        """
        try:
            name = check_name(options["name"])
        except ValueError as error:
            raise CommandError(str(error)) from error
        rows = self._rows(name, options["connection"])
        if rows:
            return rows
        names, failed = held_names(options["connection"])
        self._fail(failed)
        found = near(name, names)
        if len(found) == 1 and found[0].startswith(name) and not whole:
            rows = self._rows(found[0], options["connection"])
        if not rows:
            what = f"Nobody holds the lock {name!r} now.{did_you_mean(found)}"
            raise CommandError(f"{what} 'redislock list' shows those that are held.")
        return rows

    def _rows(self, name: str, connection: str | None) -> list[Row]:
        rows: list[Row] = []
        found, failed = clients(connection)
        for at in found:
            try:
                rows += find(at, [name]).values()
            except LockBackendError as error:
                failed[at] = error.cause
        if not rows:
            self._fail(failed)
        return rows

    def _fail(self, failed: dict[str, str]) -> None:
        if failed:
            raise CommandError("\n".join(unread(failed)))

    def _release(self, options: dict[str, Any]) -> None:
        if options["name"] is None:
            raise CommandError("Give the name of a lock, or --task NAME.")
        if options["waiting"] or options["match"] is not None:
            raise CommandError("--waiting and --match choose among the locks of a task; give --task NAME.")
        # Without a question only the whole name counts: the name of a free lock may be the beginning of another name.
        rows = self._find(options, whole=options["yes"] and options["id"] is None)
        if options["id"] is not None:
            rows = [row for row in rows if row.held.id == options["id"]]
            if not rows:
                raise CommandError("The lock is held by another id; nothing was released. See 'redislock show --id'.")
        if len(rows) > 1:
            where = ", ".join(row.connection for row in rows)
            raise CommandError(
                f"A lock of this name is held on several connections: {where}. Choose with --connection."
            )
        row = rows[0]
        self.stderr.write(record(rows, False))
        if options["dry_run"]:
            self.stdout.write("Dry run: nothing was released.")
            return
        self.stderr.write(self.style.WARNING(WARNING))
        if not options["yes"] and not self._confirmed():
            raise CommandError("Not confirmed; nothing was released.")
        try:
            freed = force_release(row.connection, row.held.name, row.held.fence, _operator(), options["reason"])
        except LockBackendError as error:
            raise CommandError(f"Whether it was released is unknown: {error.cause}. See 'redislock show'.") from error
        if not freed:
            raise CommandError("The lock changed hands or was freed meanwhile; nothing was released.")
        self.stdout.write(self.style.SUCCESS(f"Released {visible(row.held.name)}."))

    def _release_of_task(self, options: dict[str, Any]) -> None:
        task = options["task"]
        if options["name"] is not None or options["id"] is not None:
            raise CommandError("Give the name of a lock or --task NAME, not both; --id goes with a name.")
        held, listing, tasks = of_task(options["connection"], task)
        rows = chosen(held, options["waiting"], options["match"])
        if not rows:
            self._fail(listing.failed)
            if held:
                raise CommandError(
                    f"The task {task!r} holds {counted(len(held))}, and none of them matches the options."
                )
            raise CommandError(f"No lock of the task {task!r} is held.{did_you_mean(near(task, tasks - {task}))}")
        self.stderr.write(table(rows if options["dry_run"] else rows[:SHOWN], False, arguments=True))
        if len(rows) > SHOWN and not options["dry_run"]:
            self.stderr.write(f"… and {len(rows) - SHOWN} more")
        for remark in cut(listing):
            self.stderr.write(remark)
        if options["dry_run"]:
            self.stdout.write(f"Dry run: nothing was released of {counted(len(rows))}.")
            self._fail(listing.failed)
            return
        if not all(is_waiting(row.info) for row in rows):
            self.stderr.write(self.style.WARNING(WARNING))
        self.stderr.write(self.style.WARNING(MESSAGES))
        if not options["yes"] and not self._confirmed(counted(len(rows))):
            raise CommandError("Not confirmed; nothing was released.")
        freed = 0
        try:
            for row in rows:
                freed += force_release(row.connection, row.held.name, row.held.fence, _operator(), options["reason"])
        except LockBackendError as error:
            raise CommandError(f"Released {counted(freed)}, then Redis failed: {error.cause}. Try again.") from error
        left = len(rows) - freed
        if left:
            self.stderr.write(f"Not released, because the holder changed or the lock ended meanwhile: {counted(left)}.")
        if not freed:
            raise CommandError("Nothing was released.")
        self.stdout.write(self.style.SUCCESS(f"Released {counted(freed)} of {visible(task)}."))
        self._fail(listing.failed)

    def _confirmed(self, what: str = "it") -> bool:
        self.stderr.write(f"Force-release {what}? [y/N] ", ending="")
        self.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    # Output

    def _print(self, rows: list[Row], options: dict[str, Any], table: Any) -> None:
        if options["format"] == "json":
            text = json.dumps([plain(row, options["id"]) for row in rows], indent=2)
        else:
            text = table(rows, options["id"])
        self.stdout.write(text)


def _of_every_command() -> CommandParser:
    """Return Django's own options, so that they may also follow the action; those not given change nothing."""
    parser = CommandParser(add_help=False, argument_default=SUPPRESS)
    for option in ("--settings", "--pythonpath"):
        parser.add_argument(option, help=SUPPRESS)
    for option in ("--traceback", "--no-color", "--force-color", "--skip-checks"):
        parser.add_argument(option, action="store_true", help=SUPPRESS)
    parser.add_argument("-v", "--verbosity", type=int, choices=range(4), help=SUPPRESS)
    return parser


def _of_caches(names: list[str], failed: dict[str, str], dead: set[Any]) -> list[tuple[str, Finding]]:
    """Try the caches of this package, but those of dead servers, and return the findings."""
    found = []
    for name in names:
        if name in failed or name not in settings.CACHES or place_of(get_client(name).connection_pool) in dead:
            continue
        finding = examine_cache(name)
        if finding is not None:
            found.append((name, finding))
    return found


def _operator() -> str:
    try:
        return f"command line ({getpass.getuser()})"
    except (OSError, KeyError):  # a container's user may have no name
        return "command line"
