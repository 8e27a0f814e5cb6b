from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from .servers import RedisServer, running_sentinels
from .waiting import wait_until

WATCHER, APP, PASSWORD = "watcher", "app", "secret"
"""The users of Sentinels and replicas, and of the settings' URL. A server that refuses the first one is cut off from
them, but not from its clients."""


class Deployment:
    """A primary with replicas, watched by Sentinels as the service "main". Use it in a with statement.

    The Sentinels consider a server down after `down_after` seconds. Options are those of the servers.
    """

    def __init__(self, replicas: int = 1, sentinels: int = 3, down_after: float = 0.5, **options: str) -> None:
        self._options = options | {
            "masteruser": WATCHER,
            "masterauth": PASSWORD,
            "repl_ping_replica_period": "1",
        }
        self._replicas, self._number, self._down_after = replicas, sentinels, down_after
        self._asking: dict[int, redis.Redis] = {}
        self.servers: list[RedisServer] = []
        self.sentinels: list[int] = []
        """The ports of the Sentinels."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            users, rights = folder / "users.acl", "~* &* +@all"
            named = [f"user {user} on >{PASSWORD} {rights}\n" for user in (WATCHER, APP)]
            users.write_text(f"user default on nopass {rights}\n{''.join(named)}")
            self._options["aclfile"] = str(users)
            first = stack.enter_context(RedisServer(**self._options))
            self.servers = [first]
            for _ in range(self._replicas):
                options = self._options | {"replicaof": f"127.0.0.1 {first.port}"}
                self.servers.append(stack.enter_context(RedisServer(**options)))
            settings = (
                f"sentinel auth-user main {WATCHER}",
                f"sentinel auth-pass main {PASSWORD}",
                f"sentinel down-after-milliseconds main {self._down_after * 1000:.0f}",
                "sentinel failover-timeout main 2000",
            )
            running = running_sentinels(folder, first, self._number, settings)
            self.sentinels = stack.enter_context(running)
            for port in self.sentinels:
                client = redis.Redis(port=port, retry=None, decode_responses=True)
                self._asking[port] = stack.enter_context(client)  # a new one for each question takes a core
            self.wait_until_whole()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The URL for the settings."""
        return f"redis+sentinel://{APP}:{PASSWORD}@{','.join(f'127.0.0.1:{port}' for port in self.sentinels)}/main/0"

    def ask(self, port: int, *command: str) -> Any:
        """Return the reply of one Sentinel."""
        return self._asking[port].execute_command("SENTINEL", *command)

    @property
    def primary(self) -> RedisServer:
        """The server that most Sentinels call the primary."""
        ports = self._named()
        named = max(ports, key=ports.count)
        return next(server for server in self.servers if server.port == named)

    def _named(self) -> list[int]:
        return [int(self.ask(port, "GET-MASTER-ADDR-BY-NAME", "main")[1]) for port in self.sentinels]

    def wait_until_all_agree(self) -> None:
        """Wait until every Sentinel names the same primary: redis-py asks one, which may be behind the others."""
        wait_until(lambda: len(set(self._named())) == 1, message="the Sentinels agree")

    @property
    def whole(self) -> bool:
        """Whether every Sentinel knows the primary, the others and all servers, and all replicas follow the primary."""
        with suppress(redis.RedisError, IndexError):
            for port in self.sentinels:
                state = self.ask(port, "MASTER", "main")
                state = state if isinstance(state, dict) else dict(zip(state[::2], state[1::2], strict=True))
                others = int(state["num-other-sentinels"]), int(state["num-slaves"])
                if state["flags"] not in ("master", {"master"}) or others != (self._number - 1, self._replicas):
                    return False
            if len(set(self._named())) > 1:
                return False
            primary = self.primary
            with self.client(primary) as client:
                found: dict[str, Any] = client.info("replication")  # type: ignore[assignment]
            replicas = [found.get(f"slave{number}") for number in range(self._replicas)]
            states = [replica["state"] if replica else "missing" for replica in replicas]
            return bool(found["role"] == "master") and states == ["online"] * self._replicas
        return False

    def wait_until_whole(self) -> None:
        wait_until(lambda: self.whole, timeout=60, message="the Sentinels and replicas have found each other")

    def wait_for_another(self, former: RedisServer) -> RedisServer:
        """Wait until most Sentinels call another server the primary, and return it."""
        wait_until(lambda: self.primary is not former, timeout=60, message="a replica is promoted")
        return self.primary

    # Failovers

    def kill(self) -> RedisServer:
        """Kill the primary, and return it."""
        primary = self.primary
        primary.kill()
        return primary

    def hang(self) -> RedisServer:
        """Freeze the primary, and return it."""
        primary = self.primary
        primary.pause()
        return primary

    def switch(self) -> RedisServer:
        """Ask the Sentinels for a planned failover, and return the former primary."""
        primary = self.primary
        wait_until(self._switches, timeout=60, message="a Sentinel agrees to a failover")
        return primary

    def _switches(self) -> bool:
        try:
            self.ask(self.sentinels[0], "FAILOVER", "main")
        except redis.ResponseError:  # the last one is not over
            return False
        return True

    def cut_off(self) -> RedisServer:
        """Cut the primary off from the Sentinels and the replicas, but not from its clients, and return it."""
        primary = self.primary
        self._let_in(primary, "off")
        with self.client(primary) as client:
            client.execute_command("CLIENT", "KILL", "USER", WATCHER)
        return primary

    def _let_in(self, server: RedisServer, state: str) -> None:
        with self.client(server) as client:
            for user in ("default", WATCHER):  # without a user, a new connection is that of the default user
                client.execute_command("ACL", "SETUSER", user, state)

    def client(self, server: RedisServer, **options: Any) -> redis.Redis:
        """Return a client of one server, as the settings' URL makes them."""
        return server.client(username=APP, password=PASSWORD, **options)

    def heal(self, server: RedisServer) -> None:
        """Bring a former primary back, whatever happened to it."""
        if server.process is None:
            server.start()
        server.resume()
        self._let_in(server, "on")
        self.wait_until_whole()
