"""The table of faults in tests/README.rst names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_table_of_faults_names_exists():
    named = re.findall(r"``([\w/]+\.py)``\s+``(test_\w+)``", (TESTS / "README.rst").read_text())
    assert len(named) > 60
    assert [(path, name) for path, name in named if f"def {name}(" not in (TESTS / path).read_text()] == []
