"""The error about a cache with a misspelt BACKEND."""

from __future__ import annotations

import difflib
import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError

PACKAGE = "django_redislock.cache"
NAMES = ("RedisCache", "DjangoRedisCache", "ClusterCache", "LocMemCache", "DummyCache")


class UnknownBackend(ImproperlyConfigured, CommandError):
    """There is no such backend.

    Django's own check of caches makes each cache, and so raises this error. As a CommandError it is one line of
    ``manage.py check`` instead of a traceback.
    """


def raise_unknown(module: str, name: str) -> NoReturn:
    """Raise UnknownBackend when the settings name this attribute of the module as a backend, else AttributeError."""
    path = f"{module}.{name}"
    for alias, cache in settings.CACHES.items():
        if cache.get("BACKEND") == path:
            raise UnknownBackend(f"{problem(alias, path)} {advice(path)}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def replace_unknown_modules() -> None:
    """Put an empty module in place of each module of this package that a BACKEND names and that does not exist.

    Its backends raise UnknownBackend. Otherwise Django would raise InvalidCacheBackendError, with a traceback.
    """
    for cache in settings.CACHES.values():
        name = str(cache.get("BACKEND", "")).rpartition(".")[0]
        if name.startswith("django_redislock.") and not _exists(name):
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name])["__getattr__"] = partial(raise_unknown, name)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # its package does not exist
        return False


def problem(alias: str, path: str) -> str:
    """Return the problem in words."""
    return f"CACHES[{alias!r}]['BACKEND'] is {path!r}, and there is no such backend."


def advice(path: str) -> str:
    """Return the right spelling, or all backends."""
    near = difflib.get_close_matches(path.rpartition(".")[2], NAMES, n=1)
    if near:
        return f"Did you mean '{PACKAGE}.{near[0]}'?"
    return "The backends are " + " and ".join(f"'{PACKAGE}.{name}'" for name in NAMES) + "."
