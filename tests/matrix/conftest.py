"""``--matrix "ROW x COLUMN"`` picks cells by patterns."""

from __future__ import annotations

from collections.abc import Generator
from fnmatch import fnmatchcase

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="append", help="run only the cells whose 'ROW x COLUMN' fits this pattern")


def cell_of(item: pytest.Item) -> str:
    verdict = item.callspec.params.get("verdict") if hasattr(item, "callspec") else None
    return "" if verdict is None else str(verdict.id)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    patterns = config.getoption("--matrix")
    if patterns:
        picked = [item for item in items if any(fnmatchcase(cell_of(item), pattern) for pattern in patterns)]
        config.hook.pytest_deselected(items=[item for item in items if item not in picked])
        items[:] = picked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and cell_of(item):
        report.sections.append(("alone", f'python -m pytest tests/matrix --matrix "{cell_of(item)}"'))
    return report
