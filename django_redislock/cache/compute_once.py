"""A `get_or_set` that computes a missing value once, for any Redis cache backend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import cached_property

from .. import conf
from ..core.driver.async_server import async_server_of
from ..core.driver.registry import server_of
from ..core.driver.server import Server
from ..core.validation import Seconds
from ..exceptions import LockBackendError
from .calling import called, current_task, read
from .celery_refresh import OrderedMixin, check_orderable
from .failures import packed, unpacked
from .instrumentation import ShownMixin
from .invalidation import InvalidatingMixin
from .lease.obtain import peek
from .lease.request import MISSING, ValueRequest
from .locks import LocksMixin
from .many import ManyMixin
from .options import PLAIN, Asked, GetOrSetOptions, Options, Timeout, checked, lengthened, timeout_for
from .refresh import in_task, in_thread
from .single_flight import Caller, brought, is_quiet, renewed, value_of
from .stats import Counters, Tally, alias_of, tally_of

OPTION = "CACHES[…]['OPTIONS']['LOCK']"


class ComputeOnceMixin(ManyMixin, OrderedMixin, LocksMixin, InvalidatingMixin, ShownMixin):
    """Put it left of a Redis cache backend, and give it the methods of `RedisBackend`."""

    _read: tuple[conf.CacheSettings, conf.CacheSettings] | None = None
    """The settings of all aliases, and those of this alias."""

    def __init__(self, server: Any, params: dict[str, Any]) -> None:
        options = dict(params.get("OPTIONS") or {})  # the dict is shared by all instances of the alias
        # A wrong option is an error at the first use, not here: Django's own checks make every cache, and an error here
        # would stop them before our check reports it.
        self._lock_options = options.pop("LOCK", {})
        self._made_with = server, params
        super().__init__(server, {**params, "OPTIONS": options})  # type: ignore[call-arg]

    def get_or_set(
        self,
        key: Any,
        default: Any,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        lock: bool = True,
        wait: Seconds | None = None,
        on_wait_timeout: Any = None,
        expire: Seconds | None = None,
        auto_renewal: bool | None = None,
        max_hold: Seconds | None = None,
        stale: Seconds | None = None,
        refresh_before: Seconds | None = None,
        refresh: Literal["inline", "thread", "celery"] = "inline",
        should_cache: Callable[[Any], object] | None = None,
        jitter: float | None = None,
        on_error: Literal["raise", "stale"] | None = None,
    ) -> Any:
        """Return the value of the key; when it is missing, have one of all callers compute it by `default()` and store it.

        `timeout` is a number of seconds, None (for ever), or a function of the value that returns one of them; a value for which
        it returns 0 is not stored, but returned to all who wait for it.

        The others wait for it at most `wait` seconds. Then `on_wait_timeout` says "compute", for oneself, "raise"
        AcquireTimeout, "stale", to take the old value if there is one, or gives a value to return (a function: what it
        returns). `expire` is the life in seconds of the right to compute, renewed while `default` runs (`auto_renewal`), at
        most for `max_hold` seconds; another one takes over when it ends. `jitter`, from 0 to 1, is the share by which
        timeouts are shortened at random. What is not given comes from ``OPTIONS["LOCK"]`` and
        ``DJANGO_REDISLOCK["CACHE"]``. A value that was deleted or set meanwhile is not overwritten; one that `should_cache`
        returns false for is not stored, but returned to all who wait for it.

        With `stale` a value lives so many seconds longer, and `refresh_before` seconds before its timeout it is due: then
        one caller computes a new one, by `refresh` "inline", in a "thread" or in a "celery" worker, while everybody else
        gets the old one at once; with ``on_wait_timeout="stale"`` only after waiting. When computing the new one fails, the next
        try waits for a pause that grows from a second to a minute. With ``on_error="stale"`` the one caller, too, gets the old
        value in place of the error, which is logged.

        Without `lock`, with a default that is not callable or a timeout of 0 this is Django's own method. Raises what
        `default` raises, and redis-py's errors, if the base class does.
        """
        if (
            lock is True
            and refresh == "inline"
            and wait is on_wait_timeout is expire is auto_renewal is max_hold is stale is refresh_before is None
            and should_cache is None
            and jitter is None
            and on_error is None
        ):
            given = PLAIN
        else:
            given = checked(
                "get_or_set",
                lock=lock,
                wait=wait,
                on_wait_timeout=on_wait_timeout,
                expire=expire,
                auto_renewal=auto_renewal,
                max_hold=max_hold,
                stale=stale,
                refresh_before=refresh_before,
                refresh=refresh,
                should_cache=should_cache,
                jitter=jitter,
                on_error=on_error,
            )
            if not given.lock:
                return self._get_or_set_unlocked(key, default, given.life(timeout), version)
        if not callable(default):
            return self._get_or_set_unlocked(key, default, given.life(timeout), version)
        if given.refresh == "celery":
            check_orderable(default)
        if not given.due:
            value = self.get(key, MISSING, version=version)
            if value is not MISSING:
                self._tally.count("hits")
                return value
        asked = self._asked(key, default, timeout, version, given)
        if asked is None:
            return self._get_or_set_unlocked(key, default, given.life(timeout), version)
        want = asked.want
        caller = Caller(threading.current_thread(), want.server.room)
        if given.due:
            try:
                reader = server_of(self._redis(want.key, write=False))
                data, left = reader.run(peek(want.key, with_life=True))
            except LockBackendError as error:
                data, left = self._unread(error)
            value = self._unpacked(want.key, data)
            self._show("get", value, key, MISSING, version=version)
            if value is not MISSING and data is not None:
                if left == -1 or left > given.due * 1000:
                    want.tally.count("hits")
                    return value
                if given.refresh != "inline":
                    if given.refresh == "thread":
                        in_thread(want, data)
                    elif not is_quiet(want):
                        self._order(asked, key, default, timeout, version, data)
                    want.tally.count("stale_served")
                    return value
                return brought(want.server.run(renewed(want, caller, data, value, asked.patience(), asked.on_error)))
        return brought(want.server.run(value_of(want, caller, asked.wait, asked.on_wait_timeout)))

    async def aget_or_set(
        self,
        key: Any,
        default: Any,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetOptions],
    ) -> Any:
        """Do as `get_or_set`; `default` may be a coroutine function, too, or return something awaitable.

        Everything happens in the event loop, over connections of its own: nothing of `sync_to_async` is taken up while it
        waits. Other defaults run where `sync_to_async` runs them. With ``refresh="thread"`` a task refreshes.
        """
        given = checked("aget_or_set", **options) if options else PLAIN
        if given.refresh == "celery":
            check_orderable(default)
        asked = self._asked(key, lambda: called(default), timeout, version, given) if callable(default) else None
        if asked is None or not given.lock:
            return await self._aget_or_set_unlocked(key, default, given.life(timeout), version)
        want = asked.want
        try:
            reader = server_of(self._redis(want.key, write=False))
            data, left = await read(reader, peek(want.key, with_life=bool(given.due)))
        except LockBackendError as error:
            data, left = self._unread(error)
        value = self._unpacked(want.key, data)
        self._show("get", value, key, MISSING, version=version)
        server = async_server_of(want.server)
        caller = Caller(current_task(), server.room)
        if value is not MISSING and data is not None:
            if not given.due or left == -1 or left > given.due * 1000:
                want.tally.count("hits")
                return value
            if given.refresh != "inline":
                if given.refresh == "thread":
                    in_task(want, data)
                elif not is_quiet(want):
                    await asyncio.to_thread(self._order, asked, key, default, timeout, version, data)
                want.tally.count("stale_served")
                return value
            return brought(await server.run(renewed(want, caller, data, value, asked.patience(), asked.on_error)))
        return brought(await server.run(value_of(want, caller, asked.wait, asked.on_wait_timeout)))

    def stats(self) -> Tally:
        """Return what became of the calls of this process for this cache alias so far: counts since it started."""
        return self._tally.read()

    def locked_get_or_set(
        self,
        key: str,
        value_creator: Callable[[], Any],
        version: int | None = None,
        expire: Seconds | None = None,
        id: str | None = None,
        lock_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Any:
        """Do as python-redis-lock's method of this name; `get_or_set` is better.

        Raises ValueError when `value_creator` returns None, which counts as a missing value here.
        """

        def create() -> Any:
            value = value_creator()
            if value is None:
                raise ValueError("`value_creator` must return a value")
            return value

        if lock_key is None and id is None:
            value = self.get_or_set(key, create, timeout, version, expire=expire)
            if value is not None:
                return value
        else:
            value = self.get(key, version=version)
            if value is not None:
                return value
        with self.lock(f"get_or_set:{key}" if lock_key is None else lock_key, version=version, expire=expire, id=id):
            value = self.get(key, version=version)
            if value is None:
                value = create()
                self.set(key, value, timeout=timeout, version=version)
            return value

    def _protecting(self, made: str, timeout: Timeout) -> Server | None:
        """Return the server of the leases for a value of this timeout; None when no lease is needed."""
        kept = callable(timeout) or self._is_kept(timeout)
        return self._server_of(made) if kept and conf.get().enabled else None

    def _asked(self, key: Any, default: Any, timeout: Timeout, version: int | None, given: Options) -> Asked | None:
        """Return what is wanted; None when that is the base class's business."""
        settings = conf.get()
        made = self._made(key, version)
        server = self._protecting(made, timeout)
        if server is None:
            return None
        if given.refresh_before and not callable(timeout):
            seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
            if seconds is not None and given.refresh_before >= seconds:
                raise ValueError(
                    f"refresh_before must be less than the timeout of {seconds:g} s, not {given.refresh_before:g}"
                )
        own = self._settings
        if given.settings:
            own = replace(own, **given.settings)
        unpack = partial(self._unpack, made)
        want = ValueRequest(
            server=server,
            prefix=settings.key_prefix,
            key=made,
            default=default,
            pack=lengthened(partial(self._pack_for, made, timeout), given, own.jitter),
            unpack=unpack,
            expire=own.expire,
            auto_renewal=own.auto_renewal,
            max_hold=own.max_hold,
            forgiving=self._is_forgiving(),
            should_cache=given.should_cache,
            tally=self._tally,
            pack_failure=partial(packed, made, lambda error: self._pack(made, error, None)[0], unpack),
            unpack_failure=partial(unpacked, unpack),
        )
        on_timeout = own.on_wait_timeout if given.on_wait_timeout is None else given.on_wait_timeout
        return Asked(want, own.wait, on_timeout, given, own.on_error)

    def _pack_for(self, made: str, timeout: Timeout, value: Any) -> tuple[bytes, int | None]:
        if not callable(timeout):
            return self._pack(made, value, timeout)
        own = timeout(value)
        return self._pack(made, value, own) if self._is_kept(own) else (self._pack(made, value, None)[0], 0)

    @property
    def _settings(self) -> conf.CacheSettings:
        general = conf.get().cache
        if self._read is None or self._read[0] is not general:
            try:
                self._read = general, conf.override(general, self._lock_options, OPTION)
            except ImproperlyConfigured:
                alias = alias_of(type(self), *self._made_with)
                conf.override(conf.CacheSettings(), self._lock_options, OPTION.replace("…", repr(alias)))
                raise
        return self._read[1]

    @cached_property
    def _tally(self) -> Counters:
        return tally_of(alias_of(type(self), *self._made_with))

    def _unpacked(self, made: str, data: bytes | None) -> Any:
        return MISSING if data is None else self._unpack(made, data)

    def _unread(self, error: LockBackendError) -> tuple[None, int]:
        """Do as the base class does when a value cannot be read."""
        if not self._is_forgiving():
            raise (error.__cause__ or error) from None
        return None, -2

    def _get_or_set_unlocked(self, key: Any, default: Any, timeout: Timeout, version: int | None) -> Any:
        if not callable(timeout):
            return super().get_or_set(key, default, timeout, version)
        value = self.get(key, MISSING, version=version)
        if value is MISSING:
            value = default() if callable(default) else default
            self.add(key, value, timeout=timeout(value), version=version)
            value = self.get(key, value, version=version)
        return value

    async def _aget_or_set_unlocked(self, key: Any, default: Any, timeout: Timeout, version: int | None) -> Any:
        value = await self.aget(key, MISSING, version=version)
        if value is MISSING:
            value = await called(default) if callable(default) else default
            await self.aadd(key, value, timeout=timeout_for(timeout, value), version=version)
            value = await self.aget(key, value, version=version)
        return value
