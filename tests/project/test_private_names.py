"""Private names of other packages: each one is listed, used where the list says so, and there in what is installed."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import warnings
from pathlib import Path

import pytest
import redis
from celery import VERSION
from django.db import connections

import django_redislock
from django_redislock import transactions
from tests.project.private_names import PRIVATE

PACKAGE = Path(django_redislock.__file__).parent
DOCUMENTED = {"_meta", "_state", "_base_manager", "_replace", "_asdict", "_getframe"}
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


def own_names():
    """Return the names that the package defines itself: functions, classes, variables, and attributes of `self`."""
    found = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    found.add(name)
    return found


def private_names_in(tree):
    """Return the private names of attributes, of imports, and of strings that name an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.ImportFrom(module=module, level=0, names=names):
                yield from filter(is_private, (*(module or "").split("."), *(alias.name for alias in names)))
            case ast.Constant(value=str(name)) if is_private(name):
                yield name


def test_each_private_name_of_another_package_is_listed():
    """A name that the package defines for something of its own, too, is not found here."""
    listed = {(file, name) for each in PRIVATE for file in each.used_in for name in each.names.split()}
    own = own_names() | DOCUMENTED
    used = {(file, name) for file, tree in TREES.items() for name in private_names_in(tree) if name not in own}
    assert used - listed == set()


@pytest.mark.parametrize("each", PRIVATE, ids=lambda each: f"{each.module}.{each.names}")
def test_a_private_name_is_used_and_is_there(each):
    def missing(text):
        return [name for name in each.names.split() if not re.search(rf"\b{name}\b", text)]

    for file in each.used_in:
        assert missing((PACKAGE / file).read_text()) == []
    if each.module == "asyncio.coroutines" and sys.version_info >= (3, 12):
        return
    new = {"_dump_pydantic_arguments": VERSION >= (5, 7), "_force_master_ip": redis.VERSION >= (5, 1)}
    if not new.get(each.names, True):
        return
    if each.module.startswith("django_celery_beat."):
        pytest.importorskip("django_celery_beat", reason="django-celery-beat has no release for this Django")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eventlet warns of itself
        origin = importlib.util.find_spec(each.module).origin
    assert missing(Path(origin).read_text()) == []


@pytest.mark.django_db
def test_without_asgirefs_storage_the_connections_are_those_that_django_names(monkeypatch):
    quickly = list(transactions._connections())
    monkeypatch.setattr(transactions, "_storage", None)
    assert list(transactions._connections()) == quickly == list(connections.all(initialized_only=True))
