"""A `get_or_set` that computes a missing value once, for any Redis cache backend."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import DatabaseError, connections
from django.utils.functional import cached_property
from redis.exceptions import TimeoutError

from .. import conf
from ..core.driver.async_server import async_server_of
from ..core.driver.registry import server_of
from ..core.driver.server import Server
from ..exceptions import ComputationFailed, LockBackendError, is_interruption
from .backends.base import observed, run_read
from .backends.overridden import Through
from .invalidation import InvalidatingMixin
from .lease.counters import Counters, Tally
from .lease.request import LARGE_TO_DECODE, MISSING, Caller, ValueRequest, read_value, report_silence
from .lease.single_flight import get_value, refresh_or_stale, result_of, stale_instead
from .locks import LocksMixin
from .many import ManyMixin
from .options import (
    DEFAULTS,
    CheckedOptions,
    GetOrSetCall,
    GetOrSetOptions,
    Timeout,
    call_any,
    in_thread_of_task,
    timeout_for,
    validate,
    with_stale_and_jitter,
)
from .refresh import RefreshMixin, check_importable
from .stats import alias_of, counters_for

OPTION = "CACHES[…]['OPTIONS']['LOCK']"
MAX_TEXT = 1000
"""Number of characters of an error's text that are sent."""
MAX_PICKLE = 32768
"""Number of bytes up to which an exception itself is sent."""


class ComputeOnceMixin(ManyMixin, RefreshMixin, LocksMixin, InvalidatingMixin):
    """Computes missing values once. It stands left of a Redis cache backend that has the methods of `RedisBackend`."""

    _read_settings: tuple[conf.CacheSettings, conf.CacheSettings] | None = None
    """The settings of all aliases, and those of this alias."""

    def __init__(self, server: Any, params: dict[str, Any]) -> None:
        options = dict(params.get("OPTIONS") or {})  # the dict is shared by all instances of the alias
        # A wrong option is an error at the first use, not here: Django's own checks make every cache, and an error here
        # would stop them before our check reports it.
        self._lock_options = options.pop("LOCK", {})
        self._constructor_args = server, params
        super().__init__(server, {**params, "OPTIONS": self.more_options | options})  # type: ignore[call-arg]

    @observed
    def get_or_set(
        self,
        key: Any,
        default: Any,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetOptions],
    ) -> Any:
        """Return the value of the key. If it is missing, one of all callers computes it by `default()` and stores it.

        `timeout` is a number of seconds, None (the value never expires), or a function of the value that returns one of
        them. A value with a timeout of 0 is not stored, but returned to all callers that wait for it.

        The other callers wait for the value at most `wait` seconds (None: without limit). Then `on_wait_timeout`
        decides: "compute" the value for this caller, "raise" AcquireTimeout, return the "stale" value if there is one,
        or return the given value (a function is called, and its result returned).

        The computing caller holds a lease. It expires after `expire` seconds, is renewed while `default` runs (if
        `auto_renewal`), and ends after `max_hold` seconds at the latest; then another caller computes. The loss of a
        lease is no error. A value that was set or deleted during the computation is not overwritten. A value for which
        `should_cache` returns false is not stored, but returned to all callers that wait for it. `jitter`, from 0 to
        1, is the share by which timeouts are shortened at random. Options that are not given come from
        ``OPTIONS["LOCK"]`` and ``DJANGO_REDISLOCK["CACHE"]``.

        With `stale` a value is kept that many seconds after its timeout, and with `refresh_before` it is due that many
        seconds before its timeout, unless a function gave it a timeout that is not longer. One caller refreshes a value
        that is due: `refresh` "inline", in a "thread" or in a "celery" worker. All other callers get the stale value at
        once, or with ``on_wait_timeout="stale"`` after `wait` seconds. After a failed refresh the next one waits for a
        pause, which grows from a second to a minute. With ``on_error="stale"`` the refreshing caller, too, gets the
        stale value in place of the error, which is logged; but not of an error that has broken the transaction of the
        caller.

        Without `lock`, with a default that is not callable, or with a timeout of 0, this is Django's own method.

        Raises the error of `default`, AcquireTimeout, TypeError and ValueError for bad arguments, and redis-py's errors
        if the base class raises them.
        """
        checked = validate("get_or_set", **options) if options else DEFAULTS
        if not callable(default) or not checked.lock:
            return self._get_or_set_unlocked(key, default, checked.timeout_without_lease(timeout), version)
        if checked.refresh == "celery":
            check_importable(default, checked.should_cache, timeout)
        if not checked.due:
            value = self.get(key, MISSING, version=version)
            if value is not MISSING:
                self._counters.count("hits")
                return value
        if checked.refresh != "celery" and iscoroutinefunction(default):  # here, because a hit shall not pay for it
            raise TypeError(f"get_or_set() cannot await the coroutine function {default!r}: use aget_or_set()")
        call = self._prepare(key, default, timeout, version, checked)
        if call is None:
            return self._get_or_set_unlocked(key, default, checked.timeout_without_lease(timeout), version)
        if checked.due:
            value = self._stored_or_refreshed(call, key, default, timeout, version)
            if value is not MISSING:
                return value
        server = call.request.server
        return result_of(server.run(get_value(call.request, Caller.thread(server), call.wait, call.on_wait_timeout)))

    def _stored_or_refreshed(
        self, call: GetOrSetCall, key: Any, default: Any, timeout: Timeout, version: int | None
    ) -> Any:
        """Return the stored value, MISSING if there is none. If it is due, refresh it, or have it refreshed."""
        request, checked = call.request, call.options
        try:
            reader = server_of(self._client_for(request.key, write=False))
            data, ttl_ms = reader.run(read_value(request.key, with_ttl=True))
        except LockBackendError as error:
            self._raise_unless_ignored(error, request.through)
            data, ttl_ms = None, -2
        value = MISSING if data is None else request.loads(request.key, data)
        if request.through is None:
            self._report_read("get", value, key, MISSING, version=version)
        if value is MISSING or data is None:
            return MISSING
        call = call.of_stored(timeout, value, ttl_ms)
        request = call.request
        if ttl_ms == -1 or ttl_ms > request.due_ms:
            request.counters.count("hits")
            return value
        if checked.refresh == "inline":
            server = request.server
            outcome = server.run(refresh_or_stale(request, Caller.thread(server), data, value, call.wait_with_stale()))
            if outcome.error is not None and call.hides_errors and may_hide(outcome.error):
                outcome = stale_instead(request, outcome.error, value)
            return result_of(outcome)
        self._begin_refresh(call, key, default, timeout, version, data, ttl_ms)
        request.counters.count("stale_served")
        return value

    @observed
    async def aget_or_set(
        self,
        key: Any,
        default: Any,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetOptions],
    ) -> Any:
        """Do as `get_or_set`; `default` may also be a coroutine function, or return an awaitable.

        The caller waits in the event loop, over connections of the loop, and blocks no other work of `sync_to_async`.
        A default that is no coroutine function runs where `sync_to_async` runs it, and so do a KEY_FUNCTION, `timeout`,
        `should_cache` and `on_wait_timeout`; a caller that is cancelled while its default runs waits for its end, so
        that no other caller computes beside it. With ``refresh="thread"`` a task refreshes.
        """
        checked = validate("aget_or_set", **options) if options else DEFAULTS
        if checked.refresh == "celery":
            check_importable(default, checked.should_cache, timeout)
        call = None
        if callable(default) and checked.lock:
            prepare = partial(self._prepare, key, lambda: call_any(default), timeout, version, checked, by_task=True)
            call = await sync_to_async(prepare)() if self._has_own_keys else prepare()
        if call is None:
            return await self._aget_or_set_unlocked(key, default, checked.timeout_without_lease(timeout), version)
        request = call.request
        if request.through is not None and not checked.due:
            value = await self.aget(key, MISSING, version=version)
            if value is not MISSING:
                request.counters.count("hits")
                return value
            return await self._aget_missing(call)
        try:
            reader = server_of(self._client_for(request.key, write=False))
            data, ttl_ms = await run_read(reader, read_value(request.key, with_ttl=bool(checked.due)))
        except LockBackendError as error:
            if request.through is None:
                self._raise_unless_ignored(error)
            else:
                await sync_to_async(self._raise_unless_ignored)(error, request.through)
            if isinstance(error.__cause__, TimeoutError):
                report_silence(request, error)
                request = replace(request, is_silent=True)
                call = call._replace(request=request)
            data, ttl_ms = None, -2
        if request.through is not None:
            value = MISSING if data is None else await sync_to_async(request.loads)(request.key, data)
        elif data is None or len(data) < LARGE_TO_DECODE:
            value = MISSING if data is None else self._loads(request.key, data)
        else:
            value = await asyncio.to_thread(self._loads, request.key, data)
        if request.through is None:
            self._report_read("get", value, key, MISSING, version=version)
        server = async_server_of(request.server)
        caller = Caller.task(server)
        if value is not MISSING and data is not None:
            if call.asks_timeout(timeout, ttl_ms):
                call = await sync_to_async(call.of_stored)(timeout, value, ttl_ms)
            request = call.request
            if not checked.due or ttl_ms == -1 or ttl_ms > request.due_ms:
                request.counters.count("hits")
                return value
            if checked.refresh == "inline":
                outcome = await server.run(refresh_or_stale(request, caller, data, value, call.wait_with_stale()))
                # `sync_to_async` has the connections, and so the transaction, of the synchronous code around the loop.
                if outcome.error is not None and call.hides_errors and await sync_to_async(may_hide)(outcome.error):
                    outcome = stale_instead(request, outcome.error, value)
                return result_of(outcome)
            await self._abegin_refresh(call, key, default, timeout, version, data, ttl_ms)
            request.counters.count("stale_served")
            return value
        return await self._aget_missing(call)

    async def _aget_missing(self, call: GetOrSetCall) -> Any:
        server = async_server_of(call.request.server)
        late = in_thread_of_task(call.on_wait_timeout)
        value = result_of(await server.run(get_value(call.request, Caller.task(server), call.wait, late)))
        return await value if inspect.iscoroutine(value) else value

    def stats(self) -> Tally:
        """Return the counts of hits, computations and waits of this process for this cache alias."""
        return self._counters.read()

    def _lease_server(self, redis_key: str, timeout: Timeout) -> Server | None:
        """Return the server of the lease for a value of this timeout; None when no lease is needed."""
        stores = callable(timeout) or self._stores(timeout)
        return self._server_of(redis_key) if stores and conf.get().enabled else None

    def _prepare(
        self,
        key: Any,
        default: Any,
        timeout: Timeout,
        version: int | None,
        checked: CheckedOptions,
        redis_key: str | None = None,
        by_task: bool = False,
    ) -> GetOrSetCall | None:
        """Return the call with its request; None when the base class's method is enough."""
        if checked.refresh_before and not callable(timeout) and self._stores(timeout):
            seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
            if seconds is not None and checked.refresh_before >= seconds:
                raise ValueError(
                    f"refresh_before must be less than the timeout of {seconds:g} s, not {checked.refresh_before:g}"
                )
        settings = conf.get()
        if redis_key is None:
            redis_key = self._redis_key(key, version)
        server = self._lease_server(redis_key, timeout)
        if server is None:
            return None
        own = self._settings
        if checked.settings:
            own = replace(own, **checked.settings)
        through = self._through(key, version, by_task)
        dumps = partial(self._dumps_for, timeout, self._dumps_plainly if checked.due else self._dumps, through)
        request = ValueRequest(
            server=server,
            prefix=settings.key_prefix,
            key=redis_key,
            caller_key=key,
            default=default,
            dumps=with_stale_and_jitter(dumps, checked, own.jitter) if checked.stale or own.jitter else dumps,
            loads=self._loads if through is None else partial(self._loads_through, through),
            renewal=own,
            ignore_errors=self._ignores_errors(),
            should_cache=checked.should_cache,
            calls_site=callable(timeout) or checked.should_cache is not None or through is not None,
            not_in_loop=SynchronousOnlyOperation,
            due_ms=int(checked.due * 1000),
            counters=self._counters,
            dump_failure=self._dump_failure,
            load_failure=self._load_failure,
            through=through,
        )
        on_timeout = own.on_wait_timeout if checked.on_wait_timeout is None else checked.on_wait_timeout
        return GetOrSetCall(request, own.wait, on_timeout, checked, own.on_error == "stale")

    def _dump_failure(self, redis_key: str, error: Exception) -> bytes:
        dumps, loads = (lambda error: self._dumps(redis_key, error, None)[0]), partial(self._loads, redis_key)
        return dump_failure(redis_key, dumps, loads, error)

    def _load_failure(self, redis_key: str, data: bytes) -> Exception:
        return load_failure(partial(self._loads, redis_key), data)

    def _dumps_for(
        self,
        timeout: Timeout,
        dumps: Callable[..., tuple[bytes, int | None]],
        through: Through | None,
        redis_key: str,
        value: Any,
    ) -> tuple[bytes, int | None]:
        if through is None and not callable(timeout):
            return dumps(redis_key, value, timeout)
        own, stored = timeout_for(timeout, value), True
        if through is not None:  # also for a value that is not stored, because those who wait for it read it
            noted = through.write(value, own)
            stored = noted is not None
            value, own = noted or (value, own)
        if stored and self._stores(own):
            return dumps(redis_key, value, own)
        return dumps(redis_key, value, None)[0], 0

    def _loads_through(self, through: Through, redis_key: str, data: bytes) -> Any:
        """Do as `_loads`, through the overridden method."""
        value = self._loads(redis_key, data)
        return value if value is MISSING else through.read(value)

    @property
    def _settings(self) -> conf.CacheSettings:
        general = conf.get().cache
        if self._read_settings is None or self._read_settings[0] is not general:
            try:
                self._read_settings = general, conf.override(general, self._lock_options, OPTION)
            except ImproperlyConfigured:
                alias = alias_of(self, *self._constructor_args)
                conf.override(conf.CacheSettings(), self._lock_options, OPTION.replace("…", repr(alias)))
                raise
        return self._read_settings[1]

    @cached_property
    def _counters(self) -> Counters:
        return counters_for(alias_of(self, *self._constructor_args))


def may_hide(error: BaseException) -> bool:
    """Return whether a caller may get the stale value in place of this error of its computation.

    Not an interruption, and not within a transaction that the error has broken: the caller would go on, and commit
    nothing of it.
    """
    if is_interruption(error):
        return False
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block and (
            connection.needs_rollback or (isinstance(error, DatabaseError) and not connection.is_usable())
        ):
            error.add_note(
                "The stale value is not returned in its place, because the error has broken the transaction of "
                f"database {connection.alias!r}: compute within an atomic() of its own."
            )
            return False
    return True


def dump_failure(name: str, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any], error: Exception) -> bytes:
    """Return the exception as bytes for the waiters: as text, and serialized like a value of the cache if it can be."""
    text = json.dumps(_as_text(name, error).args).encode()
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301  # pickled here
            data = dumps(error)
            if len(data) <= MAX_PICKLE and isinstance(loads(data), Exception):
                return b"=%b\n%b" % (text, data)
    except Exception:  # noqa: S110  # its own methods may raise anything, and not every serializer takes exceptions
        pass
    return b"!" + text


def load_failure(loads: Callable[[bytes], Any], data: bytes) -> Exception:
    """Return the exception from the bytes, or ComputationFailed where its class cannot be imported."""
    text, _, serialized = data[1:].partition(b"\n")
    found: Any = None
    if serialized:
        with suppress(Exception):
            found = loads(serialized)
    error = found if isinstance(found, Exception) else ComputationFailed(*json.loads(text))
    error.add_note("It was raised in another process, which computed the value for all waiting callers.")
    return error


def _as_text(name: str, error: Exception) -> ComputationFailed:
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    try:
        text = str(error)[:MAX_TEXT]
    except Exception as failure:
        text = f"its text could not be made: {type(failure).__name__}"
    return ComputationFailed(name, kind, text)
