"""The page about the code names modules, scripts, classes, functions and options that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import django_redislock

PACKAGE = Path(django_redislock.__file__).parent
ROOT = PACKAGE.parent
PAGE = (ROOT / "docs" / "internals.rst").read_text()
PROSE = re.sub(r"::\n\n(?:    .*\n|\n)+", "\n\n", PAGE)
BLOCKS = re.findall(r"::\n\n((?:    .*\n|\n)+)", PAGE)
LITERALS = sorted(set(re.findall(r"``(.+?)``", PROSE)))
EXAMPLES = {'with lock("invoice:42", timeout=10)', "cache:<key>", "manage.py redislock", "django_redislock"}
"""The literals that name nothing in the code."""


class Names(ast.NodeVisitor):
    """The names that the package defines: classes, functions, methods by their class, options and attributes."""

    def __init__(self) -> None:
        self.classes: set[str] = set()
        self.functions: set[str] = set()
        self.options: set[str] = set()
        self._within: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.add(node.name)
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.functions |= {node.name, *(f"{kind}.{node.name}" for kind in self._within[-1:])}
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:  # an alias of a type, such as Operation
        self.classes |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self.options.add(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.options.add(node.target.id)
        self.generic_visit(node)


@pytest.fixture(scope="module")
def names() -> Names:
    found = Names()
    for path in PACKAGE.rglob("*.py"):
        found.visit(ast.parse(path.read_text()))
    events = ast.parse((PACKAGE / "core" / "events.py").read_text())
    found.options |= {node.value for node in ast.walk(events) if isinstance(node, ast.Constant) and node.value}
    return found


def is_file(name: str) -> bool:
    return any((folder / name).exists() for folder in (PACKAGE, ROOT)) or (
        name.endswith(".lua") and "/" not in name and any(PACKAGE.rglob(name))
    )


def exists(literal: str, names: Names) -> bool:
    if is_file(literal) or literal in EXAMPLES:
        return True
    if re.fullmatch(r"[A-Z ]+", literal):  # a command of Redis
        return True
    if function := re.fullmatch(r"((?:\w+\.)?\w+)\(\)", literal):
        return function[1] in names.functions
    if re.fullmatch(r"[A-Z]\w+", literal):
        return literal in names.classes
    if option := re.fullmatch(r"(?:self\.)?([a-z_]+)(?:=.+)?", literal):
        return option[1] in names.options | names.functions
    return False


def test_every_literal_of_the_page_names_something_that_exists(names):
    assert [literal for literal in LITERALS if not exists(literal, names)] == []


def test_a_name_that_does_not_exist_is_found(names):
    gone = ["core/twins.py", "finish.lua", "Steps", "Lock.begin()", "fly_away()", "self.claimed", "life_time=3"]
    assert [literal for literal in gone if exists(literal, names)] == []


def test_every_module_of_the_picture_exists():
    picture = BLOCKS[0]
    found = [
        (label.strip(), word)
        for label, text in re.findall(r"^    (.{13})(.*)$", re.sub(r"\(.*?\)", "", picture), re.MULTILINE)
        for word in re.findall(r"[a-z][a-z_/]+", text)
    ]
    folder = {"lock": "core/", "driver": "core/driver/"}
    missing = [
        word
        for label, word in found
        if not any(is_file(place + word + end) for place in ("", folder.get(label, "")) for end in ("", ".py"))
    ]
    assert missing == []
    assert {label for label, _ in found} >= {"features", "Django", "between", "lock", "driver", "server"}


def test_every_script_on_the_wire_exists():
    scripts = re.findall(r"EVALSHA (\w+)", "".join(BLOCKS))
    assert len(scripts) >= 5
    assert [script for script in scripts if not is_file(f"{script}.lua")] == []
