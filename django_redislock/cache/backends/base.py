"""The interface of a cache backend: its clients, keys, bytes and reads, and the tools that wrap its methods."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from asgiref.sync import AsyncToSync, sync_to_async
from django.core.cache.backends.base import BaseCache, default_key_func
from django.utils.functional import cached_property
from redis import Redis
from redis.client import Pipeline
from redis.commands.helpers import list_or_args
from redis.exceptions import ClusterCrossSlotError

from ...core import events
from ...core.driver.async_server import async_server_of
from ...core.driver.cluster.by_slot import is_crossing
from ...core.driver.effects import Operation, T
from ...core.driver.registry import server_of
from ...core.driver.server import Server
from ...exceptions import LockBackendError
from ..lease.request import MISSING, read_value, redis_error
from ..lease.store import unawaited
from ..options import Timeout, atimeout_for, call_any, timeout_for
from .overridden import Failure, Through, answer_at_hand, overridden_by, reported

if TYPE_CHECKING:
    Base = BaseCache
else:
    Base = object

F = TypeVar("F", bound=Callable[..., Any])


@lru_cache
def warn_once(message: str) -> None:
    """Log the warning once in each process."""
    events.log.warning(message)


def observed(method: F) -> F:
    """Make each call of a method of a cache a step of that name, about its first argument."""
    name: str = method.__name__
    first = list(inspect.signature(method).parameters)[1]

    def about(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return args[0] if args else options.get(first)

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def call(self: Any, *args: Any, **options: Any) -> Any:
            if not events.observers:
                return await method(self, *args, **options)
            with events.step(name, about(args, options)):
                return await method(self, *args, **options)

    else:

        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            if not events.observers:
                return method(self, *args, **options)
            with events.step(name, about(args, options)):
                return method(self, *args, **options)

    return call  # type: ignore[return-value]


class RedisBackend(Base):
    """The interface between the mixins and the backend that they are put in front of.

    Sentry and Django Debug Toolbar wrap `get` and `get_many` of each cache object, and count its hits and misses
    there. The wrappers of Sentry are not asynchronous. So `_report_read` calls them after a read by other means, in
    the same thread or task, and nothing is read again.
    """

    more_options: ClassVar[dict[str, Any]] = {}
    """Options of the base class that hold unless the settings have others."""
    _overridden: ClassVar[frozenset[str]] = frozenset()
    """The methods of a value that a subclass overrides."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._overridden = overridden_by(cls)

    def _through(self, key: Any, version: int | None, by_task: bool = False) -> Through | None:
        """Return the overridden methods for this value, None if there are none."""
        return Through(self, key, version, by_task) if self._overridden else None

    def get(self, key: Any, default: Any = None, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the value of the key, or `default`."""
        if reported.get() and (answer := answer_at_hand(self, key, default)) is not None:
            return answer[0]
        if args or kwargs:
            return super().get(key, default, version, *args, **kwargs)
        return super().get(key, default, version)  # every hit comes here: unpacking costs more than the rest of this

    def get_many(self, keys: Iterable[Any], version: int | None = None, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return the values of the keys that have one."""
        if reported.get() and (answer := answer_at_hand(self, keys, {})) is not None:
            return answer[0]  # type: ignore[no-any-return]
        return super().get_many(keys, version, *args, **kwargs)

    def _is_wrapped(self, method: str) -> bool:
        """Whether a tool wraps the method of this object."""
        return method in vars(self)

    def _report_read(self, method: str, value: Any, *args: Any, version: int | None) -> None:
        """Report this value to the tools as the result of the method for these arguments."""
        if self._is_wrapped(method):
            token = reported.set((value, self, args[0]))
            try:
                getattr(self, method)(*args, version=version)
            finally:
                reported.reset(token)

    def _get_from_primary(self, key: Any, default: Any = None, version: int | None = None) -> Any:
        """Do as `get`, but read no replica, because it may lag."""
        redis_key = self._redis_key(key, version)
        server = self._server_of(redis_key)
        if server is None or self._client_for(redis_key) is self._client_for(redis_key, write=False):
            return self.get(key, default, version)
        try:
            data, _ = server.run(read_value(redis_key, with_ttl=False))
        except LockBackendError as error:
            self._raise_unless_ignored(error, self._through(key, version))
            data = None
        value = MISSING if data is None else self._loads(redis_key, data)
        through = self._through(key, version)
        if through is not None and through.reads:
            value = through.read(value)
        else:
            self._report_read("get", value, key, MISSING, version=version)
        return default if value is MISSING else value

    def _server_of(self, redis_key: str) -> Server | None:
        """Return the server of the key, or None when locks do not work with its client."""
        return self._server_at(self._client_for(redis_key))

    def _server_at(self, client: Redis) -> Server | None:
        try:
            server = server_of(client)
        except TypeError as error:
            warn_once(f"The cache works without locks: {error}.")
            return None
        if server.is_fake:  # its Lua has no redis.sha1hex
            warn_once("fakeredis cannot run the scripts of values: each caller computes a missing value itself.")
            return None
        return server

    def _client_for(self, redis_key: str, write: bool = True) -> Redis:
        """Return the client of the primary that holds the key, or without `write` the client to read it from."""
        raise NotImplementedError

    @property
    def _has_one_server(self) -> bool:
        """Whether one server, with its replicas, has all keys."""
        raise NotImplementedError

    def _all_clients(self) -> list[Redis]:
        """Return a client for each primary, or the one for all of them."""
        return [self._client_for("")]

    def _clients_to_scan(self) -> list[Redis]:
        """Return clients that together find all keys."""
        return self._all_clients()

    def _redis_key(self, key: Any, version: int | None, *args: Any, **kwargs: Any) -> str:
        """Return the key in Redis."""
        return self.make_key(key, version)

    @cached_property
    def _has_own_keys(self) -> bool:
        """Whether code of the site takes part in making keys. It may ask the caller's thread, its database connection
        or its context for the tenant, so a task calls it by `sync_to_async`, as Django's asynchronous methods do."""
        are_plain = self.key_func is default_key_func and {"key_prefix", "version"} <= vars(self).keys()
        return not (are_plain and self._makes_keys_as_base)

    @property
    def _makes_keys_as_base(self) -> bool:
        """Whether no subclass overrides the method that makes keys."""
        return type(self).make_key is BaseCache.make_key

    def _stores(self, timeout: float | None) -> bool:
        """Whether the base class stores a value with this timeout at all."""
        raise NotImplementedError

    def _dumps(self, redis_key: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        """Return the bytes that the base class stores, and their expiry in milliseconds (None: never)."""
        raise NotImplementedError

    def _dumps_plainly(self, redis_key: str, value: Any, timeout: float | None) -> tuple[bytes, int | None]:
        """Do as `_dumps`, but add nothing to the timeout, because the age of the value follows from its expiry."""
        return self._dumps(redis_key, value, timeout)

    def _loads(self, redis_key: str, data: bytes) -> Any:
        """Return the value as the base class's `get` does, or MISSING."""
        raise NotImplementedError

    def _ignores_errors(self) -> bool:
        """Whether the base class ignores errors of Redis."""
        return False

    def _raise_unless_ignored(self, error: LockBackendError, through: Through | None = None) -> None:
        """Raise redis-py's error as the base class does, unless that ignores errors, or the overridden method does."""
        if self._ignores_errors():
            return
        if through is None:
            raise redis_error(error) from None
        through.read(Failure(redis_error(error)))

    def _get_or_set_unlocked(self, key: Any, default: Any, timeout: Timeout, version: int | None) -> Any:
        """Do as Django's own method, but take a function as the timeout, too."""
        value = self.get(key, MISSING, version=version)
        if value is MISSING:
            value = default
            if callable(default):
                with events.step("compute"):
                    value = default()
                if inspect.iscoroutine(value):
                    raise unawaited(value)
            self.add(key, value, timeout=timeout_for(timeout, value), version=version)
            value = self.get(key, value, version=version)
        return value

    async def _aget_or_set_unlocked(self, key: Any, default: Any, timeout: Timeout, version: int | None) -> Any:
        value = await self.aget(key, MISSING, version=version)
        if value is MISSING:
            value = default
            if callable(default):
                with events.step("compute"):
                    value = await call_any(default)
            await self.aadd(key, value, timeout=await atimeout_for(timeout, value), version=version)
            value = await self.aget(key, value, version=version)
        return value


async def run_read(server: Server, operation: Operation[T]) -> T:
    """Run an operation that only reads.

    The loop of an asynchronous view under WSGI lives for one request only. There the thread behind the loop runs the
    operation, because its connections stay open.
    """
    if ends_with_its_call(asyncio.get_running_loop()):
        return await sync_to_async(server.run)(operation)
    return await async_server_of(server).run(operation)


def ends_with_its_call(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop was made by `async_to_sync`, or for an asynchronous view under WSGI, and ends with that call."""
    return loop in getattr(AsyncToSync, "loop_thread_executors", ())


class SplittingRedis(Redis):
    """redis-py's client for a server that may be in cluster mode: it sends what is about many values slot by slot.

    So the methods for many keys of the base classes work there. Such a server refuses (CROSSSLOT) one command, or one
    transaction, for keys of several slots. Only reads, deletions and plain writes are split, for which the base
    classes promise no more than a result for each key.
    """

    def mget(self, keys: Any, *args: Any) -> Any:
        """Return the values of keys in any slots."""
        names = list_or_args(keys, args)
        found = self._in_one(super().mget, names)
        return self._in_many([("GET", name) for name in names]) if found is None else found

    def delete(self, *names: Any) -> Any:
        """Delete keys in any slots; return their number."""
        found = self._in_one(super().delete, names)
        return sum(self._in_many([("DEL", name) for name in names])) if found is None else found

    def _in_one(self, method: Callable[..., Any], names: Sequence[Any]) -> Any:
        """Return the method's result, or None if the keys have to be sent one by one."""
        if len(names) > 1 and server_of(self).splits:
            return None
        try:
            return method(*names)
        except ClusterCrossSlotError as error:
            is_crossing(error, server_of(self))
            return None

    def _in_many(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        pipeline = Pipeline(self.connection_pool, self.response_callbacks, False, None)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        return pipeline.execute()

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        """Return a pipeline that gives up its transaction if it only writes values, and these are in several slots."""
        pipeline = _SplittingPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipeline.made_by = self
        return pipeline


class _SplittingPipeline(Pipeline):
    made_by: SplittingRedis

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = [args for args, _ in self.command_stack]
        plain = not (self.watching or self.explicit_transaction) and PLAIN_WRITES.issuperset(
            args[0] for args in commands
        )
        try:
            return super().execute(raise_on_error)
        except ClusterCrossSlotError as error:
            if not plain:
                raise
            is_crossing(error, server_of(self.made_by))
        each: list[tuple[Any, ...]] = []
        for args in commands:
            pairs = zip(args[1::2], args[2::2], strict=True)
            each += [("SET", *pair) for pair in pairs] if args[0] == "MSET" else [args]
        return self.made_by._in_many(each)


PLAIN_WRITES = frozenset({"SET", "MSET", "DEL", "UNLINK", "EXPIRE", "PEXPIRE"})
"""The commands that the base classes send in one transaction."""


def as_bytes(value: Any) -> bytes:
    """Return a serialized value as redis-py would send it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value).encode()
    return value.encode() if isinstance(value, str) else bytes(value)
