"""Names of locks and keys made by a format string: a text that is another one in each process is refused."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from uuid import UUID

import pydantic
import pytest
from django.core.checks import run_checks

from django_redislock import locked, name_template
from django_redislock.cache import cached
from django_redislock.checks import TAG
from django_redislock.name_template import _of_self, fill
from tests.support.bank.models import Account


class Plain:
    """It has no text of its own."""

    def __init__(self) -> None:
        self.pk = 5

    @locked("export:{self}")
    def export(self) -> str:
        return "exported"

    @locked("export:{self.pk}")
    def export_by_key(self) -> str:
        return "exported"

    @cached(60, key="rows:{self}")
    def rows(self) -> list[int]:
        return []


class Told(Plain):
    def __str__(self) -> str:
        return "told"

    @locked("told:{self}")
    def export_told(self) -> str:
        return "exported"


NOTED = {method: _of_self.pop(method) for method in list(_of_self) if method.__module__ == __name__}
"""What the check finds in this module, and in no other test."""


@dataclasses.dataclass
class Filter:
    tags: object


@dataclasses.dataclass(slots=True)
class Slotted:
    tags: object


class Order(pydantic.BaseModel):
    tags: set[str] | list[str]


class Color(Enum):
    RED = "red"


TAGS = {"a", "b"}
UNSTABLE = {
    "an object": Plain(),
    "a function": fill,
    "a lambda": lambda: None,
    "a bound method": Plain().export,
    "an iterator": iter([1]),
    "a generator": (number for number in ()),
    "a lock": threading.Lock(),
    "in a list": [1, [Plain()]],
    "in a dict": {"a": (Plain(),)},
    "in a deque": deque([Plain()]),
    "in a dataclass": Filter(Plain()),
    "a set": TAGS,
    "an empty set": set(),
    "a frozenset": frozenset(TAGS),
    "a set in a list": [TAGS],
    "a set in a dict": {"a": TAGS},
    "a set in a dataclass": Filter([TAGS]),
    "a set in one with slots": Slotted(TAGS),
    "a set in a model of pydantic": Order(tags=TAGS),
}
STABLE = {
    "a text with an address": "crash at 0x7f1797872090",
    "in a list, too": ["crash at 0x7f1797872090", b"at 0x12"],
    "a text like a set": "{'a', 'b'} set()",
    "an object with a text": Told(),
    "a dict": {"a": [1, None, 1.5, True]},
    "a number": Decimal("1.5"),
    "a time": datetime(2026, 1, 1, tzinfo=UTC),
    "an id": UUID(int=5),
    "an enum": Color.RED,
    "a class": Plain,
    "a range": range(3),
    "a model of Django": Account(pk=3),
    "a model of pydantic": Order(tags=["a"]),
    "a dataclass": Filter({"a": 1}),
}


@pytest.mark.parametrize("template", ["report:{x}", "report:{x!r}", "report:{more[0]}"])
@pytest.mark.parametrize("value", UNSTABLE.values(), ids=UNSTABLE)
def test_a_text_that_is_another_one_in_each_process_is_a_type_error(template, value):
    with pytest.raises(TypeError, match=r"contains a (set, which has no order|\w+, which has no text of its own)"):
        fill(template, {"x": value, "more": [value]}, "key")


@pytest.mark.parametrize("value", STABLE.values(), ids=STABLE)
def test_any_other_text_is_used(value):
    assert fill("report:{x}", {"x": value, "unused": Plain()}) == f"report:{value}"


def test_only_what_the_template_names_must_have_a_text():
    assert fill("report:{x.pk}:{y[0]}", {"x": Plain(), "y": [1, TAGS]}) == "report:5:1"


@pytest.mark.usefixtures("client")
def test_a_lock_and_a_cached_value_are_not_named_by_an_address():
    for call in (Plain().export, Plain().rows):
        with pytest.raises(TypeError, match=r"'self' contains a Plain, which has no text .* as in \{user.pk\}"):
            call()
    assert Plain().export_by_key() == "exported"
    assert Told().export_told() == Told().export() == "exported"


def test_the_system_check_names_the_methods_whose_self_has_no_text(monkeypatch):
    monkeypatch.setattr(name_template, "_of_self", NOTED)
    found = [message.msg for message in run_checks(tags=[TAG]) if message.id == "redislock.W013"]
    assert [message for message in found if __name__ in message] == [
        f"The name {template!r} of {__name__}.Plain.{method} contains {{self}}, which has no text of its own."
        for method, template in [("export", "export:{self}"), ("rows", "rows:{self}")]
    ]
