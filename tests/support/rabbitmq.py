from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import amqp

from .programs import find_program
from .servers import free_port, on_free_port
from .started import Started
from .waiting import wait_until

# Debian's command in PATH starts it as a user of its own, in the directories of that user.
PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"


class RabbitServer(Started):
    """A RabbitMQ of its own, as whoever runs the tests: its node, its ports and its directory are nobody else's."""

    def __init__(self) -> None:
        self.program = find_program(PROGRAM, "rabbitmq-server", package="rabbitmq-server")
        super().__init__("rabbitmq")
        self.port = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.port = on_free_port(self._start)

    def _start(self, port: int) -> None:
        self.end()  # of a try before
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
        names = self.popen(find_program("epmd", package="rabbitmq-server"), "-port", names_port, env=environment)
        self._processes.append(names)
        server = self.popen(self.program, env=environment)
        self._processes.append(server)

        def answers() -> bool:
            if server.poll() is not None:
                raise RuntimeError(f"{self.program} did not start:\n{self.why()}")
            try:
                with amqp.Connection(f"127.0.0.1:{port}", connect_timeout=5):
                    return True
            except (OSError, amqp.AMQPError):
                return False

        wait_until(answers, timeout=90, message=f"{self.program} answers")

    def end(self) -> None:
        """End it, however it is."""
        while self._processes:
            process = self._processes.pop()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
