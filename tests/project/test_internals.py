"""The page about the code names modules, scripts, classes, functions and options that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

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


class Names(NamedTuple):
    """The names that the package defines: classes and aliases; functions, also by class; options and attributes."""

    classes: set[str]
    functions: set[str]
    options: set[str]


@pytest.fixture(scope="module")
def names() -> Names:
    found = Names(set(), set(), set())
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name, body=body):
                    found.classes.add(name)
                    methods = [each for each in body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
                    found.functions.update(f"{name}.{method.name}" for method in methods)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.functions.add(name)
                case ast.Assign(targets=targets):  # an alias of a type, such as Operation
                    found.classes.update(target.id for target in targets if isinstance(target, ast.Name))
                case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.options.add(name)
                case ast.Constant(value=str(text)) if text and path == PACKAGE / "core" / "events.py":
                    found.options.add(text)
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
    gone = ["core/twins.py", "ending.lua", "Steps", "Lock.begin()", "fly_away()", "self.claimed", "life_time=3"]
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
