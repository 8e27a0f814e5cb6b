"""The columns: everything that may happen to one who holds, waits, enters or leaves, one entry each."""

from __future__ import annotations

from . import connections, deaths, errors, forks, greenlets, interruptions, itself, losses, settings, silences  # noqa: F401  (each notes its columns)
