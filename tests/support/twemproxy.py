from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .programs import find_program
from .servers import RedisServer, free_port
from .waiting import wait_until

# Its default, fnv1a_64, puts texts that differ in their last letters on one server, so in one of five runs all locks.
CONFIGURATION = """
pool:
  listen: 127.0.0.1:{port}
  redis: true
  hash: md5
  hash_tag: "{{}}"
  distribution: ketama
  servers:
{servers}
"""


@contextmanager
def twemproxy(*servers: RedisServer) -> Iterator[str]:
    """Give the URL of a twemproxy that spreads keys over these servers. It closes connections that subscribe."""
    program, port = find_program("nutcracker", package="nutcracker"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "nutcracker.yml")
        lines = "\n".join(f"   - 127.0.0.1:{server.port}:1" for server in servers)
        path.write_text(CONFIGURATION.format(port=port, servers=lines))
        statistics = ("-a", "127.0.0.1", "-s", str(free_port()))
        with subprocess.Popen([program, "-c", path, *statistics], stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(lambda: _answers(port))
                yield f"redis://127.0.0.1:{port}/0"
            finally:
                process.kill()


def _answers(port: int) -> bool:
    # Not redis-py's client, which names itself: twemproxy closes that connection.
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n")
            return connection.recv(9) == b"$-1\r\n"
    except OSError:
        return False
