"""Refreshes in the background: a thread, a task or a Celery worker computes; callers get the stale value meanwhile.

The message to a worker names the function to be called, and anybody who can write to the broker can send a message. So
a worker calls only functions that its own code has registered.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import asgiref.sync
from asgiref.sync import (
    AsyncToSync,
    SyncToAsync,
    ThreadSensitiveContext,
    async_to_sync,
    sync_to_async,
)
from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from .. import conf
from ..core.clock import monotonic
from ..core.driver.async_server import async_server_of
from ..core.driver.os_threads import start_here
from ..core.driver.process import after_in_child
from ..core.events import log
from ..core.keys import new_id
from ..exceptions import is_interruption
from ..tenants import current_tenant, tenant_entered
from .backends.base import RedisBackend, ends_with_its_call
from .lease.obtain import RESERVED, cancel_refresh, end_reservation, reserve_refresh
from .lease.request import Caller, Outcome, ValueRequest, computing, read_value
from .lease.single_flight import is_in_flight, is_refresh_paused, pause_refresh, refresh
from .lease.store import digest, settle_as_failed
from .options import CheckedOptions, GetOrSetCall, Timeout, validate
from .stats import alias_of

FAILED = "The refresh of the value of %r failed; callers get the stale value until it expires."
WORKERS = 4
"""Threads of a process that refresh values: each may need a connection to the database. The other values wait."""
GIVEN_BACK_WITHIN = 1.0
"""Seconds that a thread waits for the lease of a cancelled task, which is given back a moment later."""
MAX_WAITING = 1000
"""Values that may wait for such a thread; a later caller asks again for the others."""


class TasksOfLoop:
    """The refreshing tasks of an event loop. A few compute at once, as with threads, and the others wait."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(WORKERS)
        self.by_key: dict[Hashable, asyncio.Task[None]] = {}
        """All of them, because a loop keeps only weak references to its tasks."""


_tasks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, TasksOfLoop] = weakref.WeakKeyDictionary()


Place = Callable[[ValueRequest], AbstractContextManager[ValueRequest]]
"""Enters the caller's tenant elsewhere, and yields the request as it is carried out there."""


def refresh_in_thread(request: ValueRequest, old: bytes, place: Place = nullcontext, wait: float = 0) -> None:
    """Have a thread refresh the value in the caller's context, unless another caller refreshes it already, also after
    `wait` seconds.

    Raises RuntimeError when the system has no more threads.
    """
    if is_in_flight(request):
        return

    def run() -> None:
        try:
            with place(request) as here:
                until = monotonic() + wait if wait else -math.inf
                _log_failure(here, here.server.run(refresh(here, Caller.thread(here.server), old, until)))
        except BaseException:  # also SystemExit of the computation: the thread has other values to refresh
            log.exception(FAILED, request.key)
        finally:
            connections.close_all()  # of this thread

    _workers.do((request.server, request.key), in_callers_context(run))


def refresh_in_task(request: ValueRequest, old: bytes) -> None:
    """Start a task that refreshes the value, unless another caller refreshes it already, or too many wait.

    A thread refreshes where the loop ends with the caller, and where it ended before the task.
    """
    if is_in_flight(request):
        return
    loop, key = asyncio.get_running_loop(), (request.server, request.key)
    by_thread = partial(refresh_in_thread, for_thread(request), old)
    if ends_with_its_call(loop):
        by_thread()
        return
    tasks = _tasks.setdefault(loop, TasksOfLoop())
    if key in tasks.by_key or len(tasks.by_key) >= MAX_WAITING:
        return

    async def run() -> None:
        try:
            async with tasks.slots, ThreadSensitiveContext():
                try:
                    server = async_server_of(request.server)
                    _log_failure(request, await server.run(refresh(request, Caller.task(server), old, -math.inf)))
                finally:
                    await sync_to_async(connections.close_all)()
        except Exception:
            log.exception(FAILED, request.key)

    def ended(task: asyncio.Task[None]) -> None:
        tasks.by_key.pop(key, None)
        if task.cancelled():  # as asyncio.run() does with what is left
            with errors_logged(request):
                by_thread(wait=GIVEN_BACK_WITHIN)

    task = loop.create_task(run(), name="redislock-refresh", context=_without_thread())
    tasks.by_key[key] = task
    task.add_done_callback(ended)


def _without_thread() -> Context:
    """Return the caller's context without the thread of its request, and its computations.

    That thread ends with the request: nothing that waited for it was done, or each task got another one, whose
    connections stayed open. A `ThreadSensitiveContext` is without effect within another one.
    """
    context = Context()
    for variable, value in copy_context().items():
        if variable is not SyncToAsync.thread_sensitive_context:
            context.run(variable.set, value)
    context.run(setattr, AsyncToSync.executors, "current", None)
    context.run(computing.set, ())
    return context


@contextmanager
def errors_logged(request: ValueRequest) -> Iterator[None]:
    """Log an error of the block that begins a refresh, because its caller has the stale value; a pause begins."""
    try:
        yield
    except Exception as error:
        if is_interruption(error):
            raise
        pause_refresh(request)
        request.counters.count("errors")
        log.exception(FAILED, request.key)


def for_thread(request: ValueRequest) -> ValueRequest:
    """Return a task's request as that of a thread: a coroutine function runs in a loop of the thread."""

    async def compute() -> Any:
        return await request.default()

    through = None if request.through is None else request.through._replace(by_task=False)
    return replace(request, default=async_to_sync(compute), through=through)


class Workers:
    """A few threads that end when there is nothing left to do.

    No lock guards what waits for them, because a signal handler may come while its own thread holds that lock.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Hashable, Callable[[], None]]] = SimpleQueue()
        self._known: dict[Hashable, Callable[[], None]] = {}
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(WORKERS):
            self._free.put(None)

    def do(self, key: Hashable, job: Callable[[], None]) -> None:
        """Have a thread do the job, unless one for this key waits or is being done, or too many wait.

        Raises RuntimeError when no thread can be started.
        """
        taken = False
        try:
            if len(self._known) >= MAX_WAITING or self._known.setdefault(key, job) is not job:
                return
            self._jobs.put((key, job))
            taken = self._take()
            if taken:
                start_here(self._work, "redislock-refresh")
        except BaseException:  # perhaps a time limit, at any point: a key that stayed known was never refreshed again
            if self._known.get(key) is job:
                self._known.pop(key, None)
            if taken:
                self._free.put(None)
            raise

    def _take(self) -> bool:
        """Return whether there may be one more thread; if not, those that run find the job."""
        try:
            self._free.get_nowait()
        except Empty:
            return False
        return True

    def _work(self) -> None:
        while True:
            try:
                key, job = self._jobs.get_nowait()
            except Empty:
                self._free.put(None)
                if self._jobs.empty() or not self._take():
                    return
                continue  # a job came after the look and before the place was free: it started no thread
            if self._known.get(key) is job:
                try:
                    job()
                except BaseException:  # a handler of the log, or a driver's close(): four of them ended all refreshes
                    with suppress(BaseException):
                        log.exception("An error came out of a refresh; its thread goes on with the next value.")
                finally:
                    self._known.pop(key, None)


_workers = Workers()


after_in_child("refreshes", _workers.__init__)  # type: ignore[misc]  # its threads are those of the parent


def in_callers_context(function: Callable[[], None]) -> Callable[[], None]:
    """Return the function for another thread: it runs in the caller's context, language and time zone.

    The caller's cache objects, its leases and the tasks that it waits for stay in its own thread.
    """
    context = copy_context()

    def run() -> None:
        if _restore is not None:
            _restore(context)
        with suppress(AttributeError):
            AsyncToSync.executors.current = None
        for alias in caches:
            with suppress(AttributeError):
                del caches[alias]
        computing.set(())
        function()

    return partial((context if _restore is None else Context()).run, run)


_restore: Callable[[Context], None] | None = getattr(asgiref.sync, "_restore_context", None)
"""Moves the variables of a context to the running thread. Without it (before asgiref 3.8 Django's `Local` needs no more
than the context) the function runs in a copy of the caller's context."""


def _log_failure(request: ValueRequest, outcome: Outcome) -> None:
    if outcome.error is not None:
        log.error(FAILED, request.key, exc_info=outcome.error)


F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, Callable[..., Any]] = {}


def refreshable(function: F) -> F:
    """Register a function of a module, so that Celery workers may call it for ``refresh="celery"``.

    The worker must import the module. `cached` registers its function itself. Raises TypeError for a local function.
    """
    name = import_path(function)
    if name is None:
        raise TypeError(f"refresh='celery' needs a function of a module, not {function!r}")
    _registered[name] = function
    return function


class RefreshMixin(RedisBackend):
    """The begin of a refresh in a thread or a task, and the two ends of ``refresh="celery"``: the caller that sends a
    message, and the worker that processes it."""

    _constructor_args: tuple[Any, dict[str, Any]]

    @property
    def _refreshes_by_own_keys(self) -> bool:
        """Whether a thread or a worker that refreshes may make another key than its caller."""
        return self._has_own_keys

    def _begin_refresh(
        self, call: GetOrSetCall, key: Any, default: Any, timeout: Timeout, version: int | None, old: bytes, ttl_ms: int
    ) -> None:
        """Have a thread or a Celery worker refresh the value for the caller's tenant, unless a pause lasts.

        An error is logged, because the caller has the stale value.
        """
        request = call.request
        if is_refresh_paused(request):
            return
        with errors_logged(request):
            tenant = current_tenant()
            if call.options.refresh == "thread":
                refresh_in_thread(request, old, partial(self._in_place, key, version, tenant))
            else:
                self._refresh_in_celery(call, key, default, timeout, version, tenant, old, ttl_ms)

    async def _abegin_refresh(
        self, call: GetOrSetCall, key: Any, default: Any, timeout: Timeout, version: int | None, old: bytes, ttl_ms: int
    ) -> None:
        """Do as `_begin_refresh` for a task."""
        if is_refresh_paused(call.request):
            return
        with errors_logged(call.request):
            if call.options.refresh == "thread":
                if not self._has_own_keys and conf.get().tenant is None:
                    refresh_in_task(call.request, old)
                    return
                # A tenant is that of a thread and its connection.
                call = call._replace(request=for_thread(call.request))
            await sync_to_async(self._begin_refresh)(call, key, default, timeout, version, old, ttl_ms)

    @contextmanager
    def _in_place(
        self, key: Any, version: int | None, tenant: str | None, request: ValueRequest
    ) -> Iterator[ValueRequest]:
        """Enter the caller's tenant in this thread or worker, and yield the request.

        If that fails, or this is not the place of the caller's tenant, the request fails: a value of one tenant must
        not be stored for another one. So the failure is logged, counted and followed by a pause like any other.
        """
        with ExitStack() as entered:
            try:
                entered.enter_context(tenant_entered(tenant))
                here, made = current_tenant(), self._redis_key(key, version)
                if (here, made) != (tenant, request.key):
                    raise ImproperlyConfigured(
                        f"The value of {request.key!r} is not refreshed for the tenant {tenant!r}, because the tenant "
                        f"is {here!r} and the key {made!r} where it would be computed. TENANT must tell the caller's "
                        "tenant, and ENTER_TENANT enter it, in threads and in workers."
                    )
            except Exception as error:
                request = replace(request, default=partial(_raise, error))
            yield request

    def refresh_from_message(self, message: dict[str, Any]) -> None:
        """Refresh the value of a message. This is the work of the Celery task.

        Raises the error of the computation, and LookupError when the worker does not know the function of the message.
        """
        paths = [path for path in (message["default"], message["should_cache"], message["timeout_for"]) if path]
        unknown = [path for path in paths if path not in _registered]
        should_cache, timeout = _registered.get(message["should_cache"]), _registered.get(message["timeout_for"])
        if timeout is None:
            timeout = DEFAULT_TIMEOUT if message["timeout"] == "default" else message["timeout"]
        seconds = {"stale": message["stale"], "refresh_before": message.get("refresh_before", 0)}
        checked = validate("get_or_set", **message["options"], **seconds, should_cache=should_cache)
        key, version, default = message["key"], message["version"], None if unknown else _function_of(message)
        call = self._prepare(key, default, timeout, version, checked, message["redis_key"])
        if call is None:
            return
        request = replace(call.request, id=message["id"], due_ms=message.get("due_ms", 0))
        if unknown:
            request.server.run(cancel_refresh(request))
            raise LookupError(
                f"{unknown[0]} is not registered in this worker, so it is not called for refresh='celery': decorate it "
                "with @django_redislock.cache.refreshable, and import its module in a tasks module."
            )
        data, _ = request.server.run(read_value(request.key, with_ttl=False))
        if data is None or digest(data).decode() != message["old"]:
            request.server.run(cancel_refresh(request))
            return
        # It computes under an id of its own: a copy of the message would get the lease of that of the message, too.
        caller = Caller.thread(request.server)
        with self._in_place(key, version, message["tenant"], replace(request, id="")) as own:
            for _ in range(2):  # the first answer may show that the server is in cluster mode: leases are elsewhere
                request.server.run(end_reservation(request))
                outcome = request.server.run(refresh(own, caller, data, -math.inf))
                if not outcome.empty:
                    break
        if outcome.error is not None:
            raise outcome.error

    def _refresh_in_celery(
        self,
        call: GetOrSetCall,
        key: Any,
        default: Any,
        timeout: Timeout,
        version: int | None,
        tenant: str | None,
        old: bytes,
        ttl_ms: int,
    ) -> None:
        """Have a Celery worker refresh the value, unless another process refreshes it.

        The message expires with the value, in `ttl_ms` milliseconds.

        An error of the broker is logged, because the caller has the stale value.
        """
        from ..tasks import refresh as task

        alias = alias_of(self, *self._constructor_args)
        if not alias:
            raise ImproperlyConfigured("refresh='celery' needs a cache that is one of CACHES, where a worker finds it")
        function, args, kwargs = _split_partial(default)
        checked = call.options
        message: dict[str, Any] = {
            "key": str(key) if isinstance(key, tuple) else key,  # JSON makes a list of it, which is another key
            "version": version,
            "redis_key": str(call.request.key),
            "tenant": tenant,
            "timeout": "default" if timeout is DEFAULT_TIMEOUT or callable(timeout) else timeout and float(timeout),
            "timeout_for": registered_name(timeout, "timeout") if callable(timeout) else None,
            "default": registered_name(function),
            "args": list(args),
            "kwargs": kwargs,
            "options": checked.settings,
            "stale": checked.stale,
            "refresh_before": checked.refresh_before,
            "should_cache": checked.should_cache and registered_name(checked.should_cache, "should_cache"),
            "old": digest(old).decode(),
            "due_ms": call.request.due_ms,
            "id": RESERVED + new_id(),
        }
        # Nobody computes under this lease: after the end of the value its callers would wait for it in vain.
        life = replace(call.request.renewal, expire=min(call.request.renewal.expire, max(ttl_ms, 1) / 1000))
        request = replace(call.request, id=message["id"], renewal=life)
        pause_refresh(request)
        job = None
        try:
            job = request.server.run(reserve_refresh(request, threading.current_thread(), old))
            if job is not None:
                task.apply_async((alias, message), expires=max(ttl_ms, 1000) / 1000)
        except BaseException as error:
            interrupted = is_interruption(error)
            # A broker that is away counts as a failed refresh: each process tried it once a second.
            failed = None if job is None or interrupted else settle_as_failed(job)
            request.server.run(failed or cancel_refresh(request))
            if interrupted:
                raise
            request.counters.count("errors")
            log.exception(
                "The message to refresh the value of %r could not be sent to Celery; callers get the stale value until "
                "it expires.",
                request.key,
            )

    def _prepare(
        self,
        key: Any,
        default: Any,
        timeout: Timeout,
        version: int | None,
        checked: CheckedOptions,
        redis_key: str | None = None,
    ) -> GetOrSetCall | None:
        raise NotImplementedError


def check_importable(default: Any, should_cache: Any, timeout: Any) -> None:
    """Raise TypeError when no worker would call one of the functions."""
    registered_name(_split_partial(default)[0])
    for argument, function in (("should_cache", should_cache), ("timeout", timeout)):
        if callable(function):
            registered_name(function, argument)


def registered_name(function: Any, argument: str = "default") -> str:
    """Return the name under which a worker knows the function; raises TypeError if it is not registered."""
    name = import_path(function)
    if name is None or _registered.get(name) is not function:
        raise TypeError(
            f"{argument} must be a function decorated with @django_redislock.cache.refreshable, or for default a "
            f"functools.partial of one, with refresh='celery', not {function!r}"
        )
    return name


def import_path(function: Any) -> str | None:
    """Return the name of a function of a module, or of a class in it; None for anything else."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    return f"{module}.{name}" if module and "<" not in name else None


def _raise(error: Exception) -> Any:
    raise error


def _split_partial(default: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if isinstance(default, functools.partial):
        return default.func, default.args, default.keywords
    return default, (), {}


def _function_of(message: dict[str, Any]) -> Callable[[], Any]:
    """Return the function of the message with its arguments."""
    function = _registered[message["default"]]

    def call() -> Any:
        value = function(*message["args"], **message["kwargs"])
        return async_to_sync(_await)(value) if inspect.isawaitable(value) else value

    return call


async def _await(value: Any) -> Any:
    return await value
