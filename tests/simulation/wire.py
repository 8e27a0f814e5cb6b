"""A connection as an event loop sees it: bytes in both directions, in order, over a network that fails."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError, TimeoutError

from django_redislock.core import scripts
from django_redislock.core.driver.effects import Pipeline, Script, ScriptCall
from django_redislock.core.driver.resp import Replies

from .model_server import Status
from .requests import SOCKET_TIMEOUT, execute

if TYPE_CHECKING:
    from .aio import TaskProcess

SCRIPTS = [script for script in vars(scripts).values() if isinstance(script, Script)]


class Dialled:
    """What the driver gets in place of a connection of redis-py: it connects, and then has a transport."""

    def __init__(self, process: TaskProcess) -> None:
        self._process = process
        self._wire: Wire | None = None
        self._reader = SimpleNamespace(at_eof=lambda: False)
        self._writer: Any = None

    async def connect(self) -> None:
        process = self._process
        world, host = process.world, process.host
        fate, there, back, _ = process.delays()
        if fate != "well":
            process.trouble(SOCKET_TIMEOUT)
        if fate in ("lost", "slow") or host.silent_until > world.time + SOCKET_TIMEOUT:
            await asyncio.sleep(SOCKET_TIMEOUT)
            process.broke_at = world.time  # a waiter that cannot be served leaves its place behind: seed 44003419
            raise TimeoutError("no connection")
        await asyncio.sleep(max(there, host.silent_until - world.time) + back)
        if fate in ("refused", "unanswered", "late") or host.down_until > world.time:
            process.broke_at = world.time
            raise ConnectionError("no connection")
        self._wire = Wire(process)
        self._writer = SimpleNamespace(transport=self._wire, close=self._wire.close)


class Wire:
    """The transport of one connection, and the server's end of it: requests are executed and answered in order."""

    def __init__(self, process: TaskProcess) -> None:
        self.process = process
        self.channels: set[bytes] = set()
        self.over = False
        """Whether the client's end is closed."""
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = None
        self._swallows = self._mute = False
        """Whether what is sent to the server, and what is sent by it, gets lost."""
        self._requests: deque[tuple[list[bytes], str, float]] = deque()
        self._arrives = self._answered = 0.0
        process.wires.append(self)

    # The transport

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self.over

    def get_extra_info(self, name: str) -> Any:
        return SimpleNamespace(fileno=lambda: self) if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        requests = Replies()  # a request is an array, as a reply may be
        requests.add(data)
        while not requests.empty:
            self._send(requests.next())

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        """Close it at once; the server does not read any more what has not arrived."""
        if not self.over:
            self._swallows = True
            self._requests.clear()
        self._end(None)

    # The way to the server

    @property
    def busy(self) -> bool:
        """Whether the server has still to execute something."""
        return bool(self._requests)

    def _send(self, request: list[bytes]) -> None:
        process, host = self.process, self.process.host
        now = process.world.time
        fate, there, back, extra = process.delays()
        if fate == "unknown" and request[0] != b"EVALSHA":
            fate = "well"
        if self._swallows or fate in ("lost", "refused"):
            self._swallows = True
            process.broke_at = now
            process.trouble(SOCKET_TIMEOUT)
            if fate == "refused":
                process.soon(back, self.lose)
            return
        if fate == "late":
            there = 3 * extra
            process.soon(back, self.lose)
        if fate == "slow":
            there = SOCKET_TIMEOUT + 2 * extra
        self._arrives = max(self._arrives, now + there, host.silent_until)
        if fate != "well" or self._arrives > now + there:
            process.trouble(self._arrives - now)
        self._requests.append((request, fate, back))
        process.world.at(self._arrives, self._arrived)

    def _arrived(self) -> None:
        world, host = self.process.world, self.process.host
        if host.silent_until > world.time:
            self.process.trouble(host.silent_until - world.time)
            self._arrives = max(self._arrives, host.silent_until)
            world.at(host.silent_until, self._arrived)
            return
        if not self._requests:
            return
        request, fate, back = self._requests.popleft()
        if host.down_until > world.time:
            self.process.soon(back, self.lose)
        elif fate == "unknown":
            self._answer(NoScriptError("NOSCRIPT No matching script."), back)
        else:
            reply = self._execute(request)
            self._answer(reply, back)
            if fate == "unanswered":
                self._mute = True
                self.process.soon(back, self.lose)

    def _execute(self, request: list[bytes]) -> Any:
        process, (name, *args) = self.process, request
        if name in (b"EVALSHA", b"EVAL"):
            script = next(each for each in SCRIPTS if args[0] in (each.sha, each.text))
            keys = 2 + int(args[1])
            return execute(process, ScriptCall(script, tuple(args[2:keys]), tuple(args[keys:])))  # type: ignore[arg-type]
        if name == b"SUBSCRIBE":
            if process.alive and not self.over:
                self.channels.add(args[0])
                process.host.server.subscribers.setdefault(args[0], {})[self] = self._heard
            return [b"subscribe", args[0], 1]
        if name == b"PING":
            return [b"pong", b""] if self.channels else Status(b"PONG")
        replies = execute(process, Pipeline((tuple(request),)))  # type: ignore[arg-type]
        return replies if isinstance(replies, ResponseError) else replies[0]

    # The way back

    def _heard(self, message: bytes) -> None:
        self._answer([b"message", next(iter(self.channels)), message], 0.0002)

    def _answer(self, reply: Any, back: float) -> None:
        if not self._mute:
            world, received = self.process.world, partial(self._call, "data_received", encoded(reply))
            self._answered = max(self._answered, world.time + back)
            # At this very time, because a difference is rounded, and replies changed their order (seed 42007689).
            world.at(self._answered, partial(self.process._happen, received))

    def _call(self, name: str, argument: Any) -> None:
        def call() -> None:
            if name == "connection_lost" or not self.over:
                if self._swallows:  # a request that gets no reply is waited for from the last bytes on: seed 40019384
                    self.process.trouble(SOCKET_TIMEOUT)
                getattr(self._protocol, name)(argument)

        self._loop.call_soon(call)

    def deafen(self) -> None:
        """Let the server end its subscription; the process does not notice it."""
        for channel in self.channels:
            self.process.host.server.subscribers.get(channel, {}).pop(self, None)

    def lose(self) -> None:
        """Let the process notice that the connection broke."""
        if not self.over:
            self.process.broke_at = self.process.world.time
            self.process.trouble()
            self._end(ConnectionError("reset"))

    def _end(self, error: Exception | None) -> None:
        if not self.over:
            self.over = True
            self.deafen()
            if self._protocol is not None:
                self._call("connection_lost", error)


def encoded(reply: Any) -> bytes:
    """Return a reply as a server writes it."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, RedisError):
        return b"-%b\r\n" % str(reply).encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
    return b"+%b\r\n" % reply if isinstance(reply, Status) else b"$%d\r\n%b\r\n" % (len(reply), reply)
