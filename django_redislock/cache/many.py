"""`get_or_set` for many keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from redis.exceptions import ClusterCrossSlotError, RedisError

from ..core.driver.async_server import async_server_of
from ..core.driver.registry import server_of
from ..core.driver.server import Server
from ..exceptions import LockBackendError
from .backends.base import RedisBackend
from .calling import called, current_task, read
from .lease.obtain import peek_many
from .lease.request import MISSING, Outcome, ValueRequest
from .lease.store import ABSENT
from .options import PLAIN, ManyOptions, Options, Timeout, checked, timeout_for
from .single_flight import Caller, brought, values_of

Missing = Callable[[list[Any]], Any]


class ManyMixin(RedisBackend):
    """`get_or_set_many` and its twin."""

    def get_or_set_many(
        self,
        keys: Iterable[Any],
        default: Missing,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[ManyOptions],
    ) -> dict[Any, Any]:
        """Return the values of the keys; ``default(missing_keys)`` returns a dict with those that are missing.

        Each missing key is computed once over all callers that want it, whatever other keys they want; a key that the dict
        does not have is left out. `options` are those of `get_or_set` but for `stale`, `refresh_before`, `refresh` and `on_error`.
        Raises what `default` raises, and redis-py's errors, if the base class does.
        """
        call = _Call(self, keys, default, timeout, version, options)
        if not call.locked:
            return self._get_or_set_many_unlocked(call)
        for reader, some in call.by_reader():
            try:
                try:
                    data = reader.mget(some)
                except ClusterCrossSlotError:
                    data = server_of(reader).run(peek_many(some))
                call.note(some, data)
            except LockBackendError as error:
                if not self._is_forgiving():
                    raise (error.__cause__ or error) from None
            except RedisError:
                if not self._is_forgiving():
                    raise
        call.show()
        for server, wants in call.missing(lambda key: default([key]).get(key, ABSENT)):
            caller = Caller(threading.current_thread(), server.room)
            call.take(server.run(values_of(wants, default, caller, call.wait, call.on_wait_timeout)))
        return call.values()

    async def aget_or_set_many(
        self,
        keys: Iterable[Any],
        default: Missing,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[ManyOptions],
    ) -> dict[Any, Any]:
        """Do as `get_or_set_many`; `default` may be a coroutine function, too."""
        call = _Call(self, keys, default, timeout, version, options)
        if not call.locked:
            return await self._aget_or_set_many_unlocked(call)
        for reader, some in call.by_reader():
            try:
                call.note(some, await read(server_of(reader), peek_many(some)))
            except LockBackendError as error:
                if not self._is_forgiving():
                    raise (error.__cause__ or error) from None

        async def one(key: Any) -> Any:
            return (await called(default, [key])).get(key, ABSENT)

        call.show()
        for server, wants in call.missing(one):
            tasks = async_server_of(server)
            caller = Caller(current_task(), tasks.room)
            steps = values_of(wants, partial(called, default), caller, call.wait, call.on_wait_timeout)
            call.take(await tasks.run(steps))
        return call.values()

    def _get_or_set_many_unlocked(self, call: _Call) -> dict[Any, Any]:
        found = self.get_many(call.keys, version=call.version)
        missing = [key for key in call.keys if key not in found]
        if missing:
            new = call.default(missing)
            for timeout, some in call.by_timeout(new):
                self.set_many(some, timeout, version=call.version)
            found |= new
        return found

    async def _aget_or_set_many_unlocked(self, call: _Call) -> dict[Any, Any]:
        found = await self.aget_many(call.keys, version=call.version)
        missing = [key for key in call.keys if key not in found]
        if missing:
            new = await called(call.default, missing)
            for timeout, some in call.by_timeout(new):
                await self.aset_many(some, timeout, version=call.version)
            found |= new
        return found


class _Call:
    """One call for many keys, on its way from what is stored to what is wanted."""

    def __init__(
        self,
        cache: Any,
        keys: Iterable[Any],
        default: Missing,
        timeout: Timeout,
        version: int | None,
        options: ManyOptions,
    ) -> None:
        wrong = options.keys() & {"stale", "refresh_before", "refresh", "on_error"}
        if wrong:
            raise TypeError(f"get_or_set_many() has no option {min(wrong)!r}")
        if not callable(default):
            raise TypeError(f"default must be a function of the missing keys, not {default!r}")
        self.cache = cache
        self.keys = list(dict.fromkeys(keys))
        self.default = default
        self.timeout = timeout
        self.version = version
        self.given: Options = checked("get_or_set_many", **options) if options else PLAIN
        self.made: dict[str, Any] = {cache._made(key, version): key for key in self.keys}
        self.found: dict[str, Any] = {}
        self.locked = self.given.lock and cache._protecting(next(iter(self.made), ""), timeout) is not None
        """Whether missing values are computed under leases."""

    def by_timeout(self, values: dict[Any, Any]) -> list[tuple[float | None, dict[Any, Any]]]:
        """Return the values, each with those of the same life."""
        groups: dict[Any, dict[Any, Any]] = {}
        for key, value in values.items():
            groups.setdefault(timeout_for(self.given.life(self.timeout), value), {})[key] = value
        return list(groups.items())

    def by_reader(self) -> list[tuple[Any, list[str]]]:
        """Return the clients to read from, each with its keys in Redis."""
        readers: dict[int, tuple[Any, list[str]]] = {}
        if self.cache._has_one_server:
            return [(self.cache._redis(made, write=False), list(self.made)) for made in list(self.made)[:1]]
        for made in self.made:
            reader = self.cache._redis(made, write=False)
            readers.setdefault(id(reader), (reader, []))[1].append(made)
        return list(readers.values())

    def note(self, made: list[str], data: list[bytes | None]) -> None:
        """Keep the stored values."""
        unpack, before = self.cache._unpack, len(self.found)
        for key, value in zip(made, data, strict=True):
            if value is not None and (unpacked := unpack(key, value)) is not MISSING:
                self.found[key] = unpacked
        self.cache._tally.count("hits", len(self.found) - before)

    def show(self) -> None:
        """Show the found values to the tools that watch the cache."""
        if self.cache._is_watched("get_many"):
            self.cache._show("get_many", self.values(), self.keys, version=self.version)

    def missing(self, one: Callable[[Any], Any]) -> list[tuple[Server, list[ValueRequest]]]:
        """Return the missing values by their servers; `one` computes the value of one of the caller's keys."""
        by_server: dict[Server, list[ValueRequest]] = {}
        for made, key in self.made.items():
            if made not in self.found:
                asked = self.cache._asked(key, None, self.timeout, self.version, self.given)
                self.wait, self.on_wait_timeout = asked.wait, asked.on_wait_timeout
                want = replace(asked.want, default=partial(one, key), asked_as=key)
                by_server.setdefault(want.server, []).append(want)
        return list(by_server.items())

    def take(self, landings: dict[str, Outcome]) -> None:
        """Take in what was computed."""
        for made, landing in landings.items():
            self.found[made] = brought(landing)

    def values(self) -> dict[Any, Any]:
        """Return the values by the caller's keys, in their order."""
        return {key: self.found[made] for made, key in self.made.items() if made in self.found}
