"""``@single_instance``, and how it reaches the task.

A task's class is made from the function by ``Celery._task_from_fun``, later and once for each app, with the base that
``@shared_task`` names. Celery has no hook there, so importing this module adds one: a marked function gets the mixin
put in front of its base, exactly as if the base and the options had been written out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar, Unpack, overload
from weakref import WeakSet

from celery import Celery, Task, _state
from celery.local import Proxy
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from .options import Declaration, SingleInstanceOptions, TaskOptions, check_parameters
from .running import SingleInstanceMixin

F = TypeVar("F", bound=Callable[..., Any])

DECLARATION = "__single_instance__"

FOR_CELERY = (
    "@single_instance is for Celery's tasks; a task of Django's own framework has its lock by @locked:\n\n"
    "    @task\n    @locked(...)\n    def ..."
)


_declarations: WeakSet[Declaration] = WeakSet()


@overload
def single_instance(function: F, /) -> F: ...
@overload
def single_instance(**options: Unpack[SingleInstanceOptions]) -> Callable[[F], F]: ...
def single_instance(function: Any = None, /, **options: Any) -> Any:
    """Let one instance of a task run at a time: put it under ``@shared_task`` or ``@app.task``, bare or with options.

    Options that are not given come from ``DJANGO_REDISLOCK["CELERY"]``, in capitals, or are::

        scope="run"             when the lock is held: or "queued", "queued+run", "job"
        key=None                which executions exclude each other: those with the same arguments
        tenant=None             the beginning of every key: a callable that returns the tenant
        expire=30               seconds until the lock expires without renewal
        auto_renewal=True       whether it is renewed while the body runs
        max_hold=None           seconds that it is renewed at most
        renewal_jitter=0.1      share by which the pause until a renewal is shortened at random
        on_conflict="raise"     what a duplicate does: or "skip", "reschedule", "wait", a callable
        wait=10                 seconds that "wait" waits before it raises
        skip_result=None        what "skip" returns
        on_duplicate="return"   what publishing a duplicate does: or "raise", "replace"
        queue_life=3600         seconds that a waiting message holds its lock
        keep_for=0              seconds that the lock stays after the body
        on_backend_error="raise"  what happens when Redis does not answer: or "run", "reschedule"
        lock_direct_calls=False  whether task(...) takes the lock, too
        reschedule_delay=10     seconds until a rescheduled task tries again; later ones grow
        reschedule_limit=None   seconds for which it tries; None: until its message expires
        limit=None              how many of a key run at once, or a callable; None: one
        group=None              stands for the task in the name of the run's lock, which tasks share

    The settings take all but the last two. `SingleInstanceOptions` describes each. Times are seconds or a timedelta.
    When the lock is lost while the body runs, the task's result stands; ``self.single_instance.raise_if_lost()``
    reports the loss to the body. Raises TypeError and ValueError for bad options, and TypeError for anything but a
    function.
    """

    def declare(function: F) -> F:
        if issubclass(type(function), Proxy) or isinstance(function, Task):
            raise TypeError(
                "@single_instance must stand below @shared_task or @app.task, next to the function:\n\n"
                "    @shared_task\n    @single_instance\n    def ..."
            )
        if hasattr(function, "enqueue"):
            raise TypeError(FOR_CELERY)
        if isinstance(function, type):
            raise TypeError(
                "@single_instance decorates functions; write a task class as class X(SingleInstanceTask), with its "
                "options as the attribute single_instance = {...}"
            )
        # A partial() and other callables are refused: their parameters are not those of the function that they call.
        if not callable(function) or not hasattr(function, "__code__") or inspect.ismethod(function):
            raise TypeError(f"@single_instance decorates functions, not {function!r}; options are given by name")
        declaration = Declaration(function, options)
        setattr(function, DECLARATION, declaration)
        _declarations.add(declaration)
        return function

    return declare if function is None else declare(function)


_task_from_fun = Celery._task_from_fun


def _task_from_marked_fun(
    self: Celery, fun: Callable[..., Any], name: str | None = None, base: Any = None, **options: Any
) -> Any:
    declaration = getattr(fun, DECLARATION, None)
    if declaration is not None:
        if "single_instance" in options:
            raise TypeError(
                f"{declaration.function} has both @single_instance and single_instance=...; use one of them"
            )
        options["single_instance"] = declaration
        base = base or self.Task
        if not issubclass(base, SingleInstanceMixin):
            base = type(base.__name__, (SingleInstanceMixin, base), {"__module__": base.__module__})
    task = _task_from_fun(self, fun, name, base, **options)
    if options.get("pydantic") is True and isinstance(task, SingleInstanceMixin):
        context = {**(options.get("pydantic_context") or {}), "celery_app": self, "celery_task_name": task.name}
        task._pydantic = {"strict": options.get("pydantic_strict", False), "context": context}
    return task


Celery._task_from_fun = _task_from_marked_fun  # type: ignore[assignment, method-assign]


def _refuse_tasks_of_django(framework: str) -> None:
    """Let this framework, if it is installed, raise TypeError for a function with the mark: it ran without a lock."""
    try:
        kind: Any = import_module(f"{framework}.base").Task
    except ImportError:
        return
    check = kind.__post_init__

    def refuse(self: Any) -> None:
        if hasattr(self.func, DECLARATION):
            raise TypeError(FOR_CELERY)
        check(self)

    kind.__post_init__ = refuse


for _framework in ("django.tasks", "django_tasks"):  # of Django 6.0, and its package for older ones
    _refuse_tasks_of_django(_framework)


def _unused_declarations() -> list[Declaration]:
    return sorted((each for each in _declarations if not each.effective), key=lambda each: each.function)


def check_tasks() -> list[CheckMessage]:
    """Report functions and tasks that ask to be single-instance and are not."""
    found: list[CheckMessage] = []
    unused = _unused_declarations()
    apps = list(_state._get_active_apps())  # type: ignore[attr-defined]
    if unused and not apps:  # then no function is a task yet
        more = "" if len(unused) == 1 else f" (and {len(unused) - 1} more)"
        return [
            Error(
                f"{unused[0].function}{more} is marked with @single_instance, but no Celery app has been imported.",
                hint="Import the app where Django starts: write 'from .celery import app as celery_app' in the "
                "__init__.py of the project. Otherwise the messages of this process go to Celery's default app, which "
                "does not know your broker.",
                id="redislock.E010",
            )
        ]
    for app in apps:
        try:
            tasks = app.tasks if app.autofinalize else {}
        except Exception as error:  # the error of any task; a worker would get it, too
            return [Error(f"{app!r} cannot make its tasks: {type(error).__name__}: {error}", id="redislock.E011")]
        # The mixin removes the options of its own tasks, so options that are still there have no effect.
        found += [
            Error(
                f"The task {name} has options single_instance={{...}}, but it is not a SingleInstanceTask.",
                hint="Give it base=SingleInstanceTask, or @single_instance(...) in place of the options.",
                id="redislock.E012",
            )
            for name, task in tasks.items()
            if isinstance(getattr(task, "single_instance", None), Mapping)
        ]
        for task in tasks.values():
            if isinstance(task, SingleInstanceMixin):
                options = task._options
                found += [*_check_expire(app, task, options), *_check_super(task)]
                found += [*_check_key(task, options), *_check_tenant(task, options)]
    return found + [
        Error(
            f"{declaration.function} is marked with @single_instance, but no task was made from it.",
            hint="Put @shared_task or @app.task directly above @single_instance; a decorator between them must use "
            "functools.wraps. Two tasks of one name are one task: the first. For Django's tasks write @locked.",
            id="redislock.E010",
        )
        for declaration in _unused_declarations()
    ]


def _check_expire(app: Celery, task: SingleInstanceMixin, options: TaskOptions) -> list[CheckMessage]:
    """Report a task that may still run when its lock has expired."""
    limit = task.time_limit or app.conf.task_time_limit
    if options.auto_renewal or options.scope == "queued" or not limit or limit <= options.expire:
        return []
    return [
        Warning(
            f"The task {task.name} may run for {limit:g} s, but its lock expires after {options.expire:g} s.",
            hint="Leave auto_renewal on, or give it an expire that is longer than its time_limit.",
            id="redislock.W010",
        )
    ]


def _check_key(task: SingleInstanceMixin, options: TaskOptions) -> list[CheckMessage]:
    """Report a task that the key of the settings does not fit; the decorator has checked a key of the task itself."""
    if "key" in task._given_options:
        return []
    try:
        check_parameters(options.key, task.run)
    except ValueError as error:
        return [
            Error(
                f"{conf.NAME}['CELERY']['KEY'] does not fit the task {task.name}: {error}",
                hint="Give the task a key of its own. key=[] means one lock for all arguments.",
                id="redislock.E013",
            )
        ]
    return []


def _check_tenant(task: SingleInstanceMixin, options: TaskOptions) -> list[CheckMessage]:
    """Report a task whose tenant cannot be imported."""
    try:
        options.get_tenant  # noqa: B018 - it is imported
    except ImproperlyConfigured as error:
        hint = f"Correct {conf.NAME}['TENANT'], or the task's own option."
        return [Error(f"The task {task.name} has no key. {error}", hint=hint, id="redislock.E014")]
    return []


def _check_super(task: SingleInstanceMixin) -> list[CheckMessage]:
    """Report a task whose class overrides a method of ours and does not call it."""
    ours = SingleInstanceMixin.__mro__
    found: list[CheckMessage] = []
    for kind in type(task).__mro__:
        if kind in ours:
            break
        for name in {"__call__", "apply_async"} & kind.__dict__.keys():
            code = getattr(inspect.unwrap(kind.__dict__[name]), "__code__", None)
            if code is not None and name not in code.co_names:  # super().name() and Base.name() both name it
                found.append(
                    Warning(
                        f"The task {task.name} has no lock: {kind.__qualname__}.{name} does not call super().{name}().",
                        hint="Call super() there, or remove @single_instance.",
                        id="redislock.W011",
                    )
                )
    return found
