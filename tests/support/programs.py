"""Programs that tests need and a machine may not have; a plugin of pytest, too."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NoReturn

import pytest

# Names of programs that must not be missing, as in "redis-server,chromium"; CI sets it so that nothing is skipped
# there.
REQUIRED = "REDISLOCK_REQUIRE"

MISSING = "is missing; on Debian: apt-get install"
MISSING_OF_PYTHON = "is missing; python -m pip install"


def find_program(*names: str, package: str) -> str:
    """Return the path of the first of these programs, or paths of files, that is here.

    Without one the test is skipped with the Debian package to install, or fails where REDISLOCK_REQUIRE names it.
    """
    for name in names:
        path = name if name.startswith("/") and Path(name).is_file() else shutil.which(name)
        if path:
            return path
    return report_missing(names, f"{' or '.join(names)} {MISSING} {package}")


def find_program_of_python(name: str) -> str:
    """Return the path of a program that a package of Python of the same name installs into this environment."""
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        report_missing([name], f"{name} {MISSING_OF_PYTHON} {name}")
    return str(path)


def report_missing(names: Iterable[str], message: str) -> NoReturn:
    if set(names) & set(os.environ.get(REQUIRED, "").split(",")):
        pytest.fail(message)
    pytest.skip(message)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give all tests that miss a program one place, because the summary has a line for each place.

    That is otherwise the place of each test: on a machine without any of the programs, the summary had 110 lines.
    """
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and "is missing; " in report.longrepr[2]:
        report.longrepr = (__file__, find_program.__code__.co_firstlineno, report.longrepr[2])
    return report
