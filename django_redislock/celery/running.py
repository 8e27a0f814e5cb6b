"""The task class that holds a lock while its body runs.

Why in ``Task.__call__``: Celery's tracer calls it, if a class defines it, between the hooks before and after the body,
and outside the wrapper that ``autoretry_for`` puts around the body. So a ``finally`` in it runs for every end that
leaves the process alive (Retry, Ignore, Reject, soft limit and SystemExit too), before callbacks are sent and the
result is stored, and a conflict is not retried as if it were the body's failure.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery import Celery, states
from celery.app.task import Context, Task
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, Reject, Retry

from ..core import LockInfo, events
from ..exceptions import LockBackendError, TaskAlreadyRunning
from . import options as options_of
from .duplicates import waiting_expire
from .execution import Execution, executions, leave_queue, release_quietly
from .execution_lock import AfterRelease, ExecutionLock
from .key import lock_name
from .message import KEY_HEADER, REFUSED_HEADER, header
from .options import Declaration, TaskOptions
from .publishing import HANDOVER_GRACE
from .republish import HandledElsewhere, RepublishingMixin

_warned_foreign: set[str] = set()
"""Tasks for which the warning about a message without our headers was logged."""

if TYPE_CHECKING:
    _DjangoTask = DjangoTask[Any, Any]
else:
    _DjangoTask = DjangoTask


class SingleInstanceMixin(RepublishingMixin):
    """Makes a task class run one instance at a time: ``class MyTask(SingleInstanceMixin, ProjectTask)``.

    The options are a dict in the class attribute, or the task option, ``single_instance``; subclasses inherit them one
    by one. Raises TypeError and ValueError for bad options when the class is made.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Task in cls.__mro__ and cls.__mro__.index(Task) < cls.__mro__.index(SingleInstanceMixin):
            raise TypeError(
                f"{cls.__qualname__} has no lock, because its class derived from Task stands in front of the mixin: "
                f"write class {cls.__name__}(SingleInstanceMixin, ...)"
            )
        run = getattr(cls, "run", None)
        if "single_instance" in cls.__dict__:
            given = cls.__dict__["single_instance"]
            del cls.single_instance  # so that the property of that name shows
            if isinstance(given, Declaration):
                given.effective = True
                given = given.options
            cls._given_options = {**cls._given_options, **options_of.check(given, run)}
        if "run" in cls.__dict__:  # the key of a base class may not fit this function
            options_of.check({"key": cls._given_options.get("key")}, run)
        throws = getattr(cls, "throws", ())
        if not isinstance(throws, tuple):
            throws = (throws,)
        if TaskAlreadyRunning not in throws:
            cls.throws = (*throws, TaskAlreadyRunning)  # logged at INFO and without a traceback

    _tracks_started = False

    @classmethod
    def bind(cls, app: Celery) -> Any:
        """Have the run itself store STARTED: the tracer would also do so for a copy, perhaps over a result."""
        bound = super().bind(app)
        if cls.track_started:
            cls._tracks_started, cls.track_started = True, False
        return bound

    @property
    def Request(self) -> Any:  # type: ignore[override]
        """The class of this task's requests in a worker's main process."""
        from .request import request_class

        return request_class(super().Request)

    @property
    def single_instance(self) -> Execution:
        """The execution that runs now in this thread or, within ``async_to_sync``, in this coroutine.

        Outside of an execution, or without a lock, it is never lost.
        """
        for execution in reversed(executions()):
            if execution.task == self.name:
                return execution
        return Execution(self.name)

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body while holding the lock; the lock's end never changes the body's outcome."""
        options, request = self._options, self._traced_request()
        if request is None and not options.lock_direct_calls:
            return super().__call__(*args, **kwargs)
        key = self._key_of(args, kwargs, request)
        name, task_id = lock_name(self.name, key), None if request is None else request.id
        for outer in executions():
            if outer.lock is not None and outer.lock.name == name:
                with Execution(self.name, task_id, outer.lock):
                    return super().__call__(*args, **kwargs)
        if options.scope != "run":
            self._warn_foreign(request)
        lock = self._running_lock(name, options, request, args, kwargs)
        queued = None if task_id is None else self._lock_of_message(task_id, key, request)
        if queued is not None and queued.name == lock.name:  # the execution takes it over
            queued = None
        refused = header(request, REFUSED_HEADER)
        if refused is not None and options.on_conflict == "skip":
            return self._skip(
                queued or lock, options, request, f"{refused} held the lock when this message was published"
            )
        if options.scope == "queued" and (lock.delivery is None or not lock.delivery.message):
            leave_queue(queued)
            with Execution(self.name, task_id):
                return super().__call__(*args, **kwargs)
        try:
            try:
                acquired, holder = self._acquire(lock, options, queued)
            except LockBackendError as error:
                if options.on_backend_error == "reschedule":
                    self._reschedule(lock, error, options, request, options.reschedule_limit, queued)
                if options.on_backend_error != "run":
                    raise
                events.log.warning("%s runs without its lock, because Redis does not answer.", lock.label)
            else:
                if not acquired:
                    self._end_if_copy(lock, request, options)
                    return self._conflict(lock, holder, options, request, queued)
            if self._tracks_started:
                self._store_started(request)
            queued = leave_queue(queued)  # once: later, the message of a retry holds the place
            try:
                with Execution(self.name, task_id, None if options.scope == "queued" else lock):
                    result = super().__call__(*args, **kwargs)
            except BaseException as error:
                self._set_ending(lock, options, request, error)
                raise
            self._set_ending(lock, options, request)
            return result
        except (HandledElsewhere, Retry):  # from now on, another message or a copy of this one holds the place
            queued = None
            raise
        finally:
            release_quietly(lock)
            leave_queue(queued)

    def _warn_foreign(self, request: Context | None) -> None:
        """Warn once that a message has none of our headers, so it held no lock while it waited."""
        if (
            request is None
            or request.is_eager
            or header(request, KEY_HEADER) is not None
            or self.name in _warned_foreign
        ):
            return
        _warned_foreign.add(self.name)
        events.log.warning(
            "%s[%s] was published without its lock: the publishing program does not have the task's code, or something "
            "removed the headers of its message. For such messages the scope %r begins at their start.",
            self.name,
            request.id,
            self._options.scope,
        )

    def _store_started(self, request: Context | None) -> None:
        if request is not None and not (request.is_eager or self.ignore_result or request.ignore_result):
            where = {"pid": os.getpid(), "hostname": request.hostname}
            self.backend.store_result(request.id or "", where, states.STARTED, request=request)

    def _set_ending(
        self, lock: ExecutionLock, options: TaskOptions, request: Context | None, error: BaseException | None = None
    ) -> None:
        """Decide what remains of the lock after the body, which ended with this error or without one."""
        late, delivery = self.acks_late, lock.delivery
        if is_requeued(error) or (error is not None and not isinstance(error, Exception)):
            # The message comes again; at the end of a process, if it was not acknowledged. The job has not ended.
            if options.scope == "job" and late and delivery is not None:
                lock.ending = AfterRelease(keep_id=delivery.id, keep=options.queue_life)
            return
        processed_for = 0.0
        if delivery is not None and delivery.message and not self._is_rejected(error):
            processed_for = options.expire if late else self._marker_expire
        keep_id, keep = "", 0.0
        if isinstance(error, Retry):
            if options.scope == "job" and delivery is not None and self._has_key(error, lock):
                keep_id, keep = delivery.id, waiting_expire(self.app, options.queue_life, None, error.when, None)
        elif options.keep_for and options.scope != "queued" and not isinstance(error, (Ignore, Reject)):
            keep_id, keep = f"{'' if delivery is None else delivery.id}:kept", options.keep_for
        lock.ending = AfterRelease(processed_for, not late, keep_id, keep)
        if processed_for and late and request is not None:
            request.update(single_instance_lock=lock)

    def _is_rejected(self, error: BaseException | None) -> bool:
        """Return whether the broker is told that the message was not processed.

        A queue for dead letters may bring it back, and then it must run. So it leaves no marker.
        """
        if isinstance(error, Reject):
            return True
        if error is None or isinstance(error, (Retry, Ignore)) or not self.acks_late:
            return False
        return not getattr(self, "acks_on_failure", self.acks_on_failure_or_timeout)  # the second one of Celery 5.6

    def _has_key(self, retry: Retry, lock: ExecutionLock) -> bool:
        """Return whether the message of a retry, which may have other arguments, is under this lock."""
        message = getattr(retry, "sig", None)
        if message is None:
            return True
        try:
            key = self._key_of(message.args, message.kwargs)
        except TypeError:  # it has no key; its worker raises the error
            return False
        return lock_name(self.name, key) == lock.name

    def _traced_request(self) -> Context | None:
        """Return the request of the execution that begins with this call; None for a plain call of the task."""
        request = self.request_stack.top
        if request is None or request.called_directly or any(outer.task_id == request.id for outer in executions()):
            return None
        return request

    def _acquire(
        self, lock: ExecutionLock, options: TaskOptions, queued: ExecutionLock | None
    ) -> tuple[bool, LockInfo | None]:
        """Return whether the lock was acquired, and else its holder, if it has one that Redis can name."""
        wait = options.wait if options.on_conflict == "wait" else 0
        acquired = lock.acquire(timeout=wait) if wait and queued is None else lock.acquire(blocking=False)
        if not acquired and wait and queued is not None and not lock.refused:
            # A hard time limit may end the wait, and its message for ever.
            with queued._copy(details=lock.details).keep_alive(options.expire):
                acquired = lock.acquire(timeout=wait)
        if acquired or lock.refused:
            return acquired, None
        with suppress(LockBackendError):  # the lock is known to be held, so this is no reason to run without it
            holder = lock.owner()
            # It may have ended between the two calls. A run that retries publishes its successor before it ends.
            if holder is None or holder.label == lock.label:
                if lock.acquire(timeout=HANDOVER_GRACE):
                    return True, None
                holder = None if lock.refused else lock.owner()
            return False, holder
        return False, None

    def _conflict(
        self,
        lock: ExecutionLock,
        holder: LockInfo | None,
        options: TaskOptions,
        request: Context | None,
        queued: ExecutionLock | None,
    ) -> Any:
        """Treat a duplicate as the options say: return the task's result, or raise."""
        error = TaskAlreadyRunning(
            lock.name,
            "an execution that starts or ends at this moment" if holder is None else holder.holder,
            None if holder is None else holder.ttl,
        )
        policy, limit = options.on_conflict, options.reschedule_limit
        same = request is not None and holder is not None and holder.label == lock.label
        again = same and policy == "skip" and self._is_published_anew(lock, request)
        if same and not again:  # a retry whose former run goes on, or a copy that cannot be identified as one
            policy, limit = "reschedule", None
        events.emit(
            "conflict",
            "%s did not get its lock, which has been held for %.1f s by %s (on_conflict: %s).",
            lock.label,
            0.0 if holder is None else holder.age,
            error.holder,
            policy,
            name=lock.name,
            holder=holder,
            task=self.name,
            task_id=None if request is None else request.id,
            on_conflict=policy,
            level=logging.DEBUG if policy == "skip" else None,  # the skip itself is logged
        )
        if policy == "reschedule":
            self._reschedule(lock, error, options, request, limit, queued, silent=same)
        lock.count_duplicate()
        comes_again = self._is_rejected(error)  # so an error must leave no marker; another end does
        if not comes_again:
            self._claim_message(lock, request, options, final=True)
        if callable(policy):
            result = policy(self, error)
        elif policy == "skip":
            age = 0.0 if holder is None else holder.age
            result = self._skip(lock, options, request, f"the lock has been held for {age:.1f} s by {error.holder}")
            if again:  # what is stored under the id is the other run's
                raise HandledElsewhere("the run of its id goes on")
        else:
            raise error
        if comes_again:
            self._claim_message(lock, request, options, final=True)
        return result

    def _is_published_anew(self, lock: ExecutionLock, request: Context | None) -> bool:
        """Return whether a caller published this message under an id that it had used before.

        A retry and a replacement are published under the id of the run that they follow, and must not be dropped.
        """
        if request is None or request.retries or request.replaced_task_nesting:
            return False
        return lock.delivery is not None and lock.delivery.known

    def _skip(self, lock: ExecutionLock, options: TaskOptions, request: Context | None, why: str) -> Any:
        events.emit(
            "skipped",
            "%s is skipped, because %s.",
            lock.label,
            why,
            name=lock.name,
            task=self.name,
            task_id=None if request is None else request.id,
        )
        return options.skip_result


def is_requeued(error: object) -> bool:
    return isinstance(error, Reject) and bool(getattr(error, "requeue", False))


class SingleInstanceTask(SingleInstanceMixin, _DjangoTask):
    """A task that runs one instance at a time: ``@shared_task(base=SingleInstanceTask, single_instance={"expire":
    60})``."""
