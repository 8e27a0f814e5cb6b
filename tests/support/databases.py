from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from asgiref.sync import SyncToAsync

from .programs import find_program
from .started import Started
from .waiting import wait_until

Config = dict[str, Any]
"""One database, as in settings.DATABASES."""


class PostgresServer(Started):
    """A PostgreSQL server of its own, on a unix socket in a directory of its own."""

    def __init__(self) -> None:
        # Debian keeps the server's programs out of PATH.
        packaged = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/postgres")), reverse=True)
        self.program = Path(find_program("postgres", *packaged, package="postgresql")).resolve()
        super().__init__("postgres")
        self.process: subprocess.Popen[bytes] | None = None
        self._user = _unprivileged_user()
        self._numbers = count(1)

    def new_database(self) -> Config:
        """Create what is like an empty database: a schema, which takes a hundredth of the time."""
        schema = f"test_{next(self._numbers)}"
        with self._connect() as connection:
            connection.execute(f"CREATE SCHEMA {schema}")
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "redislock",
            "HOST": str(self.directory),
            "OPTIONS": {"options": f"-c search_path={schema}"},
        }

    def _connect(self) -> Any:
        import psycopg

        return psycopg.connect(host=str(self.directory), user="redislock", dbname="postgres", autocommit=True)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        if self._user is not None:
            shutil.chown(self.directory, self._user.pw_uid, self._user.pw_gid)
        data = self.directory / "data"
        self._run(
            "initdb", "-D", data, "-U", "redislock", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"
        ).wait()
        options = {"listen_addresses": "", "unix_socket_directories": self.directory, "fsync": "off"}
        arguments = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        self.process = self._run("postgres", "-D", data, *arguments)
        wait_until(self._answers, timeout=30, message=f"{self.program} answers")

    def _run(self, program: str, *arguments: object) -> subprocess.Popen[bytes]:
        # PostgreSQL refuses to run as root.
        as_user = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []} if self._user else {}
        return self.popen(self.program.with_name(program), *arguments, **as_user)

    def _answers(self) -> bool:
        import psycopg

        if self.process is None or self.process.poll() is not None:
            raise RuntimeError(f"{self.program} did not start:\n{self.why()}")
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def end(self) -> None:
        """End it, without waiting for clients or checkpoints."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            try:
                self.process.wait(timeout=10)
            finally:
                self.process.kill()
                self.process.wait()


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Return a user to run the server as when the tests run as root."""
    if os.geteuid():
        return None
    users = {user.pw_name: user for user in pwd.getpwall()}
    return users.get("postgres") or users["nobody"]


def sqlite_file(directory: Path, name: str = "db") -> Config:
    """Return the configuration of a database in a file."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(directory / f"{name}.sqlite3"),
        "OPTIONS": {"timeout": 30, "init_command": "PRAGMA synchronous=OFF"},
    }


@contextmanager
def using_databases(**configs: Config) -> Iterator[None]:
    """Make these, instead of those of the settings, the databases of all threads that connect from now on.

    Without "default" it is one that nobody can use. The connections of this thread are closed in the end.
    """
    from django.db import connections

    before = connections.settings
    mine = {connection.alias: connection for connection in connections.all(initialized_only=True)}
    for alias in mine:
        del connections[alias]
    _drop_connections_of_asgiref()
    copies = {alias: dict(config) for alias, config in configs.items()}
    connections.settings = connections.configure_settings({"default": {}} | copies)
    try:
        yield
    finally:
        drop_connections()
        _drop_connections_of_asgiref()
        connections.settings = before
        for alias, connection in mine.items():
            connections[alias] = connection


def drop_connections() -> None:
    """Close this thread's connections, and let the next ones be new, to the databases of then."""
    from django.db import connections

    for connection in connections.all(initialized_only=True):
        connection.close()
        del connections[connection.alias]


def create_tables(*models: Any, using: str = "default") -> None:
    """Create the models' tables."""
    from django.db import connections

    with connections[using].schema_editor() as editor:
        for model in models:
            editor.create_model(model)


def _drop_connections_of_asgiref() -> None:
    """The thread in which asgiref calls functions lives on: a test met the tables of another one."""
    if SyncToAsync.single_thread_executor._threads:
        SyncToAsync.single_thread_executor.submit(drop_connections).result(30)
