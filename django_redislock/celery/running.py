"""The task class that holds a lock while its body runs.

Why in ``Task.__call__``: Celery's tracer calls it, if a class defines it, between the hooks before and after the body,
and outside the wrapper that ``autoretry_for`` puts around the body. So a ``finally`` in it runs for every end that
leaves the process alive (Retry, Ignore, Reject, soft limit and SystemExit too), before callbacks are sent and the
result is stored, and a conflict is not retried as if it were the body's failure.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import celery
from celery import Celery, states
from celery.app import trace
from celery.app.task import Context, Task
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, Reject, Retry

from ..core import Lock, LockInfo, chance, events
from ..core.options import Renewal
from ..exceptions import LockBackendError, LockError, TaskAlreadyRunning
from . import options as options_of
from .ending import REMAINS, is_requeued, outcome_of
from .execution_lock import AfterRelease, Execution, ExecutionLock, executions
from .main_process import noting_decode_errors, request_class
from .message import (
    COPY_FENCE_HEADER,
    FIRST_CONFLICT_HEADER,
    KEY_HEADER,
    PLACELESS_HEADER,
    REFUSED_HEADER,
    RESCHEDULED_HEADER,
    WAITED_HEADER,
    delivery_of,
    header,
    leave_place,
    longest_delay,
    marker_expire,
    release_quietly,
    unpack_arguments,
    waiting_expire,
    warn_foreign,
    warn_lost_place,
)
from .options import Declaration, TaskOptions
from .publishing import HANDOVER_GRACE, PublishingMixin

MARGIN = 0.1
"""Seconds between the expiry of a lock or a processed marker and the next try."""

GROWTH = 0.1
"""The delay of a rescheduled task is at least this part of the time waited so far."""
LONGEST_DELAY = 300.0
"""Longest delay by this growth in seconds, on average. A broker gives a message to another worker much later."""

HIDES_IGNORED_RETRIES = hasattr(trace, "get_actual_ignore_result")
"""Whether Celery stores no RETRY when the message has `ignore_result`; before 5.6.3 it asks the task only."""

if TYPE_CHECKING:
    _DjangoTask = DjangoTask[Any, Any]
else:
    _DjangoTask = DjangoTask


class HandledElsewhere(Ignore):
    """A copy of the message is processed elsewhere, or it was published again. This copy ends and stores nothing."""


class Run(NamedTuple):
    """What the steps of one run share."""

    lock: ExecutionLock
    options: TaskOptions
    request: Context | None
    """None in a direct call."""

    @property
    def task_id(self) -> str | None:
        """The id of the task; None in a direct call."""
        return None if self.request is None else self.request.id


class SingleInstanceMixin(PublishingMixin):
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
        if not isinstance(cls.Request, property):  # it would hide ours, and a job outlive its hard time limit
            cls._own_request, cls.Request = cls.Request, SingleInstanceMixin.Request  # type: ignore[method-assign]
        run = getattr(cls, "run", None)
        if "single_instance" in cls.__dict__:
            given = cls.__dict__["single_instance"]
            del cls.single_instance  # so that the property of that name shows
            if isinstance(given, Declaration):
                given.effective = True
                given = given.options
            cls._given_options = {**cls._given_options, **options_of.check(given, run)}
            options_of.check_scope(cls._given_options)
        if "run" in cls.__dict__:  # the key of a base class may not fit this function
            options_of.check({"key": cls._given_options.get("key")}, run)
        throws = getattr(cls, "throws", ())
        throws = throws if isinstance(throws, tuple) else (throws,)
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

    def start_strategy(self, app: Any, consumer: Any, **kwargs: Any) -> Any:
        """Return how a worker handles the task's messages."""
        return noting_decode_errors(super().start_strategy(app, consumer, **kwargs))

    _own_request: Any = None
    """The `Request` of the task's class or options, if they have one: a class or its path."""

    @property
    def Request(self) -> Any:  # type: ignore[override]
        """The class of this task's requests in a worker's main process."""
        return request_class(self._own_request or super().Request)

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

    if celery.VERSION < (5, 5):

        def push_request(self, *args: Any, **kwargs: Any) -> None:
            """Begin a call within the request of its message, which Celery 5.4 forgets outside a worker."""
            self.request_stack.push(Context(*args, **{**self.request.__dict__, **kwargs}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body while holding the lock; the lock's end never changes the body's outcome."""
        try:
            run = self._prepared(args, kwargs)
        except HandledElsewhere:  # a copy of the message has its place
            raise
        except BaseException:  # also of a soft time limit: the lock of the message stayed for an hour
            request = self._traced_request()
            if request is not None:
                leave_place(self._lock_of_message(request.id or "", header(request, KEY_HEADER), request))
            raise
        return run()

    def _prepared(self, args: Any, kwargs: Any) -> Callable[[], Any]:
        """Return what runs the body, in the way that this call asks for."""
        options, request = self._options, self._traced_request()
        if request is not None:
            request.update(single_instance_called=True)
        elif not options.lock_direct_calls:
            return partial(super().__call__, *args, **kwargs)
        key = self._key_of(args, kwargs, request)
        name, task_id = self._name_of_run(key), None if request is None else request.id
        for outer in executions():
            if outer.lock is not None and outer.lock.name == name:
                return partial(self._body, task_id, outer.lock, args, kwargs)
        if options.scope != "run":
            warn_foreign(self.name, options.scope, request)
        if request is not None:
            request.update({KEY_HEADER: key})  # also of a message without ours, for its retry
        place = None if task_id is None else self._lock_of_message(task_id, key, request)
        try:
            lock = self._running_lock(key, options, request, args, kwargs, place)
        except Exception as error:  # of a callable that was given as limit
            if request is not None and not self._is_rejected(error):  # as after a conflict: the message has ended
                label, delivery = f"{self.name}[{task_id}]", delivery_of(request)
                lock = options.lock.with_name(name, limit=1, label=label, delivery=delivery)
                self._claim_message(Run(lock, options, request), ends=True)
            raise
        run = Run(lock, options, request)
        refused = header(request, REFUSED_HEADER)
        if refused is not None and options.on_conflict == "skip":
            return partial(self._skip, run, place or lock, f"{refused} held the lock when this message was published")
        if options.scope == "queued" and (lock.delivery is None or not lock.delivery.message):
            leave_place(place)
            return partial(self._body, task_id, None, args, kwargs)
        return partial(self._run_under_lock, run, args, kwargs)

    def _body(self, task_id: str | None, lock: Lock | None, args: Any, kwargs: Any) -> Any:
        execution = Execution(self.name, task_id, lock)
        try:
            with execution:
                return super().__call__(*args, **kwargs)
        finally:
            # A handler may raise as the block begins or ends: then each later run of this name, in this thread, passed
            # for one within it, and ran without a lock.
            execution.over = True

    def _run_under_lock(self, run: Run, args: Any, kwargs: Any) -> Any:
        """Take the lock, run the body and release the lock, or do as the options say about a duplicate."""
        lock, options, request = run
        try:
            try:
                acquired, holder = self._acquire(run)
            except LockBackendError as error:
                if options.on_backend_error == "reschedule":
                    self._reschedule(run, error, options.reschedule_limit)
                if options.on_backend_error != "run":
                    raise
                events.log.warning("%s runs without its lock, because Redis does not answer.", lock.label)
                if lock.other_place is not None:  # else it lasts as long as the body
                    lock.place = leave_place(lock.place, later=False)  # a retry of the body may take it again
            else:
                if not acquired:
                    self._end_if_copy(run)
                    return self._conflict(run, holder)
                lock.place = None
            if self._tracks_started:
                self._store_started(request)
            try:
                if not lock.had_place:
                    warn_lost_place(lock, request, options)
                if lock.newest is not None:
                    newest_args, newest_kwargs = unpack_arguments(lock.newest, request, self.app, lock.label)
                    if newest_args is not None:
                        args, kwargs = newest_args, newest_kwargs
                result = self._body(run.task_id, None if options.scope == "queued" else lock, args, kwargs)
            except BaseException as error:
                self._set_ending(run, error)
                raise
            self._set_ending(run)
            return result
        except (HandledElsewhere, Retry, Reject) as error:
            if not isinstance(error, Reject) or (self.acks_late and is_requeued(error)):
                lock.place = None  # from now on, another message or a copy of this one has it
            raise
        finally:
            try:
                release_quietly(lock)
                leave_place(lock.place)
            except BaseException:  # of a handler, perhaps before the first line of either
                release_quietly(lock)
                leave_place(lock.place)
                raise

    def _store_started(self, request: Context | None) -> None:
        if request is not None and not (request.is_eager or self.ignore_result or request.ignore_result):
            where = {"pid": os.getpid(), "hostname": request.hostname}
            self.backend.store_result(request.id or "", where, states.STARTED, request=request)

    def _set_ending(self, run: Run, error: BaseException | None = None) -> None:
        """Decide what remains of the lock after the body, which ended with this error or without one."""
        lock, options, request = run
        outcome, delivery = outcome_of(error, self._is_rejected(error)), lock.delivery
        marker, holder = REMAINS[outcome][self.acks_late]
        if delivery is None or not delivery.message:
            marker = "keep"
        marker_expire = {"keep": 0.0, "ending": options.expire, "done": self._marker_expire}[marker]
        keep_id, keep = "", 0.0
        if holder == "nobody" and options.scope != "queued" and options.keep_for:
            keep_id, keep = f"{'' if delivery is None else delivery.id}:kept", options.keep_for
        # An eager run has no message. Its retry takes the lock anew, and does not exist where errors are propagated.
        elif holder == "message" and options.scope == "job" and request is not None and not request.is_eager:
            retry = error if isinstance(error, Retry) else None
            if delivery is not None and (retry is None or self._has_key(retry, lock.name)):
                keep_id, keep = delivery.id, self._life_of_retry(request, retry)
        lock.ending = AfterRelease(marker, marker_expire, keep_id, keep)
        if marker == "ending" and request is not None:
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

    def _has_key(self, retry: Retry, name: str) -> bool:
        """Return whether the message of a retry, which may have other arguments, is under the run's lock of this
        name."""
        message = getattr(retry, "sig", None)
        if message is None:
            return True
        key = self._key_of_retry(message.options)
        return key is not None and self._name_of_run(key) == name

    def _traced_request(self) -> Context | None:
        """Return the request of the execution that begins with this call; None for a plain call of the task."""
        request = self.request_stack.top
        if request is None or request.called_directly or any(outer.task_id == request.id for outer in executions()):
            return None
        return request

    def _acquire(self, run: Run) -> tuple[bool, LockInfo | None]:
        """Return whether the lock was acquired, and else its holder, if it has one that Redis can name."""
        lock, options, request = run
        wait = lock.answer_within = options.wait if options.on_conflict == "wait" else 0
        place = lock.other_place
        acquired = lock.acquire(timeout=wait) if wait and place is None else lock.acquire(blocking=False)
        if not acquired and wait and place is not None and not lock.refused:
            # A hard time limit may end the wait, and its message for ever.
            with place._copy(details=lock.details, delivery=lock.delivery).keep_alive(options.expire) as had:
                if had is False:  # it has it again, and afterwards nothing would tell what was lost
                    warn_lost_place(place, request, options)
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

    def _conflict(self, run: Run, holder: LockInfo | None) -> Any:
        """Treat a duplicate as the options say: return the task's result, or raise."""
        lock, options, request = run
        error = TaskAlreadyRunning(
            lock.name,
            "an execution that starts or ends at this moment" if holder is None else holder.holder,
            None if holder is None else holder.ttl,
        )
        policy, limit = options.on_conflict, options.reschedule_limit
        same = request is not None and holder is not None and holder.label == lock.label
        again = same and policy == "skip" and self._is_published_anew(run)
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
            task_id=run.task_id,
            on_conflict=policy,
            level=logging.DEBUG if policy == "skip" else None,  # the skip itself is logged
        )
        if policy == "reschedule":
            self._reschedule(run, error, limit, holder, silent=same)
        lock.count_duplicate()
        if not self._is_rejected(error):
            self._claim_message(run, ends=True, leaves=not callable(policy))  # which may ask for another delivery
            return self._answer_conflict(run, error, holder, policy, again)
        try:  # the message of an error comes again, so only another answer marks it
            result = self._answer_conflict(run, error, holder, policy, again)
        except (Ignore, Retry):  # which acknowledge the message
            self._claim_message(run, ends=True)
            raise
        self._claim_message(run, ends=True)
        return result

    def _answer_conflict(
        self, run: Run, error: TaskAlreadyRunning, holder: LockInfo | None, policy: Any, again: bool
    ) -> Any:
        """Return the result of a duplicate, or raise; `again`: its id is that of the run that holds the lock."""
        if callable(policy):
            return policy(self, error)
        if policy != "skip":
            raise error
        age = 0.0 if holder is None else holder.age
        result = self._skip(run, run.lock, f"the lock has been held for {age:.1f} s by {error.holder}")
        if again:  # what is stored under the id is the other run's
            raise HandledElsewhere("the run of its id goes on")
        return result

    def _is_published_anew(self, run: Run) -> bool:
        """Return whether a caller published this message under an id that it had used before.

        A retry and a replacement are published under the id of the run that they follow, and must not be dropped.
        """
        request, delivery = run.request, run.lock.delivery
        if request is None or request.retries or request.replaced_task_nesting:
            return False
        return delivery is not None and delivery.known

    def _skip(self, run: Run, lock: ExecutionLock, why: str) -> Any:
        events.emit(
            "skipped",
            "%s is skipped, because %s.",
            lock.label,
            why,
            name=lock.name,
            task=self.name,
            task_id=run.task_id,
        )
        return run.options.skip_result

    # Messages that are published again

    def _reschedule(
        self, run: Run, error: LockError, limit: float | None, holder: LockInfo | None = None, *, silent: bool = False
    ) -> NoReturn:
        """Publish the same message again for later, or raise the error where that cannot be done.

        Works like `Task.retry`, but spends none of the task's retries, and stores the state before the message is
        published: Celery stores the state of a Retry afterwards, perhaps over the result of a faster successor.
        `silent`: another run of the same id goes on, and its state stays.
        """
        lock, options, request = run
        before, since, waited = header(request, RESCHEDULED_HEADER) or 0, header(request, FIRST_CONFLICT_HEADER), 0.0
        # By the clock of the server, which the holder's age tells: a worker whose clock was ahead failed messages long
        # before the limit. While Redis does not answer, the delays count.
        now = None if holder is None else holder.acquired_at.timestamp() + holder.age
        if now is None or since is None:
            waited = header(request, WAITED_HEADER) or 0.0
            since = None if now is None else now - waited
        else:
            waited = max(0.0, now - since)
        if request is None or request.is_eager:
            raise error
        ends = limit is not None and waited >= limit
        # Also at the end: a copy of a message that had failed like this ran as soon as the lock was free.
        if isinstance(error, LockBackendError):
            # Not later: a message that is published again waited for the whole expiry of its own former start, which
            # Redis had granted without an answer, because it took that for a copy of itself.
            lock.release_tried()
        elif not (ends and self._is_rejected(error)):
            self._claim_message(run, ends=ends, leaves=ends)
        if ends:
            raise error
        delay = max(options.reschedule_delay, min(waited * GROWTH, LONGEST_DELAY))
        delay *= chance.uniform(0.5, 1.5)
        if limit is not None:
            delay = min(delay, limit - waited)
        ours = {RESCHEDULED_HEADER: before + 1, WAITED_HEADER: waited + delay}
        if since is not None:
            ours[FIRST_CONFLICT_HEADER] = since
        place = lock.other_place
        if place is not None:  # the message waits again, and keeps its lock
            with suppress(LockBackendError):
                expire = waiting_expire(self.app, options.queue_life, delay, None, request.expires)
                renewal = Renewal(expire, auto_renewal=False)
                had = place._copy(renewal=renewal, delivery=lock.delivery).take_again()
                if had is False:
                    warn_lost_place(place, request, options)
                if had is not None and header(request, PLACELESS_HEADER):
                    ours[PLACELESS_HEADER] = False
        try:
            if not (silent or self.ignore_result or request.ignore_result):
                self.backend.mark_as_retry(request.id or "", error, request=request)
            self._publish_again(lock, request, options, delay, ours)
        except Exception as failure:
            raise error from failure
        events.emit(
            "rescheduled",
            "%s[%s] is published again, to start in %.1f s.",
            self.name,
            request.id,
            delay,
            name=lock.name,
            task=self.name,
            task_id=request.id,
            delay=delay,
            often=before + 1,
        )
        if silent or self.store_errors_even_if_ignored or not HIDES_IGNORED_RETRIES:
            raise HandledElsewhere(f"published again: {error}")
        request.update(ignore_result=True)
        raise Retry(f"published again, to start in {delay:.1f} s: {error}", error)

    def _end_if_copy(self, run: Run) -> None:
        """End here and store nothing when the lock was refused because of a copy of the message.

        The copy runs, or its process has died; the expiry of its lock shows which. So the message is published once
        more, to start then. If the copy runs, and the message was acknowledged at its start, nothing else is needed. A
        message that is acknowledged late stays with the broker until it is processed. But a broker that redelivered it
        may delete it when this copy is acknowledged. So one message checks again, as long as the copy runs.
        """
        lock, options, request = run
        if lock.processed:
            events.log.info("%s was processed before; this copy of its message is dropped.", lock.label)
            raise HandledElsewhere("processed")
        if lock.retry_in is None or request is None:
            return
        holder, delay = None, lock.retry_in
        if self.acks_late:  # it asks on; another one looks once, and only at the expiry it can see who has died
            delay = min(delay, longest_delay(self.app))
        with suppress(LockBackendError):
            holder = lock.owner()
        fence = holder.fence if holder is not None and lock.is_copy(holder) else None
        if fence is not None and fence == header(request, COPY_FENCE_HEADER) and not self.acks_late:
            events.log.info("%s is running; this copy of its message is dropped.", lock.label)
            raise HandledElsewhere("a copy runs")
        try:
            self._publish_again(lock, request, options, delay + MARGIN, {COPY_FENCE_HEADER: fence}, alone=False)
        except Exception as failure:
            raise Reject(failure, requeue=True) from failure
        events.log.info(
            "%s is running, or its worker has died; this copy of its message starts again in %.1f s.", lock.label, delay
        )
        raise HandledElsewhere("a copy runs, or has died")

    def _claim_message(self, run: Run, *, ends: bool, leaves: bool = False) -> None:
        """Mark a message that ends here without a run, or else is published again now, unless a copy of it runs or was
        processed; `leaves`: release the lock under which it waited."""
        lock, options, request = run
        acknowledged = ends and not self.acks_late
        expire = marker_expire(self.app, options.queue_life) if acknowledged else options.expire
        try:
            if lock.claim(expire, "done" if acknowledged else "ending", leaves) and leaves:
                lock.place = None
        except LockBackendError as error:
            events.log.warning("Could not mark the message of %s, so its copies may run: %s", lock.label, error)
            return
        self._end_if_copy(run)
        if ends and not acknowledged and request is not None:
            request.update(single_instance_lock=lock)


class SingleInstanceTask(SingleInstanceMixin, _DjangoTask):
    """A task that runs one instance at a time: ``@shared_task(base=SingleInstanceTask, single_instance={"expire":
    60})``."""
