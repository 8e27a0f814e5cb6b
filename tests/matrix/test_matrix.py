"""Every cell of the matrix."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from typing import Any

import pytest

from django_redislock.core import quorum
from django_redislock.core.driver import async_server
from tests.support import ServerClock, sqlite_file, using_databases
from tests.support.fork_server import ROOT

from . import rules
from .arenas import DEPLOYMENTS, Arena
from .cell import Cell
from .table import CELLS, Verdict


@pytest.fixture(scope="module")
def arena_of(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, bool], Arena]]:
    """``arena_of(deployment, clocked)`` starts its servers at the first cell that needs them."""
    with (
        ExitStack() as stack,
        pytest.MonkeyPatch.context() as patch,
        django_db_blocker.unblock(),
        using_databases(default=sqlite_file(tmp_path_factory.mktemp("matrix"))),
    ):
        patch.setattr(quorum, "SHORTEST_ANSWER", 0.5)  # a busy machine is waited for
        patch.setattr(async_server, "LAST_MOMENT", 0.5)

        @cache
        def arena_of(deployment: str, clocked: bool) -> Arena:
            make = DEPLOYMENTS[deployment]
            if not clocked:
                return stack.enter_context(closing(make()))
            clock = ServerClock(tmp_path_factory.mktemp("clock"))
            with clock.running():
                return stack.enter_context(closing(make(clock)))

        yield arena_of


ALONE = "REDISLOCK_TEST_CELL"
"""The variable that tells a process which cell it has to run."""


def run_alone(verdict: Verdict) -> None:
    """Run the cell in a process of its own. In one that had run thousands, threads asked for the GIL at each fork, and
    none of fifty children that C code forked ran a line."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "tests/matrix", "--matrix", verdict.id, "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=ROOT, env={**inherited, ALONE: verdict.id}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("verdict", [pytest.param(each, id=each.id, marks=each.marks) for each in CELLS])
def test_cell(verdict: Verdict, arena_of: Callable[[str, bool], Arena]) -> None:
    if verdict.column.alone and os.environ.get(ALONE) != verdict.id:
        run_alone(verdict)
        return
    arena = arena_of(verdict.row.deployment, verdict.column.clocked)
    arena.tidy()
    before = rules.used_by(arena)
    cell = Cell(verdict.row, arena, f"cell{abs(hash(verdict.id))}")
    with cell.configured():
        try:
            verdict.column.run(cell)
            assert not cell.wrong, cell.wrong
        finally:
            cell.close()
    rules.returns_what_it_used(cell, before)
