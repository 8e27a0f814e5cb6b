"""How far a reader goes who follows one call through the package: the Python files, and the borders between them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import django_redislock
from tests.support.cache_programs import cache_at

PACKAGE = f"{Path(django_redislock.__file__).parent}/"


def files_of(call: Callable[[], Any]) -> list[str]:
    """Return the files of the package through which the call runs in this thread, in order."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_filename.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [file for file, _ in groupby(entered)]


def test_a_miss_runs_through_eighteen_files_at_most(redis_url, backend):
    cache = cache_at(redis_url, backend)
    cache.get_or_set("warm", lambda: 1)
    files = files_of(lambda: cache.get_or_set("k", lambda: 1))
    assert cache.get("k") == 1
    assert len(set(files)) <= 18, sorted(set(files))


def test_a_hit_runs_through_three_files(redis_url, backend):
    cache = cache_at(redis_url, backend)
    cache.get_or_set("k", lambda: 1)
    assert set(files_of(lambda: cache.get_or_set("k", lambda: 2))) == {
        "cache/compute_once.py",
        "cache/backends/base.py",
        "cache/stats.py",
    }
