"""The synchronous driver: one Redis server, with connections of our own to it.

Own connections, made like those of the client that was given, because the client's own may be used up by others, wait for
hours on a retry policy, or decode replies. Every call takes one for a moment; who waits for a lock holds none.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, TypeVar
from weakref import ref

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError
from redis.retry import Retry

from ..clock import monotonic
from . import idle, os_threads, retry
from .connection import RespConnection, ScriptConnection
from .connection_kinds import nameless, sync_connection_kind
from .effects import (
    Effect,
    Invoke,
    Operation,
    Pipeline,
    ScriptBatch,
    ScriptCall,
    Sleep,
    Subscribe,
    Unsubscribe,
    WaitForFuture,
    WaitForWakeup,
)
from .fork import after_in_child
from .identity import identity, theirs
from .place import place_of
from .pool import ConnectionPool
from .resp import NotPrimary
from .wakeups_threads import WaitingRoom

DEFAULT_TIMEOUT = 5.0
MAX_CONNECTIONS = 16
RETRY_FOR_BY_SENTINEL = 40.0
"""Longer than Sentinel takes for a failover: it waits 30 s by default until it calls the primary down."""

T = TypeVar("T")


class Server:
    """One Redis server as this process sees it; shared by all clients with the same settings.

    It is kept by those clients and by the locks and acquisitions made with them. Nothing that it has may lead back to it, so
    that its connections close at once when all of those are gone.
    """

    watched = False
    """Whether its unused connections will be closed."""

    watchdog: Any
    """The watchdog of the locks held there; there is none before the first, and the driver does not use it."""
    view_kind: ClassVar[type[Any] | None] = None
    """The class of the views of event loops, where that is not `AsyncServer`."""

    def __init__(self, client: Redis | AsyncRedis) -> None:
        self.views: dict[Any, Any] = {}
        """How each event loop sees it."""
        pool = client.connection_pool
        self.place = place_of(pool)
        settings = theirs(pool.connection_kwargs)
        self.connection_class: Any = pool.connection_class
        if isinstance(client, AsyncRedis):
            self.connection_class, settings = sync_connection_kind(self.connection_class, settings)
        self.timeout = pool.connection_kwargs.get("socket_timeout", DEFAULT_TIMEOUT) or DEFAULT_TIMEOUT
        connect = pool.connection_kwargs.get("socket_connect_timeout") or self.timeout
        self.settings = settings | {"socket_timeout": self.timeout, "socket_connect_timeout": connect, "protocol": 2}
        self.patience = max(self.timeout, connect)
        """Seconds for which a thread or task waits for another one that connects for it."""
        self._limit = max(1, min(pool.max_connections, MAX_CONNECTIONS))
        self.reset()

    def reset(self) -> None:
        """Forget every connection without touching it: in a forked child they are the parent's."""
        self.views = {}
        self.watched = False
        connection = partial(_connection, self.connection_class, self.settings)
        self.links = ConnectionPool(self._limit, self.timeout, lambda: ScriptConnection(connection()))
        self.room = WaitingRoom(lambda: RespConnection(connection()), self.patience)
        self._of_thread = threading.local()

    def __del__(self) -> None:
        for view in list(self.views.values()):
            view.end_soon()

    @property
    def retry_for(self) -> float:
        """Seconds for which it is tried again when it cannot be reached and the caller's own deadline is not nearer."""
        by_kind = RETRY_FOR_BY_SENTINEL if "connection_pool" in self.settings else retry.RETRY_FOR
        return by_kind if retry.retry_for is None else retry.retry_for

    def connection(self) -> Any:
        """Return a new connection, not connected yet."""
        return _connection(self.connection_class, self.settings)

    def call(self, call: ScriptCall | ScriptBatch | Pipeline) -> Any:
        """Run a script, or several, or commands, on a connection of its own for the moment."""
        links, me = self.links, get_ident()
        nested = me in links.users  # a signal handler, or a destructor, in the middle of a call
        link, new = None, False
        try:
            links.users.add(me)  # first, so that whoever comes in knows
            try:
                link = links.take()
            except IndexError:
                link = links.wait(nested)
            if not link.open:
                new = True
                self._open(link)
            match call:
                case ScriptCall():
                    return link.call(call)
                case ScriptBatch():
                    return link.call_all(call)
                case Pipeline():
                    return link.ask(call)
        except ConnectionError as error:
            self._failed(error)
            raise
        except TimeoutError as error:
            if new:  # a waiter would get a new connection, which is as silent
                links.tell(error)
            raise
        finally:
            if link is not None:
                self._give_back(link)
            if not nested:
                links.users.discard(me)

    def send_ahead(self, call: ScriptCall) -> Callable[[], Any] | None:
        """Send the script on a connection that is open and free; None when there is none.

        The function returned waits for the reply: call it once, in this thread. Raises what `call` raises.
        """
        links, me = self.links, get_ident()
        if me in links.users or not links.free:
            return None
        link = None
        try:
            links.users.add(me)  # until the reply: what the thread calls meanwhile must not wait for its own connection
            link = links.take()
            link.send_ahead(call)
            return partial(self._receive, link, call, me)
        except BaseException as error:
            if link is not None:
                link.close()
            self._received(link, me)
            if isinstance(error, (RedisError, IndexError)):
                return None
            raise

    def _receive(self, link: ScriptConnection, call: ScriptCall, me: int) -> Any:
        try:
            return link.call(call, sent=True)
        except BaseException as error:
            if isinstance(error, ConnectionError):
                self._failed(error)
            if not isinstance(error, ResponseError):  # a signal perhaps, before the reply was read
                link.close()
            raise
        finally:
            self._received(link, me)

    def _received(self, link: ScriptConnection | None, me: int) -> None:
        if link is not None:
            self._give_back(link)
        self.links.users.discard(me)

    def _failed(self, error: ConnectionError) -> None:
        self.links.free.clear()  # a server that went away took the idle connections with it
        if isinstance(error, NotPrimary):
            self.links.distrust()
            self.room.distrust()

    def _give_back(self, link: ScriptConnection) -> None:
        self.links.give_back(link)
        if not self.watched and len(self.links.free) > 1:
            idle.housekeeper.watch(self)

    def close_idle(self, before: float, keep: int = 1) -> float:
        """Close the connections that nobody has used since then, all but so many, and the subscription.

        Return since when nobody has used the next to be closed, inf when there is none.
        """
        return min(self.room.close_idle(before), self.links.close_idle(before, keep))

    def renew(self, call: ScriptCall, patience: float) -> Any:
        """Run a renewal, and wait for so many seconds for its reply, but never for a connection that others use."""
        link = self._own_link() if os_threads.greenlets() else self.links.take_extra()
        patience = min(patience, self.timeout)
        link.limit(patience, patience)
        try:
            return link.call(call)
        except ConnectionError as error:
            self._failed(error)
            raise
        finally:
            link.limit(self.timeout, self.settings["socket_connect_timeout"])
            if not os_threads.greenlets():
                self._give_back(link)

    def _own_link(self) -> ScriptConnection:
        try:
            return self._of_thread.link  # type: ignore[no-any-return]
        except AttributeError:
            link = self._of_thread.link = ScriptConnection(self.connection())
            return link

    def leave(self) -> None:
        """Close what only the calling thread, which ends, could use."""
        link: ScriptConnection | None = vars(self._of_thread).pop("link", None)
        if link is not None:
            link.close()

    @property
    def ready(self) -> bool:
        """Whether a renewal finds an open connection; else it has to connect first, and that may take any time."""
        links = [getattr(self._of_thread, "link", None)] if os_threads.greenlets() else self.links.free[-1:]
        return any(link is not None and link.open for link in links)

    def _open(self, link: ScriptConnection) -> None:
        try:
            link.connect()
        except BaseException as error:
            link.close()
            if isinstance(error, (RedisError, OSError)):
                self.links.tell(error)
            raise

    def run(self, steps: Operation[T]) -> T:
        """Do what the steps ask for, and return their result."""
        proceed: Callable[[Any], Effect] = steps.send
        result: Any = None
        try:
            while True:
                try:
                    while True:  # within the try, because a signal handler may raise at any jump
                        result = self._do(proceed(result))
                        proceed = steps.send
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                except BaseException as error:
                    if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:  # the steps themselves ended with it
                        raise
                    proceed, result = steps.throw, error
        finally:
            # An error leads to this frame. If that led back, it would keep its locks alive, and renewed, until they are found
            # to be garbage.
            del proceed, result

    def _do(self, effect: Effect) -> Any:
        match effect:
            case ScriptCall() | ScriptBatch() | Pipeline():
                return self.call(effect)
            case Subscribe(lock, id, along):
                if not self.watched:
                    idle.housekeeper.watch(self)
                return self.room.join(lock, id, along)
            case WaitForWakeup(waiter, until, look):
                return self.room.wait(waiter, until, look)
            case Unsubscribe(waiter):
                return self.room.leave(waiter)
            case Sleep(seconds):
                return time.sleep(seconds)
            case Invoke(function):
                try:
                    return function(), None
                except BaseException as error:
                    return None, error
            case WaitForFuture(made, until):
                try:
                    return made.result(None if until == math.inf else max(0.0, until - monotonic()))
                except FutureTimeout:
                    return None


_by_pool: weakref.WeakKeyDictionary[Any, Server] = weakref.WeakKeyDictionary()
_by_settings: dict[Any, ref[Server]] = {}


def server_of(client: Redis | AsyncRedis | Server) -> Server:
    """Return the server that the client talks to.

    Raises TypeError for anything but a redis-py client with a connection pool, and for a client of fakeredis.
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
    kind = pool.connection_class
    if any(base.__module__.partition(".")[0] == "fakeredis" for base in kind.__mro__):
        raise TypeError(
            f"client uses connections of {kind.__module__}.{kind.__qualname__}, which have no socket and cannot run "
            "the lock scripts: use a real server, or switch the locks off with DJANGO_REDISLOCK = {'ENABLED': False}"
        )
    server = _by_pool[pool] = _shared(Server(client))
    return server


def _shared(server: Server) -> Server:
    """Return the server with the same settings that there is, or this one. Without a lock, because a destructor may come in."""
    key = server.connection_class, server._limit, identity(server.settings)

    def forget(gone: ref[Server]) -> None:
        if _by_settings.get(key) is gone:
            _by_settings.pop(key, None)

    mine = ref(server, forget)
    while True:
        found = _by_settings.setdefault(key, mine)
        kept = found()
        if kept is not None:
            return kept
        forget(found)


def close_unused() -> None:
    """Close all connections that nobody uses now; who needs one opens another."""
    for found in list(_by_settings.values()):
        server = found()
        if server is not None:
            server.close_idle(math.inf, keep=0)


def _connection(kind: Any, settings: dict[str, Any]) -> Any:
    return kind(**settings, **nameless(kind), retry=Retry(NoBackoff(), 0))


def _after_fork() -> None:
    for found in list(_by_settings.values()):
        server = found()
        if server is not None:
            _inherited.append(server.views)  # kept, because destructors would disturb the parent's connections
            server.reset()


_inherited: list[Any] = []


after_in_child(_after_fork)
