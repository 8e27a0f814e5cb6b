"""The options of a lock: each with its type, its default and its check, in this one place.

Each way to make a lock (`Lock`, ``lock()``, a semaphore, ``cache.lock()``, a quorum, a task, the lease of a value)
passes them on without naming them, and so do the settings. An option was written in twenty files, and each new one was
missing somewhere without a word. A new one is a field and a line of a TypedDict here, and what it does where it acts;
tests/django/test_every_option.py asks for its row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_type_hints

from . import validation
from .validation import Seconds, unexpected


class Kind(NamedTuple):
    """What an option accepts. The settings, the decorators and the calls use the same kinds."""

    words: str
    """The allowed values in words."""
    check: Callable[[Any, str], Any]
    """Returns the checked value of an argument, or raises TypeError or ValueError that names the argument."""


def _check_hold(value: object, argument: str) -> float | None:
    seconds = validation.check_expire(value, argument)
    # The longest one is no limit: a leader, which has it, waited for itself when it stood for election again.
    return None if seconds == validation.MAX_SECONDS else seconds


def _check_text(value: object, argument: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, not {type(value).__name__}")
    return value


def _check_listener(value: Any, argument: str) -> Any:
    if not callable(value) or inspect.iscoroutinefunction(value):
        raise TypeError(f"{argument} must be a plain function")
    return value


Flag = Annotated[bool, Kind("True or False", validation.check_flag)]
Expiry = Annotated[float, Kind("a number of seconds from 0.001 to ten years or a timedelta", validation.check_expire)]
Hold = Annotated[float, Kind("a number of seconds from 0.001 to ten years or a timedelta", _check_hold)]
Share = Annotated[float, Kind("a number from 0 to 1", validation.check_share)]
Replicas = Annotated[int, Kind("a number of replicas from 0 to 100", validation.check_replicas)]
Prefix = Annotated[str, Kind("a non-empty string without braces", validation.check_prefix)]
Id = Annotated[str, Kind("printable ASCII characters", validation.check_id)]
Text = Annotated[str, Kind("a string", _check_text)]
Listener = Annotated[Callable[[Any], object], Kind("a plain function", _check_listener)]


class RenewalOptions(TypedDict, total=False):
    """The options of whatever is renewed: a lock, a slot, a task's lock, the lease of a value."""

    expire: Seconds | None
    auto_renewal: bool | None
    max_hold: Seconds | None
    renewal_jitter: float | None


class LockOptions(RenewalOptions, total=False):
    """The options of every lock that the settings may have a default for, and those of one lock alone."""

    id: str | None
    label: str | None
    on_lost: Callable[[Any], object] | None
    kind: str
    min_replicas: int | None


class CoreOptions(LockOptions, total=False):
    """The options of a lock that is given its client."""

    prefix: str
    reentrant: bool


@dataclass(frozen=True)
class Renewal:
    """The life of an acquisition: see `Options`."""

    expire: Expiry = 30.0
    """Seconds until it ends without a renewal."""
    auto_renewal: Flag = True
    """Whether the watchdog renews it."""
    max_hold: Hold | None = None
    """Seconds for which the watchdog renews it at most; None: without limit."""
    renewal_jitter: Share = 0.1
    """The share by which the pause until a renewal is shortened at random, so that processes that started together do
    not renew together."""


@dataclass(frozen=True)
class LockDefaults(Renewal):
    """The options of a lock that have a default in the settings."""

    min_replicas: Replicas = 0
    """Replicas that must confirm each acquisition and renewal."""


@dataclass(frozen=True)
class Options(LockDefaults):
    """The options of one lock object, checked."""

    id: Id | None = None
    label: Text = ""
    on_lost: Listener | None = None
    kind: Text = "lock"
    prefix: Prefix = "redislock"
    reentrant: Flag = False


DEFAULTS = Options()


def kinds_of(section: type) -> dict[str, Kind | None]:
    """Return the kind of each option of a dataclass; it allows None where the type does. None: it has no kind."""
    kinds: dict[str, Kind | None] = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        optional = NoneType in get_args(hint)
        kind = next(iter(getattr(get_args(hint)[0] if optional else hint, "__metadata__", ())), None)
        if optional and kind is not None:
            kind = _or_none(kind)
        kinds[name] = kind
    return kinds


def _or_none(kind: Kind) -> Kind:
    return Kind(f"{kind.words} or None", lambda value, argument: None if value is None else kind.check(value, argument))


KINDS = {name: kind for name, kind in kinds_of(Options).items() if kind is not None}
LIFE = tuple(field.name for field in fields(Renewal))
FROM_SETTINGS = tuple(field.name for field in fields(LockDefaults))
"""The options that have a default in the settings."""


def checked_options(function: str, given: Mapping[str, Any], without: Iterable[str] = ()) -> Options:
    """Return the options of a call, each checked; None is an option that is not given.

    `without`: those that this function does not have. Raises TypeError and ValueError that name the argument.
    """
    known = KINDS.keys() - set(without)
    if wrong := given.keys() - known:
        raise unexpected(function, wrong, {*known, "blocking", "timeout"})  # which are no options, and may be meant
    changes = {name: KINDS[name].check(value, name) for name, value in given.items() if value is not None}
    if not changes:
        return DEFAULTS
    # What dataclasses.replace() does, without a call for each field: the lock of each message of Celery is built so.
    made = object.__new__(Options)
    vars(made).update(vars(DEFAULTS), **changes)
    return made
