"""The pages about the tests name the tests, the files and the numbers that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.simulation.test_planted import SEEDS
from tests.simulation.test_simulation import SAME

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
OVERVIEW = (ROOT / "docs" / "how-it-is-tested.rst").read_text()
PAGE = OVERVIEW + (TESTS / "simulation" / "README.rst").read_text()
FAULTS = (TESTS / "README.rst").read_text()


def test_the_number_of_histories_is_that_of_the_suite():
    assert set(map(int, re.findall(r"(\d+) histories", PAGE))) == {SEEDS, SAME}


def test_the_overview_is_read_in_six_minutes():
    assert len(OVERVIEW.split()) <= 1200


def test_every_test_that_a_page_names_exists():
    for page, least in ((PAGE, 1), (FAULTS, 61)):
        named = re.findall(r"``([\w/]+\.py)``\s+``(test_\w+)``", page)
        assert len(named) >= least
        assert [test for path, test in named if f"def {test}(" not in (TESTS / path).read_text()] == []


def test_every_file_that_a_page_names_exists():
    named = [name for name in re.findall(r"``([\w./-]+)``", PAGE + FAULTS) if "/" in name]
    assert len(named) > 60
    places = (ROOT, ROOT / "django_redislock", TESTS)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
