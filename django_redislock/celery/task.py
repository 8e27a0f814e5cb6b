"""The task class that holds a lock while its body runs.

Why in ``Task.__call__``: Celery's tracer calls it, if a class defines it, between the hooks before and after the body, and
outside the wrapper that ``autoretry_for`` puts around the body. So a ``finally`` in it runs for every end that leaves the
process alive (Retry, Ignore, Reject, soft limit and SystemExit too), before callbacks are sent and the result is stored, and
a conflict is not retried as if it were the body's failure.
"""

from __future__ import annotations

import inspect
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Task
from celery.app.task import Context
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore
from celery.result import AsyncResult

from .. import conf
from ..connections import get_client
from ..core import Lock, LockInfo, events
from ..core.server import UNLOCKED
from ..exceptions import LockBackendError, LockError, LockLost, LossRecord, NotAcquired, TaskAlreadyRunning
from . import options as options_of
from .key import lock_name, make, signature_of
from .options import Mark, Options

KEY_HEADER = "single_instance_key"
"""Carries the key of a message, so that producers and workers of different versions agree."""
RESCHEDULED_HEADER = "single_instance_rescheduled"
"""Carries how often a message has been rescheduled."""
MOMENT = 1.0
"""Seconds given to a holder that is about to end: one that has published its own retry, or a lock that changes hands."""


class Execution:
    """One execution of a single-instance task, as its body sees it: ``self.single_instance``."""

    def __init__(self, task: str, task_id: str | None = None, lock: Lock | None = None) -> None:
        self.task = task
        self.task_id = task_id
        """None in a direct call."""
        self.lock = lock
        """None in a call that takes no lock."""

    @property
    def lost(self) -> LossRecord | None:
        """Why the lock was lost, or None while it is held; local and free."""
        return None if self.lock is None else self.lock.lost

    def raise_if_lost(self) -> None:
        """Raise LockLost if the lock was lost: call it before each irreversible step. Local and free."""
        if self.lost is not None:
            raise LockLost(self.lost.name, self.lost)


class _Running(threading.local):
    executions: tuple[Execution, ...] = ()
    """What runs in this thread or greenlet, outermost first: a task may call itself, or be applied within itself."""


_running = _Running()


@contextmanager
def _run(execution: Execution) -> Iterator[None]:
    before = _running.executions
    _running.executions = (*before, execution)
    try:
        yield
    finally:
        _running.executions = before


if TYPE_CHECKING:
    _Task = Task[Any, Any]
    _DjangoTask = DjangoTask[Any, Any]
else:
    _Task = object
    _DjangoTask = DjangoTask


class SingleInstanceMixin(_Task):
    """Makes a task class run one instance at a time: ``class MyTask(SingleInstanceMixin, ProjectTask)``.

    The options are a dict in the class attribute, or the task option, ``single_instance``; subclasses inherit them one by one.
    Raises TypeError and ValueError for bad options when the class is made.
    """

    _given_options: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "single_instance" in cls.__dict__:
            given = cls.__dict__["single_instance"]
            del cls.single_instance  # so that the property of that name shows
            if isinstance(given, Mark):
                given.effective = True
                given = given.options
            cls._given_options = {**cls._given_options, **options_of.check(given, getattr(cls, "run", None))}
        throws = getattr(cls, "throws", ())
        if not isinstance(throws, tuple):
            throws = (throws,)
        if TaskAlreadyRunning not in throws:
            cls.throws = (*throws, TaskAlreadyRunning)  # logged at INFO and without a traceback

    @property
    def single_instance(self) -> Execution:
        """The execution that runs now in this thread; outside of one, or without a lock, it is never lost."""
        for execution in reversed(_running.executions):
            if execution.task == self.name:
                return execution
        return Execution(self.name)

    def lock_info(self, *args: Any, **kwargs: Any) -> LockInfo | None:
        """Return who runs the task with these arguments now, or None. Raises LockBackendError when Redis cannot answer."""
        return self._lock(self._name(args, kwargs), self._options).owner()

    def unlock(self, *args: Any, **kwargs: Any) -> bool:
        """Take the lock of these arguments from whoever holds it, and tell whether it was held.

        The former holder is not stopped: it is told of the loss within a third of the lock's life.
        """
        return self._lock(self._name(args, kwargs), self._options).reset()

    # Publishing

    def apply_async(self, args: Any = None, kwargs: Any = None, *others: Any, **options: Any) -> AsyncResult[Any]:
        """Publish the task with its key in a header; see Celery for the arguments.

        Raises TypeError when an argument that counts has no stable form.
        """
        try:
            bound = self._signature.bind(*(args or ()), **(kwargs or {}))
        except TypeError:
            pass  # Celery's own check tells, or without that the worker does
        else:
            key = self._key(bound)
            options["headers"] = {**(options.get("headers") or {}), KEY_HEADER: key}
        return super().apply_async(args, kwargs, *others, **options)

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body while holding the lock; the lock's end never changes the body's outcome."""
        options, request = self._options, self._traced_request()
        if not conf.get().enabled or (request is None and not options.lock_direct_calls):
            return super().__call__(*args, **kwargs)
        name, task_id = self._name(args, kwargs, request), None if request is None else request.id
        for outer in _running.executions:
            if outer.lock is not None and outer.lock.name == name:
                with _run(Execution(self.name, task_id, outer.lock)):
                    return super().__call__(*args, **kwargs)
        lock = self._lock(name, options, f"{self.name}[{task_id or 'direct call'}]")
        try:
            try:
                acquired, holder = self._acquire(lock, options)
            except LockBackendError as error:
                if options.on_backend_error == "reschedule":
                    self._reschedule(error, options, request, options.reschedule_limit)
                if options.on_backend_error != "run":
                    raise
                events.log.warning("%s runs without its lock, for Redis does not answer.", lock.label)
            else:
                if not acquired:
                    return self._conflict(lock, holder, options, request)
            with _run(Execution(self.name, task_id, lock)):
                return super().__call__(*args, **kwargs)
        finally:
            _release(lock)

    def _traced_request(self) -> Context | None:
        """Return the request of the execution that begins with this call, or None when a task is called like a function."""
        request = self.request_stack.top
        if (
            request is None
            or request.called_directly
            or any(outer.task_id == request.id for outer in _running.executions)
        ):
            return None
        return request

    def _acquire(self, lock: Lock, options: Options) -> tuple[bool, LockInfo | None]:
        """Return whether the lock was acquired, and else who holds it, as far as that can be known."""
        if lock.acquire(timeout=options.wait if options.on_conflict == "wait" else 0):
            return True, None
        with suppress(LockBackendError):  # that the lock is held is known, so this is no reason to run without it
            holder = lock.owner()
            # It may have ended between the two questions. A run that retries has published its successor before it ends.
            if holder is None or holder.label == lock.label:
                if lock.acquire(timeout=MOMENT):
                    return True, None
                holder = lock.owner()
            return False, holder
        return False, None

    def _conflict(self, lock: Lock, holder: LockInfo | None, options: Options, request: Context | None) -> Any:
        """Do what the options say about a duplicate: return the task's result, or raise."""
        error = TaskAlreadyRunning(
            lock.name,
            "an execution that starts or ends at this moment" if holder is None else holder.holder,
            None if holder is None else holder.ttl,
        )
        policy, limit = options.on_conflict, options.reschedule_limit
        if request is not None and holder is not None and holder.label == lock.label:
            # The same id: a retry whose former run goes on, or a message delivered twice. It may be the only copy.
            policy, limit = "reschedule", None
        events.emit(
            "conflict",
            "%s finds the lock held for %.1f s by %s (on_conflict: %s).",
            lock.label,
            0.0 if holder is None else holder.age,
            error.holder,
            policy,
            level=logging.WARNING if policy == "skip" else None,
            name=lock.name,
            holder=holder,
            task=self.name,
            task_id=None if request is None else request.id,
            on_conflict=policy,
        )
        if callable(policy):
            return policy(self, error)
        if policy == "skip":
            return options.skip_result
        if policy == "reschedule":
            self._reschedule(error, options, request, limit)
        raise error

    def _reschedule(self, error: LockError, options: Options, request: Context | None, limit: int | None) -> NoReturn:
        """Publish the same message again for later, or raise the error where that cannot be done.

        As `Task.retry` does, but without spending one of the task's retries. And the state is stored before the message is
        out: for a Retry, Celery stores it afterwards, and so over the result of a successor that was faster.
        """
        if request is None or request.is_eager:
            raise error
        headers = request.as_execution_options()["headers"]
        before = headers.get(RESCHEDULED_HEADER, 0)
        if limit is not None and before >= limit:
            raise error
        delay = options.reschedule_delay * random.uniform(0.5, 1.5)  # noqa: S311
        message = self.signature_from_request(
            request, countdown=delay, retries=request.retries, headers={**headers, RESCHEDULED_HEADER: before + 1}
        )
        try:
            if not (self.ignore_result or request.ignore_result):
                self.backend.mark_as_retry(message.options["task_id"], error, request=request)
            super().apply_async(message.args, message.kwargs, **message.options)  # the key stays what its producer said
        except Exception as failure:
            raise error from failure
        events.log.info("%s[%s] is published again, to start in %.1f s.", self.name, request.id, delay)
        raise Ignore(f"published again: {error}")

    # The lock

    @property
    def _options(self) -> Options:
        return options_of.complete(self._given_options)

    @cached_property
    def _signature(self) -> inspect.Signature:
        return signature_of(self.run)

    def _name(self, args: Any, kwargs: Any, request: Context | None = None) -> str:
        headers = {} if request is None else request.headers or {}
        key = headers.get(KEY_HEADER)
        if not isinstance(key, str):
            key = self._key(self._signature.bind(*args, **kwargs))
        return lock_name(self.name, key)

    def _key(self, bound: inspect.BoundArguments) -> str:
        return make(self._given_options.get("key"), bound)

    def _lock(self, name: str, options: Options, label: str = "") -> Lock:
        settings = conf.get()
        return Lock(
            get_client() if settings.enabled else UNLOCKED,
            name,
            expire=options.expire,
            auto_renewal=options.auto_renewal,
            max_hold=options.max_hold,
            label=label,
            kind="celery",
            prefix=settings.key_prefix,
        )


def _release(lock: Lock) -> None:
    """Release the lock, if it is held."""
    try:
        lock.release()
    except NotAcquired:
        pass  # a duplicate, or Redis did not answer at the start
    except LockLost:
        pass  # told when it was noticed; the body's outcome stands
    except LockBackendError as error:
        events.log.warning("%s could not release its lock, which ends by its expiry: %s", lock.label, error)
    except BaseException:  # a soft time limit, in the middle of it
        with suppress(LockError):
            lock.release()
        raise


class SingleInstanceTask(SingleInstanceMixin, _DjangoTask):
    """A task that runs one instance at a time: ``@shared_task(base=SingleInstanceTask, single_instance={"expire": 60})``."""
