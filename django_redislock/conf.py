"""The one reader of ``settings.DJANGO_REDISLOCK``.

Nothing is written into the settings and nothing is read at import, so ``override_settings`` just works.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, TypeVar

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured

Seconds = float
NAME = "DJANGO_REDISLOCK"


@dataclass(frozen=True)
class CacheSettings:
    """Defaults of the cache backends; ``OPTIONS["LOCK"]`` of an alias overrides them."""

    expire: Seconds = 10.0
    auto_renewal: bool = True
    max_hold: Seconds | None = 300.0
    wait: Seconds | None = 30.0
    on_wait_timeout: str = "compute"


@dataclass(frozen=True)
class CelerySettings:
    """Defaults of ``@single_instance``; the options of a task override them."""

    scope: str = "run"
    on_conflict: str | Callable[..., Any] = "raise"
    expire: Seconds = 30.0
    auto_renewal: bool = True
    max_hold: Seconds | None = None
    wait: Seconds = 10.0
    on_backend_error: str = "raise"


@dataclass(frozen=True)
class Settings:
    """``settings.DJANGO_REDISLOCK``, typed, every key optional."""

    cache_alias: str = "default"
    url: str | None = None
    key_prefix: str = "redislock"
    expire: Seconds = 30.0
    auto_renewal: bool = True
    max_hold: Seconds | None = None
    timeout: Seconds | None = None
    enabled: bool = True
    cache: CacheSettings = field(default_factory=CacheSettings)
    celery: CelerySettings = field(default_factory=CelerySettings)


CHOICES = {
    "on_wait_timeout": ("compute", "raise"),
    "scope": ("run",),
    "on_conflict": ("raise", "skip", "reschedule", "wait"),
    "on_backend_error": ("raise", "run", "reschedule"),
}
ZERO_ALLOWED = frozenset({"timeout", "wait"})


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the settings: what it is, and what to write instead."""

    message: str
    hint: str
    unknown_key: bool = False


def get() -> Settings:
    """Return the settings as they are now.

    Raises ImproperlyConfigured with the first problem found.
    """
    global _last_read
    raw = getattr(django_settings, NAME, None)
    if _last_read is None or _last_read[0] is not raw:
        typed, problems = read(raw)
        if problems:
            raise ImproperlyConfigured(f"{problems[0].message} {problems[0].hint}")
        _last_read = (raw, typed)
    return _last_read[1]


_last_read: tuple[object, Settings] | None = None


def read(raw: object) -> tuple[Settings, list[Problem]]:
    """Turn the raw dict into settings and list everything wrong with it; what is wrong keeps its default."""
    problems: list[Problem] = []
    return override(Settings(), {} if raw is None else raw, NAME, problems), problems


S = TypeVar("S", bound="Settings | CacheSettings | CelerySettings")


def override(base: S, raw: object, where: str, problems: list[Problem] | None = None) -> S:
    """Return `base` with the keys of `raw` (a dict with upper-case keys) in place of its own.

    Appends what is wrong to `problems`; without a list the first problem raises ImproperlyConfigured.
    """
    found: list[Problem] = []
    changes: dict[str, Any] = {}
    if not isinstance(raw, Mapping):
        found.append(Problem(f"{where} is not a dict but {raw!r}.", "Write a dict with the documented keys."))
        raw = {}
    by_key = {f.name.upper(): f.name for f in fields(base)}
    for key, value in raw.items():
        name = by_key.get(key)
        here = f"{where}[{key!r}]"
        if name is None:
            near = difflib.get_close_matches(str(key).upper(), by_key, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(sorted(by_key))}."
            found.append(Problem(f"{here} is not a known setting.", hint, unknown_key=True))
            continue
        current = getattr(base, name)
        try:
            if isinstance(current, (CacheSettings, CelerySettings)):
                changes[name] = override(current, value, here, found)
            else:
                changes[name] = _value(base, name, value)
        except ValueError as error:
            found.append(Problem(f"{here} is {value!r}.", f"It must be {error}."))
    if problems is None and found:
        raise ImproperlyConfigured(f"{found[0].message} {found[0].hint}")
    if problems is not None:
        problems.extend(found)
    return replace(base, **changes)


def _value(base: Settings | CacheSettings | CelerySettings, name: str, value: object) -> object:
    """Return the value as the setting's type, or raise ValueError with what it must be."""
    kind = next(f.type for f in fields(base) if f.name == name)
    if value is None and "None" in str(kind):
        return None
    or_none = " or None" if "None" in str(kind) else ""
    if str(kind).startswith("bool"):
        if not isinstance(value, bool):
            raise ValueError("True or False")
        return value
    if str(kind).startswith("Seconds"):
        if isinstance(value, timedelta):
            value = value.total_seconds()
        lowest = "at least 0" if name in ZERO_ALLOWED else "above 0"
        wanted = f"a number of seconds {lowest} or a timedelta{or_none}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(wanted)
        if value < 0 or (value == 0 and name not in ZERO_ALLOWED):
            raise ValueError(wanted)
        return float(value)
    if name == "on_conflict" and callable(value):
        return value
    choices = CHOICES.get(name)
    if not isinstance(value, str) or not value or (choices and value not in choices):
        raise ValueError(f"one of {', '.join(map(repr, choices))}" if choices else f"a non-empty string{or_none}")
    return value
