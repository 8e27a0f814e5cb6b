"""Tasks that note when they run; what they do in between comes with the arguments."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

from celery import chain, shared_task, signals
from celery.exceptions import Ignore, Reject

from django_redislock.celery import single_instance
from tests.support.celery_site.run_log import RunLog


class Deadly:
    """A result that kills the process which is about to store it."""

    def __json__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def act(task: Any, name: str, how: str = "return") -> Any:
    """Start, wait if the name asks for it, and end in the way that is asked for."""
    run_log = RunLog(name)
    with run_log.run(task.request.id):
        if name.startswith("blocked"):
            run_log.wait_until_bodies_may_end()
        match how:
            case "return":
                return f"ran {task.request.id}"
            case "fail":
                raise ZeroDivisionError(name)
            case "retry" | "retry after a second":
                if task.request.retries < 2:
                    # Not at once: Celery stores RETRY after it has published the retry, at times over its result.
                    raise task.retry(countdown=0.3 if how == "retry" else 1.0, max_retries=2)
                return task.request.retries
            case "retry elsewhere":  # with other arguments, which are another key
                raise task.retry(args=(f"{name}-elsewhere",), countdown=1)
            case "retry late":
                if task.request.retries < 1:
                    raise task.retry(countdown=2, max_retries=2)
                return task.request.retries
            case "retry and die":
                if task.request.retries < 1:
                    task.retry(countdown=30, throw=False)
                    os.kill(os.getpid(), signal.SIGKILL)
                return task.request.retries
            case "ignore":
                raise Ignore
            case "reject":
                raise Reject("not wanted")
            case "reject once" | "fail once" if len(run_log.events("start")) == 1:
                raise Reject("not yet") if how == "reject once" else ZeroDivisionError("not yet")
            case "reject at times" | "fail at times" if random.random() < 0.5:
                raise Reject("not yet") if how == "reject at times" else ZeroDivisionError("not yet")
            case "reject once" | "fail once" | "reject at times" | "fail at times":
                return f"ran {task.request.id}"
            case "replace":
                raise task.replace(plain.si(name).set(queue=task.request.delivery_info["routing_key"]))
            case "replace by itself":
                members = [each.si(name).set(queue=task.request.delivery_info["routing_key"]) for each in (task, plain)]
                raise task.replace(chain(*members))
            case "exit":
                raise SystemExit(1)
            case "cancelled":
                raise asyncio.CancelledError
            case "brief":
                time.sleep(random.uniform(0, 0.3))
                return f"ran {task.request.id}"
            case "slow":  # longer than the broker waits for an acknowledgement
                time.sleep(random.uniform(1.5, 2.5))
                return f"ran {task.request.id}"
            case "sleep":  # until a signal comes
                time.sleep(60)
            case "once killed":
                if len(run_log.events("start")) == 1:
                    time.sleep(60)
                return f"ran {task.request.id}"
            case "result kills":
                return Deadly() if len(run_log.events("start")) == 1 else "never mind"
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(60)
            case "until lost":
                run_log.note("held", fence=task.single_instance.lock.fence)
                deadline = time.monotonic() + 60
                while task.single_instance.lost is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                try:
                    task.single_instance.raise_if_lost()
                except Exception as error:
                    run_log.note("told", error=type(error).__name__)
                return "finished all the same"
    raise ValueError(how)


@signals.task_prerun.connect
def _before_the_start(args: Any = (), **others: Any) -> None:
    if "killed before the start" in args:
        os.kill(os.getpid(), signal.SIGKILL)
    if "deaf before the start" in args:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@shared_task
def plain(name: str) -> str:
    """A task without a lock."""
    RunLog(name).note("plain")
    return "plain"


@shared_task
def gather(results: list[Any]) -> int:
    """The body of a chord."""
    return len(results)


@shared_task
def note_error(request: Any, error: BaseException, traceback: object, name: str = "") -> None:
    RunLog(name).note("errback", error=type(error).__name__)


def made(name: str, *, late: bool = False, **options: Any) -> Any:
    """Make a task from its options. A life of ten minutes, so that a lock that is left does not look released."""

    def body(self: Any, name: str, how: str = "return") -> Any:
        return act(self, name, how)

    body.__qualname__ = body.__name__ = name.rpartition(".")[2]
    marked = single_instance(key="{name}", **{"expire": 600, **options})(body)
    return shared_task(
        bind=True, name=name if "." in name else f"{__name__}.{name}", acks_late=late, reject_on_worker_lost=late
    )(marked)


# One for each policy. A life of ten minutes, so that a lock that is left behind does not look like one that is
# released.
refuse = made("refuse", reschedule_delay=0.3)
skip = made("skip", on_conflict="skip", skip_result="skipped")
wait = made("wait", on_conflict="wait", wait=60)


@shared_task(bind=True, max_retries=0)
@single_instance(key="{name}", expire=600, on_conflict="reschedule", reschedule_delay=0.2, reschedule_limit=None)
def reschedule(self: Any, name: str, how: str = "return") -> Any:
    return act(self, name, how)


limited = made("limited", on_conflict="reschedule", reschedule_delay=0.3, reschedule_limit=60)


def decide(task: Any, error: Exception) -> Any:
    """Return the holder as the duplicate's result."""
    return ["decided", type(error).__name__, task.name]


@shared_task(bind=True)
@single_instance(key="{name}", expire=600)
def nested(self: Any, name: str, depth: int = 0) -> Any:
    """A task that calls itself, like a function and through Celery."""
    if depth:
        return f"ran {self.request.id}"
    RunLog(name).note("start")
    return [self(name, 1), self.apply((name, 1)).get(disable_sync_subtasks=False)]


# For the deaths of workers: a life that a test can wait for.
mortal = made("mortal", expire=2)


# For a loss: a life that nobody outsleeps before the test takes the lock away, and yet a renewal soon that tells of it.
losing = made("losing", expire=3)


mortal_late = made("mortal_late", late=True, expire=2, reschedule_delay=0.3)


@shared_task(bind=True, autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0.3, max_retries=3)
@single_instance(key="{name}", expire=600)
def autoretry(self: Any, name: str, how: str = "return") -> Any:
    run_log = RunLog(name)
    with run_log.run(self.request.id):
        if name.startswith("blocked"):
            run_log.wait_until_bodies_may_end()
        if self.request.retries < 2:
            raise ZeroDivisionError(name)
        return self.request.retries


run_without = made("run_without", expire=2, on_backend_error="run")
try_later = made("try_later", expire=2, on_backend_error="reschedule", reschedule_delay=0.5)


# One for each scope that begins with publishing.
queued = made("queued", scope="queued")
queued_and_run = made("queued_and_run", scope="queued+run", reschedule_delay=0.2, on_conflict="reschedule")
queued_and_run_later = made("queued_and_run_later", scope="queued+run", reschedule_delay=5, on_conflict="reschedule")
queued_and_run_refuse = made("queued_and_run_refuse", scope="queued+run")
job = made("job", scope="job")


job_skip = made("job_skip", scope="job", on_conflict="skip", skip_result="skipped")
mortal_job = made("mortal_job", expire=2, scope="job")
mortal_queued = made("mortal_queued", expire=2, scope="queued+run", on_conflict="reschedule", reschedule_delay=0.3)
# For renewals that a test waits to see: a child that stands still for two seconds does not lose its lock.
spawned = [made(f"spawned_{scope.replace('+', '_')}", expire=4, scope=scope) for scope in ("run", "queued+run", "job")]
mortal_waiting = made("mortal_waiting", expire=4, scope="queued+run", on_conflict="wait", wait=60)
throttled = made("throttled", keep_for=60)
short_queue = made("short_queue", scope="job", queue_life=1)


# Of which two run at once.
AGAIN: dict[str, Any] = {"expire": 2, "on_conflict": "reschedule", "reschedule_delay": 0.3}
two = made("limits.two", limit=2)
two_wait = made("limits.two_wait", limit=2, on_conflict="wait", wait=60)
two_queued = made("limits.two_queued", limit=2, scope="queued+run", on_conflict="reschedule", reschedule_delay=0.2)
two_mortal = made("limits.two_mortal", limit=2, **AGAIN)
of_group, of_group_too = (made(f"limits.of_group_{number}", limit=2, group="crm", **AGAIN) for number in (1, 2))


def given_limit(name: str, how: str = "return", limit: int = 2) -> int:
    return {"zero": 0, "many": 3}.get(how, limit) if how != "no limit" else 1 // 0


@shared_task(bind=True)
@single_instance(key="{name}", expire=600, limit=given_limit, scope="queued+run")
def of_given_limit(self: Any, name: str, how: str = "return", limit: int = 2) -> Any:
    return act(self, name, "return")


# Acknowledged late: one for each scope under which a message that is delivered again must not run beside its first run,
# and those whose first run dies: all with a life that a test can wait for, as a copy looks again at its end.
def late_task(name: str, scope: str, expire: float = 2, **options: Any) -> Any:
    return made(f"late.{name}", late=True, scope=scope, expire=expire, reschedule_delay=0.3, **options)


late = late_task("late", "run")
late_queued = late_task("late_queued", "queued+run")


@shared_task(bind=True, acks_late=True, reject_on_worker_lost=True, name="late.noting")
@single_instance(
    key="{name}", scope="queued+run", on_duplicate="replace", expire=2, on_conflict="reschedule", reschedule_delay=0.1
)
def late_noting(self: Any, name: str, number: int) -> None:
    run_log = RunLog(name)
    run_log.note("ran with", id=self.request.id, number=number)
    with run_log.run(self.request.id):
        is_killed = name.startswith("blocked") and len(run_log.events("start")) == 1
        time.sleep(60 if is_killed else 0.2)


late_job = late_task("late_job", "job")
late_two = late_task("late_two", "run", limit=2)
rejected = [late_task(f"rejected_{scope.replace('+', '_')}", scope) for scope in ("run", "queued", "queued+run", "job")]

once_job = late_task("once_job", "job")
once_job.reject_on_worker_lost = None
retried_job = late_task("retried_job", "job", expire=30)
retried_job.retry_on_worker_lost = True  # of Celery 5.7
retried_job.default_retry_delay = 2


def refuse_by_hand(task: Any, error: Exception) -> None:
    raise error


refusing = [
    late_task("refusing", "run", on_conflict="raise"),
    late_task("refusing_by_hand", "run", on_conflict=refuse_by_hand),
]
for each in rejected + refusing:
    each.acks_on_failure_or_timeout = False
    if hasattr(each, "acks_on_failure"):  # of Celery 5.7
        each.acks_on_failure = False
dying = late_task("dying", "run")
dying_job = late_task("dying_job", "job")
dying_two = late_task("dying_two", "run", limit=2)


# Of which copies come in any order: one for each policy and scope, and acknowledgement.
def copied_task(number: int, *, late: bool, **options: Any) -> Any:
    name = f"copied.copied_{number}_{'late' if late else 'early'}"
    return made(name, late=late, **{"expire": 2, "reschedule_delay": 60, **options})


POLICIES: list[dict[str, Any]] = [
    {"on_conflict": "raise"},
    {"on_conflict": "skip", "skip_result": "skipped"},
    {"on_conflict": "reschedule"},
    {"on_conflict": "wait", "wait": 20},
    {"on_conflict": decide},
    {"scope": "queued"},
    {"scope": "queued+run"},
    {"scope": "job"},
    {"limit": 2},
    {"scope": "queued+run", "limit": 2, "on_conflict": "wait", "wait": 20},
]
COPIED = [
    copied_task(number, late=late, **options) for number, options in enumerate(POLICIES) for late in (False, True)
]

# The same, with a shorter delay, for the soak.
SOAKED = [
    copied_task(100 + number, late=late, **options, reschedule_delay=1)
    for number, options in enumerate(POLICIES)
    for late in (False, True)
]
