"""The only reader of ``settings.DJANGO_REDISLOCK``, and the table of all options with their checks.

Nothing is written into the settings and nothing is read at import, so ``override_settings`` works.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

import django
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver

from .core import validation
from .core.driver import effects
from .core.options import (
    FROM_SETTINGS,
    Expiry,
    Flag,
    Hold,
    Kind,
    LockDefaults,
    Prefix,
    Renewal,
    Share,
    kinds_of,
)
from .name_template import check_key, check_tenant
from .server_url import UnknownOption, client_from_url

if django.VERSION < (5, 2):
    raise ImportError(
        f"django-redislock needs Django 5.2 or newer, and {django.get_version()} is installed: "
        "pip install -U 'Django>=5.2'."
    )

NAME = "DJANGO_REDISLOCK"


def _check_url(value: object, argument: str) -> str:
    url = validation.check_name(value, argument)
    client_from_url(url)
    return url


def _check_wait(value: object, argument: str) -> float:
    seconds = validation.check_timeout(value, argument)
    if seconds is None:
        raise TypeError(f"{argument} must be a number of seconds or a timedelta, not None")
    return seconds


def _check_retry(value: object, argument: str) -> float:
    seconds = _check_wait(value, argument)
    if seconds > 60:  # the server keeps the receipts of releases, which answer a repeated release, for two minutes
        raise ValueError(f"{argument} must be at most 60 seconds, not {value!r}")
    return seconds


def _one_of(*choices: str, callables: bool = False) -> Kind:
    words = f"one of {', '.join(map(repr, choices))}{' or a callable' if callables else ''}"

    def check(value: Any, argument: str) -> Any:
        if value in choices or (callables and callable(value)):
            return value
        raise ValueError(f"{argument} must be {words}, not {value!r}")

    return Kind(words, check)


Text = Annotated[str, Kind("a non-empty string", validation.check_name)]
URL_WORDS = (
    "a URL that begins with redis://, rediss:// or unix://, or names Sentinels and their service: "
    "redis+sentinel://host:26379,host:26379/service/0, or nodes of a Cluster: redis+cluster://host:6379,host:6379 "
    "(rediss+sentinel:// and rediss+cluster:// for TLS); percent-encode / ? # and % in its password (/ is %2F)"
)
Url = Annotated[str, Kind(URL_WORDS, _check_url)]
Wait = Annotated[float, Kind("a number of seconds from 0 to ten years or a timedelta", _check_wait)]
Retry = Annotated[float, Kind("a number of seconds from 0 to 60 or a timedelta", _check_retry)]
OnWaitTimeout = Annotated[str, _one_of("compute", "raise", "stale")]
OnError = Annotated[str, _one_of("raise", "stale")]
Scope = Annotated[str, _one_of("run", "queued", "queued+run", "job")]
OnConflict = Annotated[str | Callable[..., Any], _one_of("raise", "skip", "reschedule", "wait", callables=True)]
OnBackendError = Annotated[str, _one_of("raise", "run", "reschedule")]
OnDuplicate = Annotated[str, _one_of("return", "raise", "replace")]
Key = Annotated[Any, Kind("a format string, a list of parameter names, a callable or None", check_key)]
Tenant = Annotated[Any, Kind("a callable, the dotted path of one or None", check_tenant)]
Anything = Annotated[Any, Kind("anything", lambda value, argument: value)]


@dataclass(frozen=True)
class CacheSettings(Renewal):
    """Defaults of the cache backends; ``OPTIONS["LOCK"]`` of an alias overrides them."""

    expire: Expiry = 10.0
    max_hold: Hold | None = 300.0
    wait: Wait | None = 30.0
    on_wait_timeout: OnWaitTimeout = "compute"
    jitter: Share = 0.0
    on_error: OnError = "raise"


@dataclass(frozen=True)
class CelerySettings(Renewal):
    """Every option of ``@single_instance`` with its default; the options of a task override them."""

    scope: Scope = "run"
    key: Key = None
    on_conflict: OnConflict = "raise"
    wait: Wait = 10.0
    skip_result: Anything = None
    on_duplicate: OnDuplicate = "return"
    queue_life: Expiry = 3600.0
    keep_for: Wait = 0.0
    on_backend_error: OnBackendError = "raise"
    lock_direct_calls: Flag = False
    reschedule_delay: Expiry = 10.0
    reschedule_limit: Wait | None = None


@dataclass(frozen=True)
class Settings(LockDefaults):
    """``settings.DJANGO_REDISLOCK``, typed, every key optional."""

    cache_alias: Text = "default"
    url: Url | None = None
    key_prefix: Prefix = "redislock"
    timeout: Wait | None = None
    retry_for: Retry | None = None
    enabled: Flag = True
    tenant: Tenant = None
    enter_tenant: Tenant = None
    cache: CacheSettings = field(default_factory=CacheSettings)
    celery: CelerySettings = field(default_factory=CelerySettings)

    @cached_property
    def lock_options(self) -> dict[str, Any]:
        """The options that each lock of the settings has, unless it is given others."""
        return {"prefix": self.key_prefix, **{name: getattr(self, name) for name in FROM_SETTINGS}}


class Problem(NamedTuple):
    """A problem of the settings, and a hint what to write instead."""

    message: str
    hint: str
    unknown_key: bool = False


def get() -> Settings:
    """Return the settings as they are now.

    Raises ImproperlyConfigured with the first problem found.
    """
    global _last_read
    if _last_read is not None:
        try:  # the quick way: read the attributes of `LazySettings` and of the settings that it wraps
            raw = _looked_up.get(NAME) or vars(_looked_up["_wrapped"]).get(NAME)
        except (KeyError, TypeError):  # no longer configured
            raw = None
        if _last_read[0] is raw:
            return _last_read[1]
    raw = getattr(django_settings, NAME, None)
    if _last_read is None or _last_read[0] is not raw:
        typed, problems = read(raw)
        if problems:
            raise ImproperlyConfigured(f"{problems[0].message} {problems[0].hint}")
        _last_read = (raw, typed)
        effects.retry_for = typed.retry_for
    return _last_read[1]


_last_read: tuple[object, Settings] | None = None
_looked_up: dict[str, Any] = vars(django_settings)
"""Django stores here the settings that were read, and removes them at each change. A missing setting is not stored."""


@receiver(setting_changed)
def _forget(setting: str = "", **kwargs: Any) -> None:
    """Forget the settings object and everything derived from it; other CACHES change the derived servers."""
    global _last_read
    if setting in (NAME, "CACHES"):
        _last_read = None
        # A lock of `core` reads no settings: it kept the RETRY_FOR of an earlier test until something else read them.
        effects.retry_for = None


def read(raw: object) -> tuple[Settings, list[Problem]]:
    """Return the settings in this dict, and all problems of it. A wrong value is replaced by the default."""
    problems: list[Problem] = []
    return override(Settings(), {} if raw is None else raw, NAME, problems), problems


S = TypeVar("S", bound="Settings | CacheSettings | CelerySettings")


def override(base: S, raw: object, where: str, problems: list[Problem] | None = None) -> S:
    """Return `base` with the values of `raw`, a dict with upper-case keys.

    Appends the problems of `raw` to `problems`; without that list the first problem raises ImproperlyConfigured.
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
            near = validation.nearest(str(key).lower(), [known.lower() for known in kinds])
            hint = f"Did you mean {near.upper()!r}?" if near else f"Known keys: {', '.join(sorted(kinds))}."
            found.append(Problem(f"{here} is not a known setting.", hint, unknown_key=True))
            continue
        kind = kinds[key]
        if kind is None:
            changes[name] = override(getattr(base, name), value, here, found)
            continue
        try:
            changes[name] = kind.check(value, here)
        except UnknownOption as error:
            found.append(Problem(f"{here} is not usable: {error}.", "Correct the option after the question mark."))
        except (TypeError, ValueError):
            shown = "not usable" if key == "URL" else reprlib.repr(value)  # a URL may hold a password
            found.append(Problem(f"{here} is {shown}.", f"It must be {kind.words}."))
    if problems is None and found:
        raise ImproperlyConfigured(f"{found[0].message} {found[0].hint}")
    if problems is not None:
        problems.extend(found)
    return replace(base, **changes)


_KINDS: dict[type, dict[str, Kind | None]] = {
    section: {name.upper(): kind for name, kind in kinds_of(section).items()}
    for section in (Settings, CacheSettings, CelerySettings)
}


def check_option(section: type, name: str, value: object) -> Any:
    """Return the checked value of an argument that is named as a field of a section.

    Raises TypeError and ValueError that name the argument.
    """
    kind = _KINDS[section][name.upper()]
    return value if kind is None else kind.check(value, name)
