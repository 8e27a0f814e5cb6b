"""How far a reader goes who follows one call through the package: the Python files, and the borders between them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import django_redislock
from django_redislock.core.driver.registry import close_unused
from tests.support.cache_programs import cache_at

pytestmark = pytest.mark.one_server("on a Cluster the way to the node is added")
PACKAGE = f"{Path(django_redislock.__file__).parent}/"


def files_of(call: Callable[[], Any]) -> list[str]:
    """Return the files of the package through which the call runs in this thread, in order."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_filename.removeprefix(PACKAGE))

    gc.disable()  # the destructors that it runs belong to earlier tests
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return [file for file, _ in groupby(entered)]


@pytest.fixture
def cache(redis_url, backend):
    """A cache whose process has run a miss and does not wait for anything."""
    close_unused()  # the subscription of an earlier test
    cache = cache_at(redis_url, backend)
    cache.get_or_set("warm", lambda: 1)
    return cache


def test_a_miss_runs_through_twenty_two_files_at_most_and_its_algorithm_is_in_one_package(cache):
    """Seven of the cache, the settings, four of the lock, and nine of the driver, which runs two scripts.

    Once it has begun, only the functions of the backend that serialize values are outside of the package.
    """
    files = files_of(lambda: cache.get_or_set("k", lambda: 1))
    assert cache.get("k") == 1
    assert len(set(files)) <= 22, sorted(set(files))
    begun = files.index("cache/lease/obtain.py")
    outside = {file for file in files[begun:] if file.startswith("cache/") and not file.startswith("cache/lease/")}
    backends = {"cache/backends/base.py", "cache/backends/django_backend.py", "cache/backends/django_redis_backend.py"}
    assert outside <= {"cache/compute_once.py"} | backends


def test_a_hit_runs_through_four_files(cache):
    cache.get_or_set("k", lambda: 1)
    assert set(files_of(lambda: cache.get_or_set("k", lambda: 2))) == {
        "cache/compute_once.py",
        "cache/backends/base.py",
        "cache/lease/counters.py",
        "core/driver/process.py",
    }


def test_the_first_miss_of_a_process_imports_no_backend(run_python):
    """A server that forks has imported it: the first miss of each process took 3 to 8 times as long as the base's."""
    code = 'import sys; say(imported=[name for name in sys.modules if ".cache.backends.django" in name])'
    (said,) = run_python(code, new=True).finish()
    assert said["imported"]
