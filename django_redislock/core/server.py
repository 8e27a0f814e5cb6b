"""The synchronous driver: one Redis server, with connections of our own to it.

Own connections, made like those of the client that was given, because the client's own may be used up by others, wait for
hours on a retry policy, or decode replies. Every call takes one for a moment; who waits for a lock holds none.
"""

from __future__ import annotations

import inspect
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from . import scripts, steps
from .clock import monotonic
from .link import Link
from .steps import Await, Call, Calls, Commands, Compute, Effect, Follow, Join, Leave, Pause, Steps
from .twins import thread_twin
from .waiting import WaitingRoom
from .wire import Wire

DEFAULT_TIMEOUT = 5.0
MAX_CONNECTIONS = 16
RETRY_FOR_BY_SENTINEL = 40.0
"""Longer than Sentinel takes for a failover: it waits 30 s by default until it calls the primary down."""
# What a client may have configured that ours decide by themselves.
OURS = frozenset(
    {
        *("retry", "retry_on_error", "retry_on_timeout", "health_check_interval"),
        *("socket_timeout", "socket_connect_timeout"),
        *("decode_responses", "encoding", "encoding_errors", "protocol", "legacy_responses"),
        *("maint_notifications_config", "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler"),
        *("maintenance_state", "maintenance_notification_hash", "event_dispatcher", "himport_registry"),
        *("orig_host_address", "orig_socket_timeout", "orig_socket_connect_timeout"),
        *("driver_info", "lib_name", "lib_version"),  # Django's own backend makes another one for every thread
    }
)

T = TypeVar("T")


class Server:
    """One Redis server as this process sees it; shared by all clients with the same settings."""

    def __init__(self, client: Redis | AsyncRedis) -> None:
        pool = client.connection_pool
        settings = {key: value for key, value in pool.connection_kwargs.items() if key not in OURS}
        self.connection_class: Any = pool.connection_class
        if isinstance(client, AsyncRedis):
            self.connection_class, settings = thread_twin(self.connection_class, settings)
        self.timeout = pool.connection_kwargs.get("socket_timeout", DEFAULT_TIMEOUT) or DEFAULT_TIMEOUT
        connect = pool.connection_kwargs.get("socket_connect_timeout") or self.timeout
        self.settings = settings | {"socket_timeout": self.timeout, "socket_connect_timeout": connect, "protocol": 2}
        self._limit = max(1, min(pool.max_connections, MAX_CONNECTIONS))
        self.reset()

    def reset(self) -> None:
        """Forget every connection without touching it: in a forked child they are the parent's."""
        self._free: list[Link] = []
        # All, those in use too; a link lost to a signal drops out.
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._returned = threading.Condition(threading.Lock())
        self._wanted = 0
        self.room = WaitingRoom(lambda: Wire(self.connection()))
        self._renewals = Link(self.connection())

    @property
    def retry_for(self) -> float:
        """Seconds for which it is tried again when it cannot be reached and the caller's own deadline is not nearer."""
        by_kind = RETRY_FOR_BY_SENTINEL if "connection_pool" in self.settings else steps.RETRY_FOR
        return by_kind if steps.retry_for is None else steps.retry_for

    def connection(self) -> Any:
        """Return a new connection, not connected yet."""
        return self.connection_class(**self.settings, retry=Retry(NoBackoff(), 0))

    def call(self, call: Call | Calls | Commands, posted: Link | None = None) -> Any:
        """Run a script, or several, or commands, on a connection of its own for the moment.

        `posted`: where the script has been sent already.
        """
        try:
            link = posted or self._free.pop()
        except IndexError:
            link = self._wait_for_link()
        try:
            match call:
                case Call():
                    return link.call(call)
                case Calls():
                    return link.call_all(call)
                case Commands():
                    return link.ask(call)
        except ConnectionError:
            self._free.clear()  # a server that went away took the idle connections with it
            raise
        finally:
            if link.posted is not None:  # a signal, before the reply was read
                link.close()
            self._free.append(link)
            if self._wanted:
                with self._returned:
                    self._returned.notify()

    def _post(self, call: Call) -> Link | None:
        """Send the script where no connection has to be waited for, and return on which: `call` reads the reply there."""
        try:
            link = self._free.pop()
        except IndexError:
            return None
        return link if link.post(call) else None

    def renew(self, call: Call, patience: float) -> Any:
        """Run a renewal on the watchdog's own connection, and wait for so many seconds for its reply."""
        self._renewals.limit(min(patience, self.timeout))
        return self._renewals.call(call)

    def _wait_for_link(self) -> Link:
        give_up = monotonic() + self.timeout
        with self._returned:
            self._wanted += 1
            try:
                while True:
                    try:
                        return self._free.pop()
                    except IndexError:
                        pass
                    if len(self._links) < self._limit:
                        link = Link(self.connection())
                        self._links.add(link)
                        return link
                    if not self._returned.wait(give_up - monotonic()):
                        raise TimeoutError(f"no connection was free within {self.timeout:g} s")
            finally:
                self._wanted -= 1

    def run(self, steps: Steps[T]) -> T:
        """Do what the steps ask for, and return their result."""
        return self._run(steps, lambda: steps.send(None))

    def begin(self, steps: Steps[T]) -> Callable[[], T]:
        """Send the script that the steps ask for first; the function returned does the rest, and is to be called."""
        call: Any = next(steps)
        try:
            link = self._post(call)
            return lambda: self._run(steps, lambda: steps.send(self.call(call, link)))
        except BaseException as error:  # a signal; the server may have got it
            self._run(steps, partial(steps.throw, error))
            raise

    def _run(self, steps: Steps[T], proceed: Callable[[], Effect]) -> T:
        try:
            while True:
                try:
                    while True:  # within the try, for a signal handler may raise at any jump
                        effect = proceed()
                        result = self._do(effect)
                        proceed = partial(steps.send, result)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                except BaseException as error:
                    if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:  # the steps themselves ended with it
                        raise
                    proceed = partial(steps.throw, error)
        finally:
            # An error leads to this frame. If that led back, it would keep its locks alive, and renewed, until they are found
            # to be garbage.
            del proceed

    def _do(self, effect: Effect) -> Any:
        match effect:
            case Call() | Calls() | Commands():
                return self.call(effect)
            case Join(lock, id, along):
                return self.room.join(lock, id, along)
            case Await(waiter, until, look):
                return self.room.wait(waiter, until, look)
            case Leave(waiter):
                return self.room.leave(waiter)
            case Pause(seconds):
                return time.sleep(seconds)
            case Compute(function):
                try:
                    return function(), None
                except BaseException as error:
                    return None, error
            case Follow(made, until):
                try:
                    return made.result(None if until == math.inf else max(0.0, until - monotonic()))
                except FutureTimeout:
                    return None


class Unlocked(Server):
    """A server that grants everything and remembers nothing: what ``ENABLED: False`` runs on."""

    def __init__(self) -> None:
        self.room = WaitingRoom(lambda: Wire(self.connection()))
        self._free = []  # nothing is sent ahead
        self.settings = {}

    def renew(self, call: Call, patience: float) -> Any:
        """Grant it."""
        return self.call(call)

    def call(self, call: Call | Calls | Commands, posted: Link | None = None) -> Any:
        """Grant it."""
        if isinstance(call, Calls):
            return [self.call(each) for each in call.calls]
        if isinstance(call, Commands):
            return [None] * len(call.commands)
        match call.script:
            case scripts.ACQUIRE:
                return int(time.time() * 1_000_000)  # a fence that grows all the same
            case scripts.RENEW:
                return [1] * (len(call.keys) // 2)
            case scripts.READ:
                return [0, b"-1 -2 0 " * (len(call.keys) // 2), b""]
            case scripts.NAMES:
                return [b"", b""]
        return 1


UNLOCKED = Unlocked()
_by_pool: weakref.WeakKeyDictionary[Any, Server] = weakref.WeakKeyDictionary()
_by_settings: dict[Any, Server] = {}
_opening = threading.Lock()


def server_of(client: Redis | AsyncRedis | Server) -> Server:
    """Return the server that the client talks to.

    Raises TypeError for anything but a redis-py client with a connection pool.
    """
    if isinstance(client, Server):
        return client
    pool = getattr(client, "connection_pool", None)
    try:
        return _by_pool[pool]
    except (KeyError, TypeError):
        pass
    if not isinstance(client, (Redis, AsyncRedis)) or pool is None:
        raise TypeError(
            f"client must be a redis.Redis, not {type(client).__module__}.{type(client).__qualname__}: give one of a single "
            "server, or of a Sentinel's primary (a Redis Cluster is not supported)"
        )
    with _opening:
        server = Server(client)
        kept = _by_settings.setdefault(_identity(server), server)
        _by_pool[pool] = kept
        return kept


def _identity(server: Server) -> Any:
    def plain(value: Any) -> Any:
        return value if isinstance(value, (str, bytes, int, float, bool, type(None))) else id(value)

    settings = tuple(sorted((key, plain(value)) for key, value in server.settings.items()))
    return server.connection_class, server._limit, settings


def _after_fork() -> None:
    global _opening
    _opening = threading.Lock()
    for server in _by_settings.values():
        server.reset()


os.register_at_fork(after_in_child=_after_fork)
