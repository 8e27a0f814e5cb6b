"""The synchronous driver: one Redis server, with our own connections to it.

They are made like the given client's own connections; those may all be in use, may wait for hours by a retry policy, or
may decode replies. A call borrows a connection for its duration. A thread that waits for a lock borrows none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeout
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError, TimeoutError

from .. import events
from ..clock import monotonic
from . import effects, idle, os_threads
from .connection import Connection, new_connection
from .effects import (
    CallAside,
    Effect,
    Invoke,
    Operation,
    Patient,
    Pipeline,
    RunAt,
    RunAtEach,
    ScriptBatch,
    ScriptCall,
    Sleep,
    Subscribe,
    WaitForFuture,
    WaitForWakeup,
    Within,
)
from .janitor import Janitor
from .kinds import inherited_settings, is_fake, place_of, settings_of, sync_connection_kind
from .pool import ConnectionPool
from .process import notice_fork
from .resp import NotPrimary
from .sentinels import SentinelService
from .wakeups import Refusal
from .wakeups_threads import WaitingRoom

DEFAULT_TIMEOUT = 5.0
MAX_CONNECTIONS = 16
RETRY_FOR_BY_SENTINEL = 40.0
"""Longer than a failover by Sentinel takes: by default it waits 30 s before it considers the primary down."""

T = TypeVar("T")


class Endpoint(NamedTuple):
    """Where a server is, and how to connect to it."""

    place: Any = None
    connection_class: Any = None
    """redis-py's class of the connections; None: the server is in memory."""
    settings: dict[str, Any] = {}
    """The arguments of that class."""
    limit: int = 0
    """How many connections calls may use at the same time."""


def endpoint_of(client: Redis | AsyncRedis) -> Endpoint:
    """Return where the client's server is, with the settings that our connections inherit from the client."""
    pool = client.connection_pool
    given = settings_of(pool)
    kind: Any = pool.connection_class
    settings = inherited_settings(given)
    if isinstance(client, AsyncRedis):
        kind, settings = sync_connection_kind(kind, settings)
    if "connection_pool" in settings:
        settings["connection_pool"] = SentinelService(settings["connection_pool"])
    timeout = given.get("socket_timeout", DEFAULT_TIMEOUT) or DEFAULT_TIMEOUT
    connect = given.get("socket_connect_timeout") or timeout
    settings |= {"socket_timeout": timeout, "socket_connect_timeout": connect, "protocol": 2}
    return Endpoint(place_of(pool), kind, settings, max(1, min(pool.max_connections, MAX_CONNECTIONS)))


class Server(Patient):
    """One Redis server as this process sees it, shared by all clients with the same settings.

    The clients, the locks and the leases keep it alive. It must not refer back to any of them, so that its connections
    close at once when all of those are gone.
    """

    watched = False
    """Whether the housekeeper will close its idle connections."""
    grants_all = False
    """Whether every caller gets every lock, and no lock is lost."""
    splits = False
    """Whether it runs a script for one slot only, so that calls about many locks are split by slot."""
    one_of_several = False
    """Whether it is one of several primaries of a Cluster, and the client knows no other: no lock is acquired there."""
    is_fake = False
    """Whether it is one of fakeredis, for tests."""
    answered_in: float | None = None
    """How many seconds its answers took of late, as quorum locks measure them; None: it gave none."""
    watchdog: Any
    """The watchdog of the locks held there; the first such lock sets it, and the driver does not use it."""
    view_kind: ClassVar[type[Any] | None] = None
    """The class of the views of event loops, None for `AsyncServer`."""

    def __init__(self, endpoint: Endpoint, min_replicas: int = 0) -> None:
        self.views: dict[Any, Any] = {}
        """The `AsyncServer` of each event loop."""
        self.janitor = Janitor()
        self.place, self.connection_class, self.settings, self.limit = endpoint
        if self.connection_class is not None and is_fake(self.connection_class):
            self.is_fake = True
        self.min_replicas = min_replicas
        """How many replicas must confirm a lock."""
        self.timeout = self.settings.get("socket_timeout", DEFAULT_TIMEOUT)
        self.patience = max(self.timeout, self.settings.get("socket_connect_timeout", self.timeout))
        """Seconds for which a thread or task waits for another one that connects for it."""
        self.forget_connections()

    def forget_connections(self) -> None:
        """Forget every connection without touching it: in a forked child they are the parent's."""
        self.views = {}
        self.watched = False
        kind, settings = self.connection_class, self.settings  # not `self`, which the functions below would keep alive
        self.pool = ConnectionPool(self.limit, self.timeout, lambda: new_connection(kind, settings))
        self.refusal = Refusal()
        self.room = WaitingRoom(lambda: new_connection(kind, settings), self.patience, self.refusal)

    def __del__(self) -> None:
        for view in list(vars(self).get("views", {}).values()):  # none if it was not made, because of an error
            view.end_soon()

    @property
    def retry_for(self) -> float:
        """Seconds for which calls are repeated while it cannot be reached, unless the caller's deadline is nearer."""
        by_kind = RETRY_FOR_BY_SENTINEL if "connection_pool" in self.settings else effects.RETRY_FOR
        return by_kind if effects.retry_for is None else effects.retry_for

    def connection(self) -> Connection:
        """Return a new connection, not connected yet."""
        return new_connection(self.connection_class, self.settings)

    def call(self, call: ScriptCall | ScriptBatch | Pipeline) -> Any:
        """Run a script, several scripts or commands on a borrowed connection."""
        if not events.observers:
            return self._call(call)
        with events.step("command", (self.place, call)):
            return self._call(call)

    def _call(self, call: ScriptCall | ScriptBatch | Pipeline, patience: float | None = None) -> Any:
        pool = self.pool
        connection, new = None, False
        try:
            try:
                connection = pool.take()
            except IndexError:
                connection = pool.wait()
            new = not connection.open
            if patience is not None:
                connection.set_timeouts(patience, patience)
            return connection.execute(call)
        except (ConnectionError, TimeoutError) as error:
            if isinstance(error, ConnectionError):
                self._note_broken(error)
            if new:  # a waiter would get a new connection, too, and fare no better
                pool.notify(error)
            raise
        finally:
            if connection is not None:
                if patience is not None:
                    connection.set_timeouts(self.timeout, self.settings["socket_connect_timeout"])
                self._give_back(connection)

    def call_within(self, call: ScriptCall | Pipeline, seconds: float) -> Any:
        """Run a script or commands as `call` does, and wait so many seconds for the reply, and as many to connect."""
        with events.step("command", (self.place, call)) if events.observers else nullcontext():
            return self._call(call, min(seconds, self.timeout))

    def send_ahead(self, call: ScriptCall) -> Callable[[], Any] | None:
        """Send a script on a connection that is open and free; None when there is none.

        The returned function waits for the reply: call it once, in this thread. It raises what `call` raises, and
        NoScriptError.
        """
        connection = None
        try:
            connection = self.pool.take()
            connection.send_ahead(call)
            return partial(self._receive, connection, call)
        except BaseException as error:
            if connection is not None:
                connection.close()
                self._give_back(connection)
            if isinstance(error, (RedisError, IndexError)):
                return None
            raise

    def _receive(self, connection: Connection, call: ScriptCall) -> Any:
        try:
            return connection.receive_for(call)
        except BaseException as error:
            if isinstance(error, ConnectionError):
                self._note_broken(error)
            if not isinstance(error, ResponseError):  # a signal perhaps, before the reply was read
                connection.close()
            raise
        finally:
            self._give_back(connection)

    def _note_broken(self, error: ConnectionError) -> None:
        self.pool.free.clear()  # a server that went away took the idle connections with it
        if isinstance(error, NotPrimary):
            self.pool.distrust()
            self.room.distrust()

    def _give_back(self, connection: Connection) -> None:
        self.pool.give_back(connection)
        if not self.watched and len(self.pool.free) > 1:
            idle.housekeeper.watch(self)

    def close_idle(self, before: float, keep: int = 1) -> float:
        """Close the connections that were last used before this time, all but `keep`, and the subscription.

        Return when the next one to be closed was last used, inf when there is none.
        """
        return min(self.room.close_idle(before), self.pool.close_idle(before, keep))

    def renew(self, call: Any, patience: float) -> Any:
        """Run a renewal, or several ones, and wait so many seconds for its reply, but never for others' connections.

        It is no effect, so a script that the server does not know is sent with its text here.
        """
        connection = self.pool.take_extra()
        patience = min(patience, self.timeout)
        connection.set_timeouts(patience, patience)
        try:
            try:
                return connection.execute(call)
            except NoScriptError:
                return connection.execute(call.with_text())
        except ConnectionError as error:
            self._note_broken(error)
            raise
        finally:
            connection.set_timeouts(self.timeout, self.settings["socket_connect_timeout"])
            if not os_threads.green_sockets():
                self._give_back(connection)

    def leave(self) -> None:
        """Close the connection that only the calling thread, which ends, could use."""
        self.pool.leave()

    def send_in_any_case(self, call: ScriptCall) -> None:
        """Have the call sent by a thread until it is answered; any order with other calls, and any number of times,
        must be right.

        A signal handler and a destructor may call this, at any point.
        """
        self.janitor.send(self, call)

    @property
    def ready(self) -> bool:
        """Whether a renewal finds an open connection; otherwise it has to connect first, which may take any time."""
        return self.pool.ready

    def run(self, operation: Operation[T]) -> T:
        """Carry out the effects of the operation, and return its result. A forked child notices its fork before."""
        notice_fork()
        return self.carry_out(operation)

    def carry_out(self, operation: Operation[T]) -> T:
        """Do as `run`, for a caller that has noticed a fork already, as a lock does when it asks who acquires."""
        proceed: Callable[[Any], Effect] = operation.send
        result: Any = None
        try:
            while True:
                try:
                    while True:  # inside the try, because a signal handler may raise at any jump
                        result = self._do(proceed(result))
                        proceed = operation.send
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                except BaseException as error:
                    if inspect.getgeneratorstate(operation) == inspect.GEN_CLOSED:  # the operation itself ended with it
                        raise
                    proceed, result = operation.throw, error
        except BaseException:
            # A signal may come between an effect and the operation, which would wait until no traceback refers to it.
            operation.close()
            raise
        finally:
            # An error refers to this frame. If the frame referred to the error, the cycle would keep the locks alive
            # and renewed until the garbage collector finds it.
            del proceed, result

    def _do(self, effect: Effect) -> Any:
        # One case for each effect; the calls of scripts come first, because a lock that is free needs nothing else.
        match effect:
            case ScriptCall() | ScriptBatch() | Pipeline():
                return self.call(effect)
            case Subscribe(lock, id):
                if not self.watched:
                    idle.housekeeper.watch(self)
                return self.room.register(lock, id)
            case WaitForWakeup(waiter, until, poll_at):
                return self.room.wait(waiter, until, poll_at)
            case Sleep(seconds):
                return os_threads.sleep(seconds)
            case Invoke(function):
                try:
                    with events.step("compute") if events.observers else nullcontext():
                        return function(), None
                except BaseException as error:
                    return None, error
                finally:
                    notice_fork()  # in the function; its child must not go on with what the parent began
            case CallAside(function):
                return function()
            case Within(call, seconds):
                return self.call_within(call, seconds)
            case RunAt(server, operation):
                return server.carry_out(operation)
            case RunAtEach(operations, _):
                for server, operation in operations:
                    server.carry_out(operation)
                return None
            case WaitForFuture(future, until):
                if os_threads.hub() is not None:  # the leader may be a greenlet of this thread
                    return _result_for_greenlet(future, until)
                try:
                    return future.result(None if until == math.inf else max(0.0, until - monotonic()))
                except FutureTimeout:
                    if until - monotonic() > 0.05:  # a signal handler raised it; a greenlet's timer may end early
                        raise
                    return None


def _result_for_greenlet(future: Future[T], until: float) -> T | None:
    """Return the result of the future; None when the time is over. Other greenlets run meanwhile."""
    done = os_threads.event()
    future.add_done_callback(lambda _: done.set())
    while not future.done():
        left = until - monotonic()
        if left <= 0:
            return None
        done.wait(left)
    return future.result(0)
