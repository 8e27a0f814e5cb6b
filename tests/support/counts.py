from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import redis


def command_counts(client: redis.Redis) -> Counter[str]:
    """Return how often the server ran each command (``"evalsha"``, ``"client|list"``), those inside scripts included."""
    stats = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): values["calls"] for name, values in stats.items()})


@contextmanager
def counting(client: redis.Redis) -> Iterator[Counter[str]]:
    """Give a counter that holds, after the block, how often each command ran within it.

    Commands inside scripts are counted too; ask for ``counts["evalsha"]``, or use `monitoring`.
    """
    difference: Counter[str] = Counter()
    before = command_counts(client)
    yield difference
    difference.update(command_counts(client) - before)
    del difference["info"]


@contextmanager
def monitoring(client: redis.Redis) -> Iterator[list[str]]:
    """Give a list that holds, after the block, each command line that clients sent within it, without those of scripts."""
    sent: list[str] = []
    start, end = str(uuid.uuid4()), str(uuid.uuid4())
    with client.monitor() as monitor:

        def listen() -> None:
            for command in monitor.listen():
                if command["command"] == f"ECHO {start}":
                    sent.clear()
                elif command["command"] == f"ECHO {end}":
                    return
                elif command["client_type"] != "lua":
                    sent.append(command["command"])

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        client.echo(start)  # may connect anew, for the monitor took a connection
        try:
            yield sent
        finally:
            client.echo(end)
            thread.join(timeout=10)
        assert not thread.is_alive(), "the monitor has not seen the end of its own block"
