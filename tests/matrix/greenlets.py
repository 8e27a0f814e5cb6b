"""``python -m tests.matrix.greenlets KIND`` runs each row of threads under greenlets, and prints what went wrong.

All rows in one process, because to start one takes longer than to run them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from uuid import uuid4

from tests.support.waiting import wait_until

KINDS: dict[str, dict[str, bool]] = {"all is patched": {}}
"""What ``gevent.monkey.patch_all`` is given."""


@cache
def faults(kind: str) -> dict[str, str]:
    """Return what went wrong in the rows, by their names; one of the test processes runs them for all."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid4().hex)  # the number of a process might come again
    name = f"redislock-{run}-{kind.replace(' ', '-')}"
    result = Path(gettempdir()) / f"{name}.json"
    try:
        (Path(gettempdir()) / name).touch(exist_ok=False)
    except FileExistsError:
        wait_until(result.exists, timeout=120, message="another test process has run the rows")
    else:
        with result.with_suffix(".new").open("w") as output:
            command = [sys.executable, "-m", __name__, kind]
            subprocess.run(command, stdout=output, check=True, timeout=120, cwd=Path(__file__).parents[2])
        result.with_suffix(".new").replace(result)
    found: dict[str, str] = json.loads(result.read_text().splitlines()[-1])
    return found


def main(kind: str) -> None:
    from gevent import monkey

    monkey.patch_all(**KINDS[kind])

    import django
    from django.conf import settings

    settings.configure(ALLOWED_HOSTS=["*"], INSTALLED_APPS=["django_redislock"], USE_TZ=True)
    django.setup()

    from tests.support import sqlite_file, using_databases

    from .arenas import DEPLOYMENTS
    from .cell import Cell
    from .disturbances.errors import nothing
    from .holders import HOLDERS

    found = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        stack.enter_context(using_databases(default=sqlite_file(directory)))
        arenas = cache(lambda deployment: stack.enter_context(closing(DEPLOYMENTS[deployment]())))
        for row in (row for row in HOLDERS if not row.lacks & {"thread", "here"}):
            arena = arenas(row.deployment)
            arena.tidy()
            cell = Cell(row, arena, f"cell{len(found)}")
            found[row.name] = _fault(cell, nothing)
    print(json.dumps(found), flush=True)


def _fault(cell: Any, run: Any) -> str:
    with cell.configured():
        try:
            run(cell)
        except Exception as error:
            return repr(error)
        finally:
            cell.close()
    return "; ".join(cell.wrong)


if __name__ == "__main__":
    main(*sys.argv[1:])
