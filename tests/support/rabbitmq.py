from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

import amqp

from .programs import find_program
from .servers import free_port, on_free_port
from .waiting import wait_until

# Debian's command in PATH starts it as a user of its own, in the directories of that user.
PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"


class RabbitServer:
    """A RabbitMQ of its own, as whoever runs the tests: its node, its ports and its directory are nobody else's."""

    def __init__(self) -> None:
        self.program = find_program(PROGRAM, "rabbitmq-server", package="rabbitmq-server")
        self.directory = Path(tempfile.mkdtemp(prefix="redislock-rabbitmq-"))
        self.log = self.directory / "server.log"
        self.port = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self.port = on_free_port(self._start)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._remove()

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def _start(self, port: int) -> None:
        self._end()  # of a try before
        names_port = free_port()
        plugins = self.directory / "plugins"
        plugins.write_text("[].")
        environment = os.environ | {
            "HOME": str(self.directory),  # of the cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(names_port),
            "RABBITMQ_NODENAME": f"redislock{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_PID_FILE": str(self.directory / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        }
        # The server would start its service of names by itself, and leave it behind.
        self._popen(environment, find_program("epmd", package="rabbitmq-server"), "-port", str(names_port))
        server = self._popen(environment, self.program)

        def answers() -> bool:
            if server.poll() is not None:
                raise RuntimeError(f"{self.program} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            try:
                with amqp.Connection(f"127.0.0.1:{port}", connect_timeout=5):
                    return True
            except (OSError, amqp.AMQPError):
                return False

        wait_until(answers, timeout=90, message=f"{self.program} answers")

    def _popen(self, environment: dict[str, str], *command: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _end(self) -> None:
        while self._processes:
            process = self._processes.pop()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _remove(self) -> None:
        self._end()
        shutil.rmtree(self.directory, ignore_errors=True)
