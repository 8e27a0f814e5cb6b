from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

from .programs import find_program
from .waiting import wait_until

Config = dict[str, Any]
"""One database, as in settings.DATABASES."""


class PostgresServer:
    """A PostgreSQL server of its own, on a unix socket in a directory of its own."""

    def __init__(self) -> None:
        # Debian keeps the server's programs out of PATH.
        packaged = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/postgres")), reverse=True)
        self.program = Path(find_program("postgres", *packaged, package="postgresql")).resolve()
        self.directory = Path(tempfile.mkdtemp(prefix="redislock-postgres-"))
        self.log = self.directory / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._user = _unprivileged_user()
        self._numbers = count(1)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._remove()

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

    def _start(self) -> None:
        if self._user is not None:
            shutil.chown(self.directory, self._user.pw_uid, self._user.pw_gid)
        data = self.directory / "data"
        self._popen(
            "initdb", "-D", data, "-U", "redislock", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"
        ).wait()
        options = {"listen_addresses": "", "unix_socket_directories": self.directory, "fsync": "off"}
        arguments = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        self.process = self._popen("postgres", "-D", data, *arguments)
        wait_until(self._answers, timeout=30, message=f"{self.program} answers")

    def _popen(self, program: str, *arguments: object) -> subprocess.Popen[bytes]:
        # PostgreSQL refuses to run as root.
        as_user = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []} if self._user else {}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [str(self.program.with_name(program)), *map(str, arguments)],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **as_user,
            )

    def _answers(self) -> bool:
        import psycopg

        if self.process is None or self.process.poll() is not None:
            raise RuntimeError(f"{self.program} did not start:\n{self.log.read_text(errors='replace')[-2000:]}")
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _remove(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)  # without waiting for clients or checkpoints
            try:
                self.process.wait(timeout=10)
            finally:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


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
    copies = {alias: dict(config) for alias, config in configs.items()}
    connections.settings = connections.configure_settings({"default": {}} | copies)
    try:
        yield
    finally:
        drop_connections()
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
