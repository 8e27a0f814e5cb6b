"""The task class that holds a lock while its body runs.

Why in ``Task.__call__``: Celery's tracer calls it, if a class defines it, between the hooks before and after the body, and
outside the wrapper that ``autoretry_for`` puts around the body. So a ``finally`` in it runs for every end that leaves the
process alive (Retry, Ignore, Reject, soft limit and SystemExit too), before callbacks are sent and the result is stored, and
a conflict is not retried as if it were the body's failure.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from celery import signals
from celery.app.task import Context
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, Reject, Retry

from ..core import LockInfo, events
from ..core.handover import Ending, ExecutionLock
from ..exceptions import LockBackendError, LockError, TaskAlreadyRunning
from . import options as options_of
from .base import AGAIN_HEADER, MOMENT, LockedTask
from .execution import Execution, leave_queue, release, running
from .key import lock_name
from .options import Mark, Options
from .publish import life

RESCHEDULED_HEADER = "single_instance_rescheduled"
"""Carries how often a message has been rescheduled."""
DONE_LIFE = 3600.0
"""Seconds for which a message is known as worked off: as long as a broker may take to deliver it again."""

if TYPE_CHECKING:
    _DjangoTask = DjangoTask[Any, Any]
else:
    _DjangoTask = DjangoTask


class SingleInstanceMixin(LockedTask):
    """Makes a task class run one instance at a time: ``class MyTask(SingleInstanceMixin, ProjectTask)``.

    The options are a dict in the class attribute, or the task option, ``single_instance``; subclasses inherit them one by one.
    Raises TypeError and ValueError for bad options when the class is made.
    """

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
        for execution in reversed(running.executions):
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
        for outer in running.executions:
            if outer.lock is not None and outer.lock.name == name:
                with Execution(self.name, task_id, outer.lock):
                    return super().__call__(*args, **kwargs)
        queued = None
        if request is not None and task_id is not None and options.scope in ("queued", "queued+run"):
            queued = self._waiting_lock(key, task_id, options, {})
        if options.scope == "queued":
            leave_queue(queued)
            with Execution(self.name, task_id):
                return super().__call__(*args, **kwargs)
        lock = self._running_lock(name, options, request, args, kwargs)
        try:
            try:
                acquired, holder = self._acquire(lock, options, queued)
            except LockBackendError as error:
                if options.on_backend_error == "reschedule":
                    self._reschedule(name, error, options, request, options.reschedule_limit, queued)
                if options.on_backend_error != "run":
                    raise
                events.log.warning("%s runs without its lock, for Redis does not answer.", lock.label)
            else:
                if lock.worked_off:
                    events.log.info("%s has been worked off before; this copy of its message is dropped.", lock.label)
                    raise Ignore("worked off before")
                if not acquired:
                    return self._conflict(lock, holder, options, request, queued)
            queued = leave_queue(queued)  # once: what holds the place later is the message of a retry
            try:
                with Execution(self.name, task_id, lock):
                    result = super().__call__(*args, **kwargs)
            except BaseException as error:
                self._set_ending(lock, options, request, error)
                raise
            self._set_ending(lock, options, request)
            return result
        except (_Rescheduled, Retry):  # what holds the place from now on is the message that was published again
            queued = None
            raise
        finally:
            release(lock)
            leave_queue(queued)

    def _set_ending(
        self, lock: ExecutionLock, options: Options, request: Context | None, error: BaseException | None = None
    ) -> None:
        """Have the lock end by how the body ended: with this error, or without."""
        delivery = lock.delivery
        marked = options.expire if delivery is not None and delivery.mark else 0.0
        if isinstance(error, Retry):
            lock.ending = Ending(marked)
            if options.scope == "job" and delivery is not None:
                waits = life(self.app, options.queue_life, None, error.when, None)
                lock.ending = Ending(marked, delivery.id, waits)
        elif error is not None and (isinstance(error, (Ignore, Reject)) or not isinstance(error, Exception)):
            return  # it is for the task to say what becomes of its message, and for the broker when the process ends
        elif options.keep_for:
            lock.ending = Ending(marked, f"{'' if delivery is None else delivery.id}:kept", options.keep_for)
        else:
            lock.ending = Ending(marked)
        if marked and request is not None:
            request.update(single_instance_lock=lock)

    def _traced_request(self) -> Context | None:
        """Return the request of the execution that begins with this call, or None when a task is called like a function."""
        request = self.request_stack.top
        if (
            request is None
            or request.called_directly
            or any(outer.task_id == request.id for outer in running.executions)
        ):
            return None
        return request

    def _acquire(
        self, lock: ExecutionLock, options: Options, queued: ExecutionLock | None
    ) -> tuple[bool, LockInfo | None]:
        """Return whether the lock was acquired, and else who holds it, as far as that can be known."""
        wait = options.wait if options.on_conflict == "wait" else 0
        acquired = lock.acquire(timeout=wait) if wait and queued is None else lock.acquire(blocking=False)
        if not acquired and wait and queued is not None and not lock.worked_off:
            with queued.alive(options.expire):  # a hard time limit may end the wait, and its message for ever
                acquired = lock.acquire(timeout=wait)
        if acquired:
            return True, None
        if lock.worked_off:
            return False, None
        with suppress(LockBackendError):  # that the lock is held is known, so this is no reason to run without it
            holder = lock.owner()
            # It may have ended between the two questions. A run that retries has published its successor before it ends.
            if holder is None or holder.label == lock.label:
                if lock.acquire(timeout=MOMENT):
                    return True, None
                holder = lock.owner()
            return False, holder
        return False, None

    def _conflict(
        self,
        lock: ExecutionLock,
        holder: LockInfo | None,
        options: Options,
        request: Context | None,
        queued: ExecutionLock | None,
    ) -> Any:
        """Do what the options say about a duplicate: return the task's result, or raise."""
        error = TaskAlreadyRunning(
            lock.name,
            "an execution that starts or ends at this moment" if holder is None else holder.holder,
            None if holder is None else holder.ttl,
        )
        policy, limit = options.on_conflict, options.reschedule_limit
        again = lock.delivery is not None and lock.delivery.again and holder is None
        if request is not None and (again or (holder is not None and holder.label == lock.label)):
            # The same id: a retry whose former run goes on, or a message delivered twice. It may be the only copy.
            policy, limit, again = "reschedule", None, True
        events.emit(
            "conflict",
            "%s finds the lock held for %.1f s by %s (on_conflict: %s).",
            lock.label,
            0.0 if holder is None else holder.age,
            error.holder,
            policy,
            name=lock.name,
            holder=holder,
            task=self.name,
            task_id=None if request is None else request.id,
            on_conflict=policy,
        )
        if policy != "reschedule":
            lock.count_duplicate()
        if callable(policy):
            return policy(self, error)
        if policy == "skip":
            events.emit(
                "skipped",
                "%s is skipped, for the lock has been held for %.1f s by %s.",
                lock.label,
                0.0 if holder is None else holder.age,
                error.holder,
                name=lock.name,
                task=self.name,
                task_id=None if request is None else request.id,
            )
            return options.skip_result
        if policy == "reschedule":
            self._reschedule(lock.name, error, options, request, limit, queued, again)
        raise error

    def _reschedule(
        self,
        name: str,
        error: LockError,
        options: Options,
        request: Context | None,
        limit: int | None,
        queued: ExecutionLock | None,
        again: bool = False,
    ) -> NoReturn:
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
        headers = {**headers, RESCHEDULED_HEADER: before + 1} | ({AGAIN_HEADER: True} if again else {})
        message = self.signature_from_request(request, countdown=delay, retries=request.retries, headers=headers)
        if queued is not None:  # it waits again, and is still the one that waits
            with suppress(LockBackendError):
                queued.acquire(blocking=False)
        try:
            if not (self.ignore_result or request.ignore_result):
                self.backend.mark_as_retry(message.options["task_id"], error, request=request)
            super(LockedTask, self).apply_async(
                message.args, message.kwargs, **message.options
            )  # the key stays what its producer said
        except Exception as failure:
            raise error from failure
        events.emit(
            "rescheduled",
            "%s[%s] is published again, to start in %.1f s.",
            self.name,
            request.id,
            delay,
            name=name,
            task=self.name,
            task_id=request.id,
            delay=delay,
            often=before + 1,
        )
        raise _Rescheduled(f"published again: {error}")


class _Rescheduled(Ignore):
    """The message was published again."""


@signals.task_postrun.connect
def _confirm(sender: Any = None, **kwargs: Any) -> None:
    """Note that the result of a message that may come again is stored and that its callbacks are sent."""
    if not isinstance(sender, SingleInstanceMixin):
        return
    request = sender.request_stack.top
    lock = getattr(request, "single_instance_lock", None)
    if request is None or lock is None:
        return
    try:
        lock.confirm(DONE_LIFE)
    except LockBackendError as error:
        events.log.warning("Nobody will know that %s was worked off: %s", lock.label, error)


class SingleInstanceTask(SingleInstanceMixin, _DjangoTask):
    """A task that runs one instance at a time: ``@shared_task(base=SingleInstanceTask, single_instance={"expire": 60})``."""
