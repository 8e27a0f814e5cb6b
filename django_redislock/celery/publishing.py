"""A single-instance task before it runs: its key, its locks, and its publication."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.app.task import Context
from celery.exceptions import Retry
from celery.result import AsyncResult
from celery.utils import uuid
from django.utils.functional import cached_property
from kombu.serialization import registry  # type: ignore[attr-defined]

from .. import conf
from ..core import LockInfo, events
from ..core.driver.process import HOST
from ..core.options import Renewal
from ..core.validation import MAX_LIMIT, check_limit
from ..exceptions import LockBackendError, TaskAlreadyRunning
from ..name_template import signature_of
from ..task_names import waiting_id
from . import options as options_of
from .execution_lock import ExecutionLock
from .key import NO_MODELS, Models, called_as_body, lock_name, make_key, models_of, waiting_name, with_tenant
from .message import (
    ARGUMENTS_HEADER,
    CONTENT_TYPE,
    KEY_HEADER,
    MARKER_EXPIRE,
    MAX_ARGUMENTS_LENGTH,
    PLACELESS_HEADER,
    REFUSED_HEADER,
    SCOPE_HEADER,
    DuplicateResult,
    delivery_of,
    describe_arguments,
    duplicate_like,
    has_ended,
    header,
    leave_place,
    log_level_of,
    marker_expire,
    new_message,
    pack_arguments,
    published_again,
    release_quietly,
    unpack_arguments,
    waiting_expire,
    warn_dropped_callbacks,
    with_ours,
)
from .options import TaskOptions
from .publish_ahead import is_celerys_own, publish_ahead

DIRECT = "direct call"
"""Stands for the id in the label of a call that has none."""
HANDOVER_GRACE = 1.0
"""Seconds to wait for a holder that is about to end: one that has published its own retry, or one that is just
releasing."""

CANVAS_OPTIONS = frozenset({"root_id", "parent_id", "group_id", "chord", "chain", "retries"})
"""Members of canvases and retries have at least one of these options; a message with a given id has none."""

AHEAD_AFTER = 8
"""So many messages of a task in a row must have been published before the next one is made while Redis answers: to make
a message that is then refused costs five times what the wait for Redis saves."""

_OWN_PRODUCER = frozenset({"connection", "publisher"})
"""Options by which a caller gives a producer of its own."""

if TYPE_CHECKING:
    _Task = Task[Any, Any]
else:
    _Task = object


class PublishingMixin(_Task):
    """A task that has locks; `SingleInstanceMixin` runs it under them."""

    _given_options: Mapping[str, Any] = {}
    _completed: TaskOptions | None = None
    _marker_expire = MARKER_EXPIRE
    """Seconds after which the processed marker of a message expires."""
    _pydantic: Mapping[str, Any] | None = None
    """The last arguments of `models_of`, if Celery makes models of the arguments."""
    _published_in_a_row = AHEAD_AFTER
    """How many messages were published since the last one that was refused."""

    def lock_info(self, *args: Any, **kwargs: Any) -> LockInfo | None:
        """Return the holder of the lock of these arguments: a running execution or a waiting message; None when it is
        free.

        Raises LockBackendError when Redis cannot answer.
        """
        found = (lock.owner() for lock in self._locks(args, kwargs))
        return next((info for info in found if info is not None), None)

    def unlock(self, *args: Any, **kwargs: Any) -> bool:
        """Force-release the lock of these arguments, and return whether it was held.

        The former holder is not stopped; the loss is reported to it within a third of the lock's expiry. A message that
        waits in its queue is not withdrawn either. Raises LockBackendError when Redis cannot answer.
        """
        freed = [lock.reset() for lock in self._locks(args, kwargs)]
        return any(freed)

    def recall(self, *args: Any, **kwargs: Any) -> bool:
        """Ask the run that holds the lock of these arguments to give it back, as `Lock.recall` does, and return whether
        it was held. The lock of a message that waits is freed. Raises LockBackendError when Redis cannot answer.
        """
        asked = [lock.recall() for lock in self._locks(args, kwargs)]
        return any(asked)

    # Publishing

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Publish the task with its key in a header, and where the scope begins here, with its lock; see Celery for the
        arguments.

        Raises TypeError when an argument that counts has no stable form, and for a duplicate what `on_duplicate` says;
        ValueError when its arguments are too long to replace those of another message.
        """
        ours = self._options_of_call(options)
        # By name, and only given arguments, because a class between may accept fewer.
        for name, value in ("link", link), ("link_error", link_error), ("shadow", shadow):
            if value is not None:
                options[name] = value
        try:
            bound = self._signature.bind(*(args or ()), **(kwargs or {}))
        except TypeError:
            # Celery's own check raises the error or, without it, the worker does
            return super().apply_async(args, kwargs, task_id=task_id, producer=producer, **options)
        known = task_id is not None
        # The key of a retry was made with its message: here the tenant may be another one.
        key = self._key_of_retry(options) if known else None
        if key is None:
            key = self._key(bound, ours)
        newest = partial(self._packed, args, kwargs, options)
        publish = super().apply_async
        begins_here = ours.scope != "run" and not self.app.conf.task_always_eager
        if begins_here and not known and self._published_in_a_row < AHEAD_AFTER:
            # A message that is refused costs much less before it is made. So after a duplicate Redis is asked first.
            duplicate = self._prevented(key, ours, newest)
            if duplicate is not None:
                warn_dropped_callbacks(self.name, duplicate.id, options)
                return duplicate
        shown = self._add_headers(key, ours, options)
        if not begins_here:
            return publish(args, kwargs, task_id=task_id, producer=producer, **options)
        # A message with a given id is always published, because a canvas, or the caller of a retry, waits for that id.
        options["task_id"] = task_id = task_id or uuid()
        lock = self._waiting_lock(key, task_id, ours, options, shown or describe_arguments(bound))
        result = self._publish_under(lock, ours, known, partial(publish, args, kwargs), newest, producer, options)
        if isinstance(result, DuplicateResult):
            warn_dropped_callbacks(self.name, result.id, options)
        else:
            self._published_in_a_row += 1
        return result

    def _packed(self, args: Any, kwargs: Any, message: Mapping[str, Any]) -> bytes:
        """Return the arguments as Celery would publish them."""
        serializer = message.get("serializer") or self.serializer or self.app.conf.task_serializer
        dump = getattr(self, "_dump_pydantic_arguments", None)  # of Celery 5.7, which sends models as JSON
        if dump is not None and serializer != "pickle":
            args, kwargs = dump(args, kwargs)
        return pack_arguments(args, kwargs, serializer)

    def _add_headers(self, key: str, ours: TaskOptions, message: dict[str, Any]) -> str:
        """Add our headers to the options of a message, and return its arguments as Celery was told to show them."""
        message["headers"] = new_message(message.get("headers"), key, ours.scope)
        # What Celery was told to hide is hidden here, too; the worker cannot see who made the texts of its message.
        shown = ", ".join(filter(None, (message.get("argsrepr"), message.get("kwargsrepr"))))
        if shown:
            message["headers"] = with_ours(message["headers"], {ARGUMENTS_HEADER: shown[:MAX_ARGUMENTS_LENGTH]})
        return str(message["headers"].get(ARGUMENTS_HEADER, ""))  # of a retry: what hid those of its former run

    def _publish_under(
        self,
        lock: ExecutionLock,
        ours: TaskOptions,
        known: bool,
        publish: partial[AsyncResult[Any]],
        newest: Callable[[], bytes],
        producer: Any,
        message: dict[str, Any],
    ) -> AsyncResult[Any]:
        """Take the lock and publish the message, or return the result of the holder. After an error nothing is left."""
        try:
            result = None
            if known:
                self._claim_for_known_id(lock, ours, message)
            else:
                own = producer is not None or not _OWN_PRODUCER.isdisjoint(message)
                ahead = not own and is_celerys_own(self.app, publish.func)
                result = self._claim(lock, ours, newest, partial(publish, **message) if ahead else None)
            if result is None:
                result = publish(producer=producer, **message)
            lock.settle(published=not isinstance(result, DuplicateResult))
            return result
        except BaseException as error:
            lock.settle(published=False)
            if not _is_about(error, lock):  # then another call would only take longer: see `ExecutionLock.take`
                release_quietly(lock)
            raise

    def _prevented(self, key: str, options: TaskOptions, newest: Callable[[], bytes]) -> DuplicateResult | None:
        """Return the result of the holder of the lock, None when the lock is not held or its holder has ended."""
        lock = options.lock.with_name(waiting_name(self.name, key, options.scope), label=self.name)
        try:
            holder = lock.prevented_by()
            if holder is None or self._has_ended(holder):
                return None
            return self._duplicate(lock, holder, options, newest)
        except LockBackendError:
            if options.on_backend_error != "run":
                raise
            return None

    def _claim(
        self,
        lock: ExecutionLock,
        options: TaskOptions,
        newest: Callable[[], bytes],
        send: Callable[..., Any] | None,
    ) -> AsyncResult[Any] | None:
        """Take the lock for a message and `send` it, or return the result of the holder; None when it is to be sent."""
        try:
            result, acquired = (None, None) if send is None else publish_ahead(self.app, lock, send)
            if result is not None:
                return result  # type: ignore[no-any-return]
            if acquired is None and lock.take(fresh=True):
                return None
            holder = self._holder(lock, lock.refused_by)
            while holder is not None:
                duplicate = self._duplicate(lock, holder, options, newest)
                if duplicate is not None:
                    return duplicate
                holder = self._holder(lock, None)  # its message began before it could be given other arguments
            return None
        except LockBackendError as error:
            self._without_lock(lock, options, error)
            return None

    def _claim_for_known_id(self, lock: ExecutionLock, options: TaskOptions, message: dict[str, Any]) -> None:
        """Take the lock for a message that is published in any case; one to be skipped gets a header."""
        try:
            if lock.take():
                return
            ours: dict[str, Any] = {PLACELESS_HEADER: True} if options.on_duplicate == "replace" else {}
            if options.on_conflict == "skip" and CANVAS_OPTIONS.isdisjoint(message):
                holder = self._holder(lock, lock.refused_by)
                if holder is None:
                    return
                if holder.label != lock.label:
                    lock.count_duplicate()
                    ours[REFUSED_HEADER] = holder.holder
            if ours:
                message["headers"] = with_ours(message["headers"], ours)
        except LockBackendError as error:
            # `Task.retry` makes a Reject of any error, and the message of the retry would be lost.
            self._without_lock(lock, options, error, bool(message.get("retries")))

    def _without_lock(
        self, lock: ExecutionLock, options: TaskOptions, error: LockBackendError, is_retry: bool = False
    ) -> None:
        """Raise the error, unless the task is to be published without its lock."""
        if not (is_retry or options.on_backend_error == "run") or not _is_about(error, lock):
            raise error
        events.log.warning("%s is published without its lock, because Redis does not answer.", lock.label)

    def _holder(self, lock: ExecutionLock, holder: LockInfo | None) -> LockInfo | None:
        """Return the holder of the lock; None when the lock was acquired after all, or changes hands too fast."""
        if holder is None and not lock.take_within(HANDOVER_GRACE):
            holder = lock.owner()
        if holder is not None and self._has_ended(holder):
            leave_place(lock.with_name(lock.name, label=holder.label, id=holder.id))
            holder = None if lock.take() else lock.owner()
        return holder

    def _duplicate(
        self, lock: ExecutionLock, holder: LockInfo, options: TaskOptions, newest: Callable[[], bytes]
    ) -> DuplicateResult | None:
        """Return the result of the message that holds the lock; None when it was to get the newest arguments and does
        not wait any more."""
        task_id = self._task_id_of(holder)
        foreign = task_id in (holder.label, DIRECT)
        replaces = options.on_duplicate == "replace" and options.scope != "job" and not foreign
        if replaces and not lock.replace_arguments(holder, newest()):
            return None
        self._published_in_a_row = 0
        events.emit(
            "conflict",
            "%s is not published, because the lock has been held for %.1f s by %s (on_duplicate: %s).",
            self.name,
            holder.age,
            holder.holder,
            options.on_duplicate,
            level=log_level_of(lock.name),
            name=lock.name,
            holder=holder,
            task=self.name,
            task_id=None,
            on_conflict=options.on_duplicate,
        )
        if options.on_duplicate == "raise" or foreign:
            raise self._refusal(TaskAlreadyRunning(lock.name, holder.holder, holder.ttl), task_id)
        if type(self).AsyncResult is Task.AsyncResult:
            result = DuplicateResult(task_id, backend=self.backend, task_name=self.name, app=self.app)
        else:
            result = duplicate_like(self.AsyncResult(task_id))
        result.ignored = holder.result_ignored
        result.elsewhere = (holder.host, holder.pid) != (HOST, os.getpid())
        return result

    def _refusal(self, error: TaskAlreadyRunning, task_id: str) -> TaskAlreadyRunning:
        """Return what is raised in place of a duplicate of the task with this id."""
        return error

    def _has_ended(self, holder: LockInfo) -> bool:
        """Return whether the holder is a message whose task has ended, because it was revoked, for example."""
        task_id = self._task_id_of(holder)
        return holder.id == waiting_id(task_id) and has_ended(self.backend, task_id, holder.acquired_at)

    def _task_id_of(self, holder: LockInfo) -> str:
        return holder.label.removeprefix(f"{self.name}[").removesuffix("]")

    def _waiting_lock(
        self,
        key: str,
        task_id: str,
        ours: TaskOptions,
        options: Mapping[str, Any],
        arguments: str = "",
        scope: str = "",
    ) -> ExecutionLock:
        """Return the lock that a message of this id holds while it waits. `scope`: the message's, if it is known."""
        expires = options.get("expires", self.expires)
        return ours.lock.with_name(
            waiting_name(self.name, key, scope or ours.scope),
            label=f"{self.name}[{task_id}]",
            id=waiting_id(task_id),
            renewal=Renewal(
                waiting_expire(self.app, ours.queue_life, options.get("countdown"), options.get("eta"), expires),
                auto_renewal=False,
            ),
            details=self._details(arguments, options.get("ignore_result")),
        )

    def _lock_of_message(self, task_id: str, key: object, request: Context | None) -> ExecutionLock | None:
        """Return the lock that the message of this id holds while it waits, None if it took none.

        Its own header says which: before a deploy that changed the scope, the task took another one.
        """
        options = self._options
        scope = header(request, SCOPE_HEADER) or options.scope
        if scope == "run" or not isinstance(key, str):  # without a key, no lock was taken for it
            return None
        return self._waiting_lock(key, task_id, options, {}, scope=scope)

    def _details(self, arguments: str, ignored: bool | None) -> dict[str, Any]:
        """Return further fields of the record; `ignored`: the message's own `ignore_result`."""
        nobody = self.ignore_result if ignored is None else ignored
        return {"arguments": arguments} | ({"result_ignored": True} if nobody else {})

    # Publishing the message of a run again

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: str | None = None, **options: Any
    ) -> Any:
        """Return the message of a retry, or of the same request again.

        A worker's main process retries the run of a killed child (`task_retry_on_worker_lost`). It knows the arguments
        of the message only, and Redis those with which the run began.
        """
        key = self._key_for(args, kwargs, self.request if request is None else request)
        by_main_process = request is not None and request is not self.request_stack.top
        if by_main_process and args is None and kwargs is None and self._options.on_duplicate == "replace":
            place = self._lock_of_message(request.id, header(request, KEY_HEADER), request)
            newest = place and place.newest_arguments(delivery_of(request))
            if newest:
                args, kwargs = unpack_arguments(newest, None, self.app, f"{self.name}[{request.id}]")
        message = super().signature_from_request(request, args, kwargs, queue, **options)
        headers = message.options.get("headers") or {}
        message.options["headers"] = with_ours(headers, {KEY_HEADER: key})
        return message

    def _key_for(self, args: Any, kwargs: Any, request: Context) -> str | None:
        """Return the key of a retry of this request with these arguments, if given; None when none can be made.

        It keeps the key of its message unless the arguments have another one, as both are seen here. Who publishes a
        retry may be in the context of another tenant: two runs of one tenant overlapped, and the lock of another one
        was held for an hour.
        """
        own = header(request, KEY_HEADER)
        if args is None and kwargs is None and isinstance(own, str):
            return own
        former = request.args or (), request.kwargs or {}
        args, kwargs = former[0] if args is None else args, former[1] if kwargs is None else kwargs
        try:
            key = self._key_of(args, kwargs)
            return own if isinstance(own, str) and key == self._key_of(*former) else key
        except TypeError:  # its publication raises the error, or its worker does
            return None

    def _key_of_retry(self, message: Mapping[str, Any]) -> str | None:
        """Return the key in the options of a message that is a retry, else None."""
        key = (message.get("headers") or {}).get(KEY_HEADER) if message.get("retries") else None
        return key if isinstance(key, str) else None

    def _delayed_by_exchanges(self) -> bool:
        """Whether Celery delays messages by exchanges of RabbitMQ: in whole seconds, of which it refuses 0."""
        try:
            from celery.utils.quorum_queues import detect_quorum_queues
        except ImportError:  # Celery 5.4 does not
            return False
        return detect_quorum_queues(self.app, self.app.connection_for_write().transport.driver_type)[0]

    def _publish_again(
        self,
        lock: ExecutionLock,
        request: Context,
        options: TaskOptions,
        delay: float,
        headers: dict[str, Any],
        *,
        alone: bool = True,
    ) -> None:
        """Publish the same message for later, and mark its copies as outdated."""
        delivery = lock.delivery or delivery_of(request)
        more: dict[str, Any] = {} if alone else {"expires": None}  # a message that started in time has not expired
        # Else Celery would make these texts anew, and show what it was told to hide.
        more |= {name: text for name in ("argsrepr", "kwargsrepr") if (text := request.get(name)) is not None}
        if request.ignore_result:  # else Celery 5.6 would store the result
            more["ignore_result"] = True
        serializer = registry.type_to_name.get(request.get(CONTENT_TYPE))
        if serializer is not None:  # what was pickled cannot be written as JSON
            more["serializer"] = serializer
        message = self.signature_from_request(
            request,
            countdown=math.ceil(delay) if self._delayed_by_exchanges() else delay,
            retries=request.retries,
            headers=published_again(request, delivery, **headers),
            **more,
        )
        # Published by Celery's own method, so that the message keeps its key.
        super().apply_async(message.args, message.kwargs, **message.options)
        try:
            if delivery.known:
                lock.mark_processed(marker_expire(self.app, options.queue_life), delivery.version + 1, alone=alone)
        except LockBackendError as error:
            events.log.warning(
                "Could not mark the message of %s, so its copies may be published again: %s", lock.label, error
            )

    def _life_of_retry(self, request: Context | None, retry: Retry | None) -> float:
        """Return for how many seconds the message of this retry, or of the same request again, holds the lock."""
        again = getattr(retry, "sig", None)
        expires = again.options.get("expires") if again is not None else request and request.expires
        return waiting_expire(self.app, self._options.queue_life, None, retry and retry.when, expires)

    # The locks

    def _options_of_call(self, message: dict[str, Any]) -> TaskOptions:
        """Return the options in force for one message, and remove those of its options that Celery does not know."""
        return self._options

    @property
    def _options(self) -> TaskOptions:
        settings, options = conf.get(), self._completed
        if options is None or options.settings is not settings:
            self._completed = options = options_of.complete(self._given_options, settings)
            self._marker_expire = marker_expire(self.app, options.queue_life)
        return options

    @cached_property
    def _models(self) -> Models:
        return NO_MODELS if self._pydantic is None else models_of(self.run, **self._pydantic)

    @cached_property
    def _signature(self) -> inspect.Signature:
        return signature_of(self.run)

    def _key_of(self, args: Any, kwargs: Any, request: Context | None = None) -> str:
        key = header(request, KEY_HEADER)
        return key if isinstance(key, str) else self._key(self._signature.bind(*args, **kwargs), self._options)

    def _key(self, bound: inspect.BoundArguments, options: TaskOptions) -> str:
        return with_tenant(options.get_tenant, make_key(options.key, bound, self._models))

    def _locks(self, args: Any, kwargs: Any) -> Iterator[ExecutionLock]:
        """Yield each lock of these arguments in this scope, the lock of the execution first."""
        options, key = self._options, self._key_of(args, kwargs)
        if options.scope != "queued":
            slots = 0 if options.limit is None else MAX_LIMIT  # all slots, because the limit may have been higher
            yield options.lock.with_name(self._name_of_run(key), limit=slots)
        if options.scope in ("queued", "queued+run"):
            yield options.lock.with_name(waiting_name(self.name, key, options.scope))

    def _name_of_run(self, key: str) -> str:
        return lock_name(self._options.group or self.name, key)

    def _lock_of_run(self, name: str, args: Any, kwargs: Any, **changes: Any) -> ExecutionLock:
        """Return the lock of a run, or its slot if there is a limit. Raises what a callable limit raises."""
        options = self._options
        limit = options.limit
        if callable(limit):
            bound = self._signature.bind(*args, **kwargs)
            limit = check_limit(called_as_body(limit, bound, self._models), f"the limit of {self.name}")
        return options.lock.with_name(name, limit=limit or 0, **changes)

    def _running_lock(
        self,
        key: str,
        options: TaskOptions,
        request: Context | None,
        args: Any,
        kwargs: Any,
        place: ExecutionLock | None = None,
    ) -> ExecutionLock:
        """Return the lock of a run; `place`: the one under which its message waits."""
        name = self._name_of_run(key)
        if request is None:
            return self._lock_of_run(name, args, kwargs, label=f"{self.name}[{DIRECT}]")
        arguments = header(request, ARGUMENTS_HEADER)
        with suppress(TypeError):  # wrong arguments: the call of the body raises the error
            arguments = arguments or describe_arguments(self._signature.bind(*args, **kwargs))
        details = {**self._details(arguments or "", request.ignore_result), "worker": request.hostname or ""}
        delivery = delivery_of(request)
        if options.scope == "queued":  # its runs may overlap, but not those of one message
            name = lock_name(self.name, key, message=delivery.message)
        replaces = options.on_duplicate == "replace" and not request.is_eager
        return self._lock_of_run(
            name,
            args,
            kwargs,
            label=f"{self.name}[{request.id}]",
            delivery=delivery,
            details=details,
            place=place,
            replaces=replaces,
            arguments_expire=self._marker_expire,
        )


def _is_about(error: BaseException, lock: ExecutionLock) -> bool:
    """Return whether Redis did not answer about this lock; a router may use a lock of its own."""
    return isinstance(error, LockBackendError) and error.name == lock.name
