"""The error for a cache with a misspelt BACKEND."""

from __future__ import annotations

import difflib

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError

PACKAGE = "django_redislock.cache"
NAMES = ("RedisCache", "DjangoRedisCache", "LocMemCache", "DummyCache")


class UnknownBackend(ImproperlyConfigured, CommandError):
    """There is no such backend. Being a CommandError, it is one line of ``manage.py check``: Django's own check of caches makes
    each of them, and would end in a traceback before the check of this package reports it."""


def raise_unknown(path: str) -> None:
    """Raise UnknownBackend when the settings name this path as a backend."""
    for alias, cache in settings.CACHES.items():
        if cache.get("BACKEND") == path:
            raise UnknownBackend(f"{problem(alias, path)} {advice(path)}")


def problem(alias: str, path: str) -> str:
    """Return the problem in words."""
    return f"CACHES[{alias!r}]['BACKEND'] is {path!r}, and there is no such backend."


def advice(path: str) -> str:
    """Return the right spelling, or all backends."""
    near = difflib.get_close_matches(path.rpartition(".")[2], NAMES, n=1)
    if near:
        return f"Did you mean '{PACKAGE}.{near[0]}'?"
    return "The backends are " + " and ".join(f"'{PACKAGE}.{name}'" for name in NAMES) + "."
