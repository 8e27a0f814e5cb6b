"""The counters of each cache alias: module-level, since Django makes a backend for every thread and task."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from ..core.fork import after_in_child
from ..core.tally import Counters

_tallies: dict[str, Counters] = {}


def tally_of(alias: str) -> Counters:
    """Return the counters of the alias in this process."""
    return _tallies.setdefault(alias, Counters())


def alias_of(backend: type, location: Any, params: dict[str, Any]) -> str:
    """Return the alias of a backend made with these arguments, "" when no alias of the settings is so."""
    aliases: dict[str, dict[str, Any]] = settings.CACHES
    for alias, cache in aliases.items():
        others = {key: value for key, value in cache.items() if key not in ("BACKEND", "LOCATION")}
        module, _, name = cache["BACKEND"].rpartition(".")
        named = name == backend.__name__ and f"{backend.__module__}.".startswith(f"{module}.")
        if named and cache.get("LOCATION", "") == location and others == params:
            return alias
    return ""


def _after_fork() -> None:
    for tally in _tallies.values():
        tally.reset()  # what the parent did was not done here


after_in_child(_after_fork)
