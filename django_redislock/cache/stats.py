"""The counts of each cache alias of this process.

The counts are module-level, because Django makes a backend object for every thread and task.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..core.driver.process import after_in_child
from .lease.counters import Counters

_tallies: dict[str, Counters] = {}


def counters_for(alias: str) -> Counters:
    """Return the counters of the alias in this process."""
    return _tallies.setdefault(alias, Counters())


def alias_of(cache: Any, location: Any, params: dict[str, Any]) -> str:
    """Return the alias of a cache that was made with these arguments, "" when the settings have none.

    Django's handler knows the caches that it made here. Another thread may have made this one.
    """
    aliases: dict[str, dict[str, Any]] = settings.CACHES
    for alias in aliases:
        if getattr(caches._connections, alias, None) is cache:  # type: ignore[attr-defined]
            return alias
    for alias, given in aliases.items():
        others = {key: value for key, value in given.items() if key not in ("BACKEND", "LOCATION")}
        if given.get("LOCATION", "") == location and others == params:
            try:
                if import_string(given["BACKEND"]) is type(cache):  # it may be imported through another module
                    return alias
            except (ImportError, ImproperlyConfigured):  # Django reports it where that alias is used
                continue
    return ""


def _after_fork() -> None:
    for counters in _tallies.values():
        counters.reset()  # the counts are those of the parent


after_in_child("statistics", _after_fork)
