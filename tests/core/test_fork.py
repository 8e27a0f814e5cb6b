"""The resets in a forked child: their order, and that an error in one of them does not prevent the others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import django_redislock
from django_redislock.core.driver import process


def test_the_resets_run_in_their_order_whatever_the_order_of_the_imports(monkeypatch):
    ran = []
    monkeypatch.setattr(process, "_resets", {})
    for name in sorted(process.ORDER):
        process.after_in_child(name, lambda name=name: ran.append(name))
    process._reset_all()
    assert ran == list(process.ORDER)


def test_an_error_in_one_reset_is_raised_after_the_others(monkeypatch):
    ran = []
    monkeypatch.setattr(process, "_resets", {name: lambda name=name: ran.append(name) for name in process.ORDER})
    process.after_in_child(process.ORDER[1], lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        process._reset_all()
    assert ran == [process.ORDER[0], *process.ORDER[2:]]


def test_a_reset_without_a_place_in_the_order_is_refused():
    with pytest.raises(ValueError, match="'other' is not in the order"):
        process.after_in_child("other", lambda: None)


def test_the_order_names_the_resets_that_there_are():
    names = []
    for path in Path(django_redislock.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "after_in_child":
                names.append(ast.literal_eval(node.args[0]))
    assert sorted(names) == sorted(process.ORDER)
