"""Python's option -O removes assertions, and what is below ``if __debug__``."""

from __future__ import annotations

import ast
from pathlib import Path

import django_redislock


def test_the_package_is_the_same_with_the_option_O():
    for path in Path(django_redislock.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"
            assert not (isinstance(node, ast.Name) and node.id == "__debug__"), f"{path}:{node.lineno}"
