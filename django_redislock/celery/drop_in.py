"""Bases in place of those of celery-once and celery-singleton: the options and errors of these, and our locks.

The page about migration lists what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from celery import Celery, states
from celery.result import AsyncResult, EagerResult

from ..core.validation import check_expire, check_flag, nearest
from ..exceptions import TaskAlreadyRunning
from ..name_template import check_parameters
from . import options as options_of
from .message import DuplicateResult
from .options import TaskOptions
from .running import SingleInstanceTask

__all__ = ["AlreadyQueued", "DuplicateTaskError", "QueueOnce", "Singleton"]

THEIRS = frozenset({"scope", "key", "on_duplicate", "queue_life"})
"""Those of our options that are made from the options of the other package."""


class AlreadyQueued(TaskAlreadyRunning):
    """The task waits or runs already; its lock ends in `countdown` seconds, unless it is renewed."""

    def __init__(self, countdown: float, key: str = "", holder: str = "") -> None:
        super().__init__(key, holder, countdown)
        self.args = countdown, key, holder
        self.countdown = countdown


class DuplicateTaskError(TaskAlreadyRunning):
    """The task waits or runs already, under the id `task_id`."""

    def __init__(self, message: str, task_id: str, key: str = "", holder: str = "", ttl: float | None = None) -> None:
        super().__init__(key, holder, ttl)
        self.args = message, task_id, key, holder, ttl
        self.task_id = task_id

    def __str__(self) -> str:
        return str(self.args[0])


class _DropIn(SingleInstanceTask):
    """A task with the options of another package; ``single_instance={...}`` has those that the other one lacks."""

    _replaced: Iterable[str] = ()
    """Methods of the other package that a class may override there; here, nothing would call them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        for name in {*cls._replaced} & cls.__dict__.keys():
            raise TypeError(f"{cls.__qualname__}.{name} would never be called: see the page about migration")
        cls._given_options = {name: value for name, value in cls._given_options.items() if name not in THEIRS}
        super().__init_subclass__(**kwargs)
        for name in THEIRS & cls._given_options.keys():
            raise TypeError(
                f"{cls.__qualname__} has {name!r} by the options of its base; give {name}=... to another one"
            )
        cls._translate({})

    @classmethod
    def bind(cls, app: Celery) -> Any:
        """Take also what the settings of the app say about all tasks of this base."""
        cls._translate(app.conf)
        return super().bind(app)

    @classmethod
    def _translate(cls, conf: Any) -> None:
        cls._given_options = {**cls._given_options, **cls._translated(conf)}
        options_of.check_scope(cls._given_options)

    @classmethod
    def _translated(cls, conf: Any) -> dict[str, Any]:
        raise NotImplementedError


def _from_once(once: object, known: tuple[str, ...], run: Callable[..., Any]) -> dict[str, Any]:
    """Return our options for those of celery-once. Raises TypeError and ValueError that name what is wrong."""
    if not isinstance(once, Mapping):
        raise TypeError(f"once must be a dict of options, not {type(once).__name__}")
    meant: dict[str, Any] = {}
    for name, value in once.items():
        where = f"once[{name!r}]"
        if name not in known:
            near = nearest(str(name), known)
            raise TypeError(f"{where} is unknown here: " + (f"did you mean {near!r}?" if near else ", ".join(known)))
        if name == "graceful":
            meant["on_duplicate"] = "return" if check_flag(value, where) else "raise"
        elif name == "unlock_before_run":
            meant["scope"] = "queued" if check_flag(value, where) else "job"
        elif name == "timeout":
            meant["queue_life"] = check_expire(value, where)
        elif value is not None:
            meant["key"] = _parameters(value, where, run)
    return meant


def _parameters(names: Any, where: str, run: Callable[..., Any]) -> tuple[str, ...]:
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{where} must be a list of the names of parameters, not {names!r}")
    check_parameters(names, run, where)
    return tuple(names)


class QueueOnce(_DropIn):
    """The base of celery-once, with its option ``once``: a dict of ``graceful``, ``unlock_before_run``, ``keys`` and
    ``timeout``. ``apply_async(once=...)`` takes ``graceful`` and ``timeout``.

    Publishing a duplicate raises `AlreadyQueued`; if graceful, it returns a result without an id, in the state
    REJECTED.
    """

    once: Mapping[str, Any] = {}
    _replaced = "get_key", "once_backend", "once_config", "default_timeout", "unlock_before_run"

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> AsyncResult[Any]:
        """Publish the task, unless it waits or runs already. Raises AlreadyQueued, unless graceful."""
        result = super().apply_async(args, kwargs, *more, **options)
        nothing: Any = None
        return EagerResult(nothing, None, states.REJECTED) if isinstance(result, DuplicateResult) else result

    @classmethod
    def _translated(cls, conf: Any) -> dict[str, Any]:
        settings = (conf.get("ONCE") or {}).get("settings", {})
        if settings.get("blocking"):
            raise ValueError("ONCE['settings']['blocking'] is unknown here: publishing a duplicate does not wait")
        default = settings.get("default_timeout")
        meant = {} if default is None else {"queue_life": check_expire(default, "ONCE['settings']['default_timeout']")}
        known = "graceful", "unlock_before_run", "keys", "timeout"
        return {"scope": "job", "key": None, "on_duplicate": "raise"} | meant | _from_once(cls.once, known, cls.run)

    def _options_of_call(self, message: dict[str, Any]) -> TaskOptions:
        once = message.pop("once", None)
        return replace(self._options, **_from_once(once, ("graceful", "timeout"), self.run)) if once else self._options

    def _refusal(self, error: TaskAlreadyRunning, task_id: str) -> TaskAlreadyRunning:
        return AlreadyQueued(error.ttl or 0.0, error.key, error.holder)


class Singleton(_DropIn):
    """The base of celery-singleton, with its options ``unique_on``, ``raise_on_duplicate`` and ``lock_expiry``.

    Publishing a duplicate returns the result of the task that waits or runs, or raises `DuplicateTaskError`.
    """

    unique_on: Any = None
    raise_on_duplicate: bool | None = None
    lock_expiry: float | None = None
    _replaced = "generate_lock", "get_existing_task_id", "lock_and_run", "aquire_lock", "on_duplicate"

    def release_lock(self, task_args: Any = None, task_kwargs: Any = None) -> None:
        """Force-release the lock of these arguments, as `unlock` does."""
        self.unlock(*(task_args or ()), **(task_kwargs or {}))

    @classmethod
    def _translated(cls, conf: Any) -> dict[str, Any]:
        meant: dict[str, Any] = {"scope": "job", "key": None, "on_duplicate": "return"}
        if cls.unique_on:  # without a name all arguments count, as there
            unique_on = [cls.unique_on] if isinstance(cls.unique_on, str) else cls.unique_on
            meant["key"] = _parameters(unique_on, "unique_on", cls.run)
        for name, option in ("raise_on_duplicate", "on_duplicate"), ("lock_expiry", "queue_life"):
            value, where = getattr(cls, name), name
            if value is None:
                value, where = conf.get(f"singleton_{name}"), f"singleton_{name}"
            if value is not None and option == "queue_life":
                meant[option] = check_expire(value, where)
            elif value is not None:
                meant[option] = "raise" if check_flag(value, where) else "return"
        return meant

    def _refusal(self, error: TaskAlreadyRunning, task_id: str) -> TaskAlreadyRunning:
        text = f"Attempted to queue a duplicate of task ID {task_id}"
        return DuplicateTaskError(text, task_id, error.key, error.holder, error.ttl)
