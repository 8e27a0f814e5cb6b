"""The options of a single-instance task: checked where they are written, completed from the settings where they are
used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from django.utils.functional import cached_property

from .. import conf
from ..connections import server
from ..core.options import LIFE, RenewalOptions
from ..core.validation import Seconds, check_limit, nearest
from ..name_template import check_parameters as check_names, fields as fields_of
from ..tenants import import_callable
from .execution_lock import ExecutionLock
from .key import Key

OnConflict = Literal["raise", "skip", "reschedule", "wait"] | Callable[..., Any]


class SingleInstanceOptions(RenewalOptions, total=False):
    """The options of ``@single_instance(...)`` and ``single_instance={...}``; the rest comes from
    ``DJANGO_REDISLOCK["CELERY"]``.

    See `single_instance` for the defaults.
    """

    scope: Literal["run", "queued", "queued+run", "job"]
    """When the lock is held. "run": while the body runs; "queued": from publishing to the start; "queued+run": both, so
    that one waits and one runs at most; "job": from publishing to the end, over retries."""
    key: Key
    """Which executions exclude each other; None: those with the same arguments. A format string names parameters, as in
    ``"report:{customer_id}"``; a list names the parameters that count (``[]``: one lock for the task); a callable takes
    the arguments of the task, and returns a string. Format strings and callables see the arguments as the body does: an
    enum that derives from str or int is its value, so write ``{status}`` and not ``{status.value}``; a tuple is a list;
    with ``pydantic=True`` a model is a model, as in ``{order.id}``."""
    on_conflict: OnConflict
    """What a duplicate does. A callable gets the task and the TaskAlreadyRunning; its return value is the task's
    result."""
    wait: Seconds
    """Seconds that ``on_conflict="wait"`` waits before it raises. It occupies a process or a thread of its worker."""
    skip_result: Any
    """The result of a task that ``on_conflict="skip"`` skipped."""
    on_duplicate: Literal["return", "raise", "replace"]
    """What publishing a duplicate does where the scope begins with it: return the holder's result as a
    `DuplicateResult`, or raise TaskAlreadyRunning. "replace", for the scopes "queued" and "queued+run", returns it and
    lets the waiting message run with the duplicate's arguments. A message that has an id already (a member of a canvas,
    a retry) is published in any case."""
    queue_life: Seconds
    """Seconds that a message holds the lock at most while it waits in its queue; more by its countdown, less by its
    expiry."""
    keep_for: Seconds
    """Seconds that the lock stays after the body has returned or failed, so that the task starts no more often than
    that."""
    on_backend_error: Literal["raise", "run", "reschedule"]
    """What a task does when it cannot start because Redis does not answer."""
    lock_direct_calls: bool
    """Whether ``task(...)``, a plain call of the function, takes the lock too."""
    reschedule_delay: Seconds
    """Seconds, on average, until a rescheduled task tries again. The delay grows to a tenth of the time waited so far,
    5 minutes at most."""
    reschedule_limit: Seconds | None
    """Seconds from its first conflict for which a message is rescheduled; after them a conflict is raised. None: until
    the ``expires`` of the message, if it has one. A retry is another message, and has the whole time again."""
    tenant: Callable[[], str] | str | None
    """The beginning of every key: a callable, or its dotted path, that returns the current tenant. None: all tenants
    share the lock of the task."""
    limit: int | Callable[..., int] | None
    """How many executions of a key run at once, from 1 to 100, or a callable of the task's arguments that returns it at
    each start. For the scopes "run" and "queued+run": waiting messages and jobs are one for a key."""
    group: str | None
    """What stands in the name of the run's lock in place of the task's name: tasks of a group share locks and limit."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions(conf.CelerySettings):
    """Every option, with the value in force now."""

    settings: conf.Settings = field(repr=False)  # a URL may hold a password
    """The settings that provide the options that are not given."""
    limit: int | Callable[..., int] | None = None
    group: str | None = None
    tenant: Callable[[], str] | str | None = None

    @cached_property
    def get_tenant(self) -> Callable[[], str] | None:
        """The callable of `tenant`, imported at its first use. Raises ImproperlyConfigured when the import fails."""
        return import_callable(self.tenant, "tenant")

    @cached_property
    def lock(self) -> ExecutionLock:
        """The lock from which each lock of the task is copied."""
        return ExecutionLock(
            server(self.settings),
            "celery",
            kind="celery",
            **self.settings.lock_options | {option: getattr(self, option) for option in LIFE},
        )


OWN = ("limit", "group")
"""The options that no setting gives to all tasks."""
NAMES = (*(each.name for each in fields(conf.CelerySettings)), "tenant", *OWN)


class Declaration:
    """The options that ``@single_instance`` attaches to a function."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.options = check(options, function)
        self.function = f"{function.__module__}.{function.__qualname__}"
        self.effective = False
        """Whether a task class has it."""


def complete(given: Mapping[str, Any], settings: conf.Settings) -> TaskOptions:
    """Return the options given, and the rest from the settings. Raises ValueError when they do not fit together."""
    options = {**vars(settings.celery), "tenant": settings.tenant, **given}
    # Two settings are for the tasks that they fit.
    check_scope({**options, "on_duplicate": given.get("on_duplicate"), "keep_for": given.get("keep_for")})
    return TaskOptions(settings=settings, **options)


def check_scope(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that do not fit the scope, or the key."""
    scope = options.get("scope", "run")
    if options.get("on_duplicate") == "replace":
        if "scope" in options and scope not in ("queued", "queued+run"):
            raise ValueError(
                "on_duplicate='replace' is about the arguments of a waiting message, so it needs scope='queued' or "
                f"scope='queued+run', not {scope!r}"
            )
        if options.get("key", "") is None:
            raise ValueError(
                "on_duplicate='replace' needs a key without the arguments that are replaced: with key=None, the "
                "arguments of a duplicate are the same"
            )
    if options.get("keep_for") and scope == "queued":
        raise ValueError("keep_for needs another scope: with scope='queued' the lock ends before the body")
    for name in OWN:
        if options.get(name) is not None and scope not in ("run", "queued+run"):
            raise ValueError(f"{name} is about runs, so it needs scope='run' or scope='queued+run', not {scope!r}")


def check(given: object, function: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the options of a task of this function; raises TypeError or ValueError that names what is wrong."""
    if not isinstance(given, Mapping):
        raise TypeError(f"single_instance must be a dict of options, not {type(given).__name__}")
    checked: dict[str, Any] = {}
    for name, value in given.items():
        if name not in NAMES:
            near = nearest(str(name), NAMES)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(NAMES)}."
            if near == "wait":
                hint += " It is how long a duplicate with on_conflict='wait' waits for the lock, in seconds."
            raise TypeError(f"single_instance has no option {name!r}: {hint}")
        if name in LIFE and name != "max_hold" and value is None:
            continue  # None means the value of the settings, as everywhere
        section = conf.Settings if name == "tenant" else conf.CelerySettings
        checked[name] = _check_own(name, value) if name in OWN else conf.check_option(section, name, value)
    check_parameters(checked.get("key"), function)
    check_scope(checked)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{getattr(function, '__qualname__', function)} is an async function: its lock would be released before "
            "its body runs. Let a plain function run it, with asgiref's async_to_sync or asyncio.run()."
        )
    return checked


def _check_own(name: str, value: Any) -> Any:
    if value is None or (name == "limit" and callable(value)):
        return value
    if name == "limit":
        return check_limit(value)
    if not isinstance(value, str):
        raise TypeError(f"group must be a str, not {type(value).__name__}")
    if not value:
        raise ValueError("group must not be empty")
    return value


def check_parameters(key: Key, function: Callable[..., Any] | None) -> None:
    """Raise ValueError when the key names something that is no parameter of the function."""
    if key is None or callable(key) or function is None:
        return
    check_names(fields_of(key) if isinstance(key, str) else key, function, "key")
