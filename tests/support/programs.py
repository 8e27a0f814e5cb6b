from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

# Names of programs that must not be missing, as in "redis-server,chromium"; CI sets it so that nothing is skipped
# there.
REQUIRED = "REDISLOCK_REQUIRE"


def find_program(*names: str, package: str) -> str:
    """Return the path of the first of these programs, or paths of files, that is here.

    Without one the test is skipped with the Debian package to install, or fails where REDISLOCK_REQUIRE names it.
    """
    for name in names:
        path = name if name.startswith("/") and Path(name).is_file() else shutil.which(name)
        if path:
            return path
    message = f"{' or '.join(names)} is missing; on Debian: apt-get install {package}"
    if set(names) & set(os.environ.get(REQUIRED, "").split(",")):
        pytest.fail(message)
    pytest.skip(message)
