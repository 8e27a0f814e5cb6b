from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from .programs import find_program
from .waiting import wait_until


def faketime_library() -> str:
    """Return the library that moves the clock of a process into which it is loaded."""
    libraries = map(str, Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return find_program("libfaketime", *libraries, package="libfaketime")


class ServerClock:
    """The clock of the servers that are started within `running`; a test may put it ahead or back."""

    def __init__(self, directory: Path) -> None:
        self._library = faketime_library()
        self._directory = directory
        self._put(0)

    def _put(self, seconds: int) -> None:
        (self._directory / "new").write_text(f"{seconds:+d}")
        (self._directory / "new").replace(self._directory / "offset")

    def jump(self, seconds: int, client: redis.Redis) -> None:
        """Put it so many seconds before the time of day, and wait until this client's server sees it."""
        self._put(seconds)
        wait_until(lambda: abs(client.time()[0] - time.time() - seconds) < 60)

    @contextmanager
    def running(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("REDISLOCK_TEST_SERVER", raising=False)  # Debian's server does not start with libfaketime
            patch.setenv("LD_PRELOAD", self._library)
            patch.setenv("FAKETIME_TIMESTAMP_FILE", str(self._directory / "offset"))
            patch.setenv("FAKETIME_NO_CACHE", "1")
            patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            yield
