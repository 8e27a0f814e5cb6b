"""`get_or_set` for many keys."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from asgiref.sync import sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT

from ..core import events
from ..core.driver.async_server import async_server_of
from ..core.driver.registry import server_of
from ..core.driver.server import Server
from ..exceptions import LockBackendError
from .backends.base import RedisBackend, observed, run_read
from .backends.overridden import Through
from .lease.many import DefaultForMany, get_values
from .lease.request import LARGE_TO_DECODE, MISSING, Caller, Outcome, ValueRequest, read_values
from .lease.single_flight import result_of
from .lease.store import ABSENT
from .options import (
    DEFAULTS,
    CheckedOptions,
    GetOrSetCall,
    ManyOptions,
    Timeout,
    call_any,
    in_thread_of_task,
    timeout_for,
    validate,
)


class ManyMixin(RedisBackend):
    """`get_or_set_many` and `aget_or_set_many`."""

    @observed
    def get_or_set_many(
        self,
        keys: Iterable[Any],
        default: DefaultForMany,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[ManyOptions],
    ) -> dict[Any, Any]:
        """Return the values of the keys; ``default(missing_keys)`` returns a dict of the missing values.

        Each missing value is computed once over all callers, even if their sets of keys differ: this call computes
        those that nobody computes, and then waits for the others, one after another. A key that the dict does not have
        is left out. `timeout` is in seconds, or a function of each value. `options` are those of
        `get_or_set` without `stale`, `refresh_before`, `refresh` and `on_error`.

        Raises what `get_or_set` raises; the first error of `default` ends the call.
        """
        many = _ManyRequest(self, keys, default, timeout, version, options)
        if not many.locked:
            return self._get_or_set_many_unlocked(many)
        for reader, some in many.by_reader():
            try:
                server = server_of(reader)
                many.add_stored(some, server.run(read_values(server, some)))
            except LockBackendError as error:
                self._raise_unless_ignored(error, many.through(some[0]))
        many.report()
        for server, requests in many.missing(lambda key: default([key]).get(key, ABSENT)):
            caller = Caller.thread(server)
            many.add_outcomes(server.run(get_values(requests, default, caller, many.wait, many.on_wait_timeout)))
        return many.values()

    @observed
    async def aget_or_set_many(
        self,
        keys: Iterable[Any],
        default: DefaultForMany,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[ManyOptions],
    ) -> dict[Any, Any]:
        """Do as `get_or_set_many`; `default` may be a coroutine function, too."""
        prepare = partial(_ManyRequest, self, keys, default, timeout, version, options, by_task=True)
        many = await sync_to_async(prepare)() if self._has_own_keys else prepare()
        if not many.locked:
            return await self._aget_or_set_many_unlocked(many)
        for reader, some in many.by_reader():
            try:
                server = server_of(reader)
                data = await run_read(server, read_values(server, some))
                if self._overridden:
                    await sync_to_async(many.add_stored)(some, data)
                elif sum(map(len, filter(None, data))) < LARGE_TO_DECODE:
                    many.add_stored(some, data)
                else:
                    await asyncio.to_thread(many.add_stored, some, data)
            except LockBackendError as error:
                if self._overridden:
                    await sync_to_async(self._raise_unless_ignored)(error, many.through(some[0]))
                else:
                    self._raise_unless_ignored(error)

        async def compute_one(key: Any) -> Any:
            return (await call_any(default, [key])).get(key, ABSENT)

        many.report()
        for server, requests in many.missing(compute_one):
            tasks = async_server_of(server)
            caller = Caller.task(tasks)
            late = in_thread_of_task(many.on_wait_timeout)
            operation = get_values(requests, partial(call_any, default), caller, many.wait, late)
            many.add_outcomes(await tasks.run(operation))
            many.found |= {key: await value for key, value in many.found.items() if inspect.iscoroutine(value)}
        return many.values()

    def _get_or_set_many_unlocked(self, many: _ManyRequest) -> dict[Any, Any]:
        found = self.get_many(many.keys, version=many.version)
        missing = [key for key in many.keys if key not in found]
        if missing:
            with events.step("compute"):
                computed = many.default(list(missing))
            new = many.asked_for(missing, computed)
            for timeout, some in many.by_timeout(new):
                self.set_many(some, timeout, version=many.version)
            found |= new
        return found

    async def _aget_or_set_many_unlocked(self, many: _ManyRequest) -> dict[Any, Any]:
        found = await self.aget_many(many.keys, version=many.version)
        missing = [key for key in many.keys if key not in found]
        if missing:
            with events.step("compute"):
                computed = await call_any(many.default, list(missing))
            new = many.asked_for(missing, computed)
            calls_site = callable(many.timeout) or many.checked.should_cache
            for timeout, some in await sync_to_async(many.by_timeout)(new) if calls_site else many.by_timeout(new):
                await self.aset_many(some, timeout, version=many.version)
            found |= new
        return found


class _ManyRequest:
    """One call for many keys: the values that were found, and the requests for the missing ones."""

    def __init__(
        self,
        cache: Any,
        keys: Iterable[Any],
        default: DefaultForMany,
        timeout: Timeout,
        version: int | None,
        options: ManyOptions,
        by_task: bool = False,
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
        self.by_task = by_task
        self.checked: CheckedOptions = validate("get_or_set_many", **options) if options else DEFAULTS
        self.redis_keys: dict[str, Any] = {cache._redis_key(key, version): key for key in self.keys}
        self.found: dict[str, Any] = {}
        first = next(iter(self.redis_keys), "")
        self.locked = self.checked.lock and cache._lease_server(first, timeout) is not None
        """Whether missing values are computed under leases."""

    def asked_for(self, keys: list[Any], values: dict[Any, Any]) -> dict[Any, Any]:
        """Return the values of these keys."""
        return {key: values[key] for key in keys if key in values}

    def by_timeout(self, values: dict[Any, Any]) -> list[tuple[float | None, dict[Any, Any]]]:
        """Return the values that are stored, in groups of the same timeout."""
        groups: dict[Any, dict[Any, Any]] = {}
        for key, value in values.items():
            groups.setdefault(timeout_for(self.checked.timeout_without_lease(self.timeout), value), {})[key] = value
        return [group for group in groups.items() if self.cache._stores(group[0])]

    def by_reader(self) -> list[tuple[Any, list[str]]]:
        """Return the clients to read from, each with its keys in Redis."""
        redis_keys = list(self.redis_keys)
        if redis_keys and self.cache._has_one_server:
            return [(self.cache._client_for(redis_keys[0], write=False), redis_keys)]
        readers: dict[int, tuple[Any, list[str]]] = {}
        for redis_key in redis_keys:
            reader = self.cache._client_for(redis_key, write=False)
            readers.setdefault(id(reader), (reader, []))[1].append(redis_key)
        return list(readers.values())

    def add_stored(self, redis_keys: list[str], data: list[bytes | None]) -> None:
        """Add the values that were read."""
        loads, before = self.cache._loads, len(self.found)
        if self.cache._overridden:

            def loads(key: str, data: bytes) -> Any:
                return self.cache._loads_through(self.through(key), key, data)

        for key, value in zip(redis_keys, data, strict=True):
            if value is not None and (loaded := loads(key, value)) is not MISSING:
                self.found[key] = loaded
        self.cache._counters.count("hits", len(self.found) - before)

    def through(self, redis_key: str) -> Through | None:
        """Return the overridden methods for this value."""
        return self.cache._through(self.redis_keys[redis_key], self.version, self.by_task)  # type: ignore[no-any-return]

    def report(self) -> None:
        """Report the values that were found to the tools that wrap the cache."""
        if self.cache._is_wrapped("get_many"):
            self.cache._report_read("get_many", self.values(), self.keys, version=self.version)

    def missing(self, compute_one: Callable[[Any], Any]) -> list[tuple[Server, list[ValueRequest]]]:
        """Return the requests for the missing values by server; `compute_one` computes the value of one key."""
        by_server: dict[Server, list[ValueRequest]] = {}
        call: GetOrSetCall | None = None
        for redis_key, key in self.redis_keys.items():
            if redis_key in self.found:
                continue
            compute = partial(compute_one, key)
            if call is None or not self.cache._has_one_server or self.cache._overridden:
                about = (self.timeout, self.version, self.checked, redis_key, self.by_task)
                call = self.cache._prepare(key, compute, *about)
                request = call.request
                self.wait, self.on_wait_timeout = call.wait, call.on_wait_timeout
            else:
                request = replace(call.request, key=redis_key, caller_key=key, default=compute)
            by_server.setdefault(request.server, []).append(request)
        return list(by_server.items())

    def add_outcomes(self, outcomes: dict[str, Outcome]) -> None:
        """Add the computed values."""
        for redis_key, outcome in outcomes.items():
            self.found[redis_key] = result_of(outcome)

    def values(self) -> dict[Any, Any]:
        """Return the values by the caller's keys, in their order."""
        return {key: self.found[redis_key] for redis_key, key in self.redis_keys.items() if redis_key in self.found}
