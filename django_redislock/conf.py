"""The one reader of ``settings.DJANGO_REDISLOCK``.

Nothing is written into the settings and nothing is read at import, so ``override_settings`` just works.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import django
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from redis.connection import parse_url

from .core import validation
from .core.driver import retry
from .name_template import check_key, check_tenant

if django.VERSION < (5, 2):
    raise ImportError(
        f"django-redislock needs Django 5.2 or newer, and {django.get_version()} is installed: pip install -U 'Django>=5.2'."
    )

NAME = "DJANGO_REDISLOCK"


class Kind(NamedTuple):
    """What a value must be, in words, and the function that returns it or raises TypeError or ValueError."""

    wanted: str
    read: Callable[[Any], object]


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _url(value: object) -> str:
    url = validation.check_name(value)
    parse_url(url)  # type: ignore[no-untyped-call]
    return url


def _wait(value: object) -> float:
    seconds = validation.check_timeout(value)
    if seconds is None:
        raise TypeError
    return seconds


def _retry(value: object) -> float:
    seconds = _wait(value)
    if seconds > 60:
        raise ValueError  # the server remembers for two minutes what was released, so that a repeated release gets its answer
    return seconds


def _one_of(*choices: str) -> Kind:
    return Kind(f"one of {', '.join(map(repr, choices))}", lambda value: choices[choices.index(value)])


_CONFLICT = _one_of("raise", "skip", "reschedule", "wait")

Flag = Annotated[bool, Kind("True or False", _bool)]
Text = Annotated[str, Kind("a non-empty string", validation.check_name)]
Url = Annotated[str, Kind("a URL that begins with redis://, rediss:// or unix://", _url)]
Prefix = Annotated[str, Kind("a non-empty string without braces", validation.check_prefix)]
Life = Annotated[float, Kind("a number of seconds from 0.001 to ten years or a timedelta", validation.check_expire)]
Wait = Annotated[float, Kind("a number of seconds from 0 to ten years or a timedelta", _wait)]
Retry = Annotated[float, Kind("a number of seconds from 0 to 60 or a timedelta", _retry)]
OnWaitTimeout = Annotated[str, _one_of("compute", "raise", "stale")]
OnError = Annotated[str, _one_of("raise", "stale")]
Share = Annotated[float, Kind("a number from 0 to 1", validation.check_share)]
SCOPES = ("run", "queued", "queued+run", "job")
Scope = Annotated[str, _one_of(*SCOPES)]
OnConflict = Annotated[
    str | Callable[..., Any],
    Kind(f"{_CONFLICT.wanted} or a callable", lambda value: value if callable(value) else _CONFLICT.read(value)),
]
OnBackendError = Annotated[str, _one_of("raise", "run", "reschedule")]
OnDuplicate = Annotated[str, _one_of("return", "raise")]
Key = Annotated[Any, Kind("a format string, a list of parameter names, a callable or None", check_key)]
Tenant = Annotated[Any, Kind("a callable, the dotted path of one or None", check_tenant)]
Anything = Annotated[Any, Kind("anything", lambda value: value)]


@dataclass(frozen=True)
class CacheSettings:
    """Defaults of the cache backends; ``OPTIONS["LOCK"]`` of an alias overrides them."""

    expire: Life = 10.0
    auto_renewal: Flag = True
    max_hold: Life | None = 300.0
    wait: Wait | None = 30.0
    on_wait_timeout: OnWaitTimeout = "compute"
    jitter: Share = 0.0
    on_error: OnError = "raise"


@dataclass(frozen=True)
class CelerySettings:
    """Every option of ``@single_instance`` with its default; the options of a task override them."""

    scope: Scope = "run"
    key: Key = None
    tenant: Tenant = None
    expire: Life = 30.0
    auto_renewal: Flag = True
    max_hold: Life | None = None
    on_conflict: OnConflict = "raise"
    wait: Wait = 10.0
    skip_result: Anything = None
    on_duplicate: OnDuplicate = "return"
    queue_life: Life = 3600.0
    keep_for: Wait = 0.0
    on_backend_error: OnBackendError = "raise"
    lock_direct_calls: Flag = False
    reschedule_delay: Life = 10.0
    reschedule_limit: Wait | None = None


@dataclass(frozen=True)
class Settings:
    """``settings.DJANGO_REDISLOCK``, typed, every key optional."""

    cache_alias: Text = "default"
    url: Url | None = None
    key_prefix: Prefix = "redislock"
    expire: Life = 30.0
    auto_renewal: Flag = True
    max_hold: Life | None = None
    timeout: Wait | None = None
    retry_for: Retry | None = None
    enabled: Flag = True
    cache: CacheSettings = field(default_factory=CacheSettings)
    celery: CelerySettings = field(default_factory=CelerySettings)


class Problem(NamedTuple):
    """One thing wrong with the settings: what it is, and what to write instead."""

    message: str
    hint: str
    unknown_key: bool = False


def get() -> Settings:
    """Return the settings as they are now.

    Raises ImproperlyConfigured with the first problem found.
    """
    global _last_read
    if _last_read is not None:
        try:  # most of the time: what `LazySettings` and the settings that it wraps keep, without asking them
            raw = _looked_up.get(NAME) or vars(_looked_up["_wrapped"]).get(NAME)
        except (KeyError, TypeError):  # not configured any more
            raw = None
        if _last_read[0] is raw:
            return _last_read[1]
    raw = getattr(django_settings, NAME, None)
    if _last_read is None or _last_read[0] is not raw:
        typed, problems = read(raw)
        if problems:
            raise ImproperlyConfigured(f"{problems[0].message} {problems[0].hint}")
        _last_read = (raw, typed)
        retry.retry_for = typed.retry_for
    return _last_read[1]


_last_read: tuple[object, Settings] | None = None
_looked_up: dict[str, Any] = vars(django_settings)
"""Django keeps here what was looked up, and forgets it with each change; a setting that is missing is not kept."""


@receiver(setting_changed)
def _forget(setting: str = "", **kwargs: Any) -> None:
    """Have those who keep something made from the settings make it anew: with other CACHES it would be another, too."""
    global _last_read
    if setting in (NAME, "CACHES"):
        _last_read = None


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
        found.append(Problem(f"{where} is {reprlib.repr(raw)}.", "It must be a dict with the documented keys."))
        raw = {}
    kinds = _KINDS[type(base)]
    for key, value in raw.items():
        here = f"{where}[{key!r}]"
        name = key.lower() if key in kinds else None
        if name is None:
            near = difflib.get_close_matches(str(key).upper(), kinds, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(sorted(kinds))}."
            found.append(Problem(f"{here} is not a known setting.", hint, unknown_key=True))
            continue
        kind = kinds[key]
        if kind is None:
            changes[name] = override(getattr(base, name), value, here, found)
            continue
        try:
            changes[name] = kind.read(value)
        except (TypeError, ValueError):
            shown = "not usable" if key == "URL" else reprlib.repr(value)  # a URL may hold a password
            found.append(Problem(f"{here} is {shown}.", f"It must be {kind.wanted}."))
    if problems is None and found:
        raise ImproperlyConfigured(f"{found[0].message} {found[0].hint}")
    if problems is not None:
        problems.extend(found)
    return replace(base, **changes)


def _kinds(section: type) -> dict[str, Kind | None]:
    """Return the kind of each key of a section; None stands for a section of its own."""
    kinds: dict[str, Kind | None] = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        optional = NoneType in get_args(hint)
        kind = next(iter(getattr(get_args(hint)[0] if optional else hint, "__metadata__", ())), None)
        if optional and kind is not None:
            kind = _or_none(kind)
        kinds[name.upper()] = kind
    return kinds


def _or_none(kind: Kind) -> Kind:
    return Kind(f"{kind.wanted} or None", lambda value: None if value is None else kind.read(value))


_KINDS: dict[type, dict[str, Kind | None]] = {
    section: _kinds(section) for section in (Settings, CacheSettings, CelerySettings)
}
