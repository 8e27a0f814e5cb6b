"""The servers of the cells: each deployment is started once in a test process, with a proxy before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import redis

from tests.support import OneNode, Proxy, RedisServer, ServerClock, running_sentinels, wait_until
from tests.support.clients import CLUSTER

DATABASES = (0, 3, 4)
"""A quorum lock is on all of them, each other lock in the first."""


class Arena:
    """One server and one proxy for all cells of a process that have this deployment."""

    settings: dict[str, Any] = {}
    """What the deployment needs of the settings."""
    backend = "RedisCache"

    def __init__(self, clock: ServerClock | None = None) -> None:
        self._stack = ExitStack()
        self.clock = clock
        self.server = self._stack.enter_context(self._new_server())
        self.proxy = self._stack.enter_context(Proxy(self.server.url))
        self.raws = [self._stack.enter_context(redis.Redis.from_url(url)) for url in self._urls()]
        self.raw = self.raws[0]
        self.url = self.proxy.url

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True, name="tasks").start()
        return loop

    def in_the_loop(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Let a task of the loop that all tasks share do the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def tidy(self) -> None:
        if self.server.process is None:
            self.server.start()
        self.server.resume()
        self.proxy.heal()
        self.proxy.drop_next_reply(0)
        if self.clock is not None:
            self.clock.jump(0, self.raw)
        self.raw.flushall()

    def close(self) -> None:
        self._stack.close()

    def location_of(self, url: str) -> str:
        """Return what a cache has in place of this URL."""
        return url

    def settle(self) -> None:
        """Wait until all servers know each other again, after one of them has restarted."""

    def _new_server(self) -> RedisServer:
        return RedisServer()

    def _urls(self) -> list[str]:
        return [self.server.url_of_db(number) for number in DATABASES]


class ClusterArena(Arena):
    """A Cluster of one node, so that it can do what a server can; its clients have tables and routes all the same."""

    backend = "ClusterCache"

    def __init__(self, clock: ServerClock | None = None) -> None:
        super().__init__(clock)
        # The node sends its clients to the proxy, also when it has restarted.
        self.raw.config_set("cluster-announce-port", self.proxy.port)
        self.server.options["cluster_announce_port"] = str(self.proxy.port)
        self.url = f"{CLUSTER}127.0.0.1:{self.proxy.port}"

    def location_of(self, url: str) -> str:
        return url.replace(CLUSTER, "redis://")

    def _new_server(self) -> RedisServer:
        return OneNode()

    def _urls(self) -> list[str]:
        return [self.server.url]


class SentinelArena(Arena):
    """A server that is found by a Sentinel."""

    def __init__(self, clock: ServerClock | None = None) -> None:
        super().__init__(clock)
        homes = self._stack.enter_context(TemporaryDirectory())
        (port,) = self._stack.enter_context(running_sentinels(Path(homes), self.server, 1, port=self.proxy.port))
        self.url = f"redis+sentinel://127.0.0.1:{port}/main/0"

    def location_of(self, url: str) -> str:
        return self.proxy.url


class ReplicaArena(Arena):
    """A server with a replica, which must confirm each acquisition."""

    settings = {"MIN_REPLICAS": 1}

    def __init__(self, clock: ServerClock | None = None) -> None:
        super().__init__(clock)
        replica = self._stack.enter_context(RedisServer(replicaof=f"127.0.0.1 {self.server.port}"))
        self._replica = self._stack.enter_context(replica.client())
        self.settle()

    def tidy(self) -> None:
        super().tidy()
        self.settle()

    def settle(self) -> None:
        def follows() -> bool:
            # WAIT alone counted a replica that had not loaded the data of the restarted server yet.
            self.raw.set("written", token, px=1000)
            return self.raw.wait(1, 100) == 1 and self._replica.get("written") == token

        token = uuid4().hex.encode()
        wait_until(follows, message="the replica follows")
        self.raw.delete("written")


DEPLOYMENTS = {"": Arena, "Cluster": ClusterArena, "Sentinel": SentinelArena, "replicas": ReplicaArena}
