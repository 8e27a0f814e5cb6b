"""The pages about the tests name the tests, the files and the numbers that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.simulation.test_planted import SEEDS
from tests.simulation.test_simulation import SAME

ROOT = Path(__file__).parents[2]
OVERVIEW = (ROOT / "docs" / "how-it-is-tested.rst").read_text()
PAGE = OVERVIEW + (ROOT / "tests" / "simulation" / "README.rst").read_text()


def test_the_number_of_histories_is_that_of_the_suite():
    assert set(map(int, re.findall(r"(\d+) histories", PAGE))) == {SEEDS, SAME}


def test_the_overview_is_read_in_six_minutes():
    assert len(OVERVIEW.split()) <= 1200


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"``(core/\w+\.py)``\s+``(test_\w+)``", PAGE)
    assert named
    assert [test for path, test in named if f"def {test}(" not in (ROOT / "tests" / path).read_text()] == []


def test_every_file_that_the_page_names_exists():
    named = [name for name in re.findall(r"``([\w./-]+)``", PAGE) if "/" in name]
    assert len(named) >= 3
    assert [
        name
        for name in named
        if not any((place / name).exists() for place in (ROOT, ROOT / "django_redislock", ROOT / "tests"))
    ] == []
