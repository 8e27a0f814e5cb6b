"""The canonical key: what is one execution and what is another, for producer and worker alike."""

from __future__ import annotations

import enum
import inspect
import uuid
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal

import pydantic
import pytest
from django.contrib.auth.models import Group, User
from django.utils.translation import gettext_lazy
from hypothesis import assume, example, given, strategies as st
from kombu.utils import json as kombu_json

from django_redislock.celery.key import hash_arguments, lock_name, make_key, waiting_name
from django_redislock.core.keys import lock_keys, slots_keys
from django_redislock.name_template import signature_of


def key_of(function, *args, key=None, **kwargs):
    return make_key(key, inspect.signature(function).bind(*args, **kwargs))


def f(a, b=2, *rest, c="x", **more):
    raise AssertionError("a key is made without calling the function")


def journey(value):
    """What the worker gets of it."""
    return kombu_json.loads(kombu_json.dumps(value))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.datetimes()
    | st.datetimes(timezones=st.just(UTC) | st.just(timezone(timedelta(hours=-7))))
    | st.dates()
    | st.times()
    | st.uuids()
    | st.decimals()
)
ARGUMENTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.booleans() | st.none(), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.lists(ARGUMENTS, max_size=5), st.dictionaries(st.sampled_from(["c", "d", "e"]), ARGUMENTS))
def test_producer_and_worker_come_to_the_same_key(args, kwargs):
    args = [1, *args]
    assert key_of(f, *args, **kwargs) == key_of(f, *journey(args), **journey(kwargs))


@given(ARGUMENTS, ARGUMENTS, ARGUMENTS)
def test_one_call_has_one_key_however_it_is_written(a, b, c):
    keys = {key_of(f, a, b, c=c), key_of(f, a, b=b, c=c), key_of(f, a=a, b=b, c=c), key_of(f, c=c, b=b, a=a)}
    assert len(keys) == 1


def test_defaults_count_as_if_they_were_given():
    assert key_of(f, 1) == key_of(f, a=1) == key_of(f, 1, b=2) == key_of(f, 1, 2, c="x")
    assert key_of(f, 1) != key_of(f, 1, 3)


@given(st.dictionaries(st.text(max_size=5), st.integers(), min_size=2, max_size=6), st.randoms())
def test_the_order_of_keywords_and_dicts_does_not_count(items, random):
    shuffled = list(items.items())
    random.shuffle(shuffled)
    assert hash_arguments({"a": items}) == hash_arguments({"a": dict(shuffled)})


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def same(one, other):
    """Whether two plain values are equal and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(PLAIN, PLAIN)
def test_different_arguments_have_different_keys(one, other):
    assert (key_of(f, one) == key_of(f, other)) is same(one, other)


NAIVE = datetime.fromisoformat("2026-01-02")


@pytest.mark.parametrize(
    "values",
    [
        (1, "1", True, 1.5, "True", None, "None", "null", [1], ["1"]),
        (NAIVE, NAIVE.isoformat(), NAIVE.date()),
        (NAIVE, NAIVE.replace(tzinfo=UTC), NAIVE.replace(tzinfo=timezone(timedelta(hours=1)))),
        (Decimal("1"), 1, "1", 1.0),
        (uuid.UUID(int=1), str(uuid.UUID(int=1)), uuid.UUID(int=1).hex),
        (b"a", "a", b"\xff"),
        ({}, [], None, set()),
        ({1, 2}, {1}, {"1", "2"}),
        (time(1), "01:00:00"),
    ],
)
def test_types_are_kept_apart(values):
    assert len({key_of(f, value) for value in values}) == len(values)


class Colour(enum.Enum):
    RED = "red"


class Word(str, enum.Enum):  # noqa: UP042 - StrEnum formats as its value, this one does not
    RED = "red"


class Jsonable:
    def __json__(self):
        return {"kind": "jsonable"}


class Dumpable:
    """Like a pydantic model, which Celery dumps on its way to the worker."""

    def model_dump(self, mode):
        return {"mode": mode}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        ({"a": (1,)}, {"a": [1]}),
        ({2: "a", None: "b", True: "c"}, {"null": "b", "2": "a", "true": "c"}),
        ({10: 1, 9: 2, "x": 3}, {"9": 2, "10": 1, "x": 3}),
        (Word.RED, "red"),
        (enum.IntEnum("Number", ["ONE"]).ONE, 1),
        (gettext_lazy("red"), "red"),
        (Jsonable(), {"kind": "jsonable"}),
        (Dumpable(), {"mode": "json"}),
        ({3, 1, 2}, frozenset([2, 3, 1])),
    ],
)
def test_what_a_worker_cannot_tell_apart_is_one_key(one, other):
    assert key_of(f, one) == key_of(f, other)
    for key in ("{a}", lambda a, *args, **kwargs: f"{a}"):
        if not isinstance(one, set):  # JSON cannot carry it, so it is formatted as it is
            assert key_of(f, one, key=key) == key_of(f, other, key=key)


@given(st.sets(st.integers() | st.text(max_size=3), max_size=5))
def test_the_order_of_a_set_does_not_count(members):
    backwards = set()
    for member in sorted(members, key=repr, reverse=True):
        backwards.add(member)
    assert hash_arguments({"a": members}) == hash_arguments({"a": backwards})


def test_a_model_instance_is_its_primary_key():
    assert key_of(f, User(pk=1, username="a")) == key_of(f, User(pk=1, username="b"))
    assert key_of(f, [User(pk=1)]) == key_of(f, [User(pk=1)])
    assert len({key_of(f, User(pk=1)), key_of(f, User(pk=2)), key_of(f, Group(pk=1)), key_of(f, 1)}) == 4


@pytest.mark.parametrize(
    "value", [object(), Colour.RED, {(1, 2): 3}, User(username="not saved"), iter([1]), [object()]]
)
def test_what_has_no_stable_form_is_a_type_error_that_says_what_to_do(value):
    with pytest.raises(TypeError, match=r"no key can be made .* Name the parameters that count, as in key=\["):
        key_of(f, value)
    assert key_of(f, 1, value, key=["a"]) == key_of(f, 1, key=["a"])


def test_a_circle_is_a_type_error():
    circle = []
    circle.append(circle)
    with pytest.raises(TypeError, match="no key can be made"):
        key_of(f, circle)


def test_a_format_string_takes_parameters_by_name():
    assert key_of(f, 42, key="report:{a}:{c}") == "report:42:x"
    assert key_of(f, 1, d=5, key="{d}") == "5"
    assert key_of(f, {"id": 3}, key="{a[id]}") == "3"
    assert key_of(f, User(pk=7), key="{a.pk}") == "7"


@pytest.mark.parametrize("key", ["{a.missing}", "{a[missing]}", "{d}", "{a:%Y}"])
def test_a_format_string_that_does_not_fit_the_arguments_is_a_type_error(key):
    with pytest.raises(TypeError, match="does not fit the arguments"):
        key_of(f, 42, key=key)


def test_a_list_names_the_parameters_that_count():
    assert key_of(f, 1, 2, key=["a"]) == key_of(f, 1, 3, key=["a"]) == key_of(f, a=1, c="y", key=("a",))
    assert key_of(f, 1, key=["a"]) != key_of(f, "1", key=["a"])
    assert key_of(f, 1, d=1, key=["d"]) != key_of(f, 1, d=2, key=["d"])
    assert key_of(f, 1, key=[]) == key_of(f, 2, key=[]) == ""


def test_a_callable_takes_what_the_task_takes():
    def key(a, b, *rest, c, **more):
        return f"{a}-{b}-{rest}-{c}-{more}"

    assert key_of(f, 1, 2, 3, d=4, key=key) == "1-2-(3,)-x-{'d': 4}"
    with pytest.raises(TypeError, match="must return a str, not int"):
        key_of(f, 1, key=lambda *args, **kwargs: 5)


def test_a_key_that_is_an_enum_of_strings_names_the_lock_that_its_message_has():
    """A format makes another text of it than JSON, so the worker ended another lock than the publisher had taken."""

    class Report(str, enum.Enum):  # noqa: UP042  (a StrEnum has one text only)
        DAILY = "daily"

    key = key_of(f, 1, key=lambda *args, **kwargs: Report.DAILY)
    assert type(key) is str
    assert lock_name("task", key) == lock_name("task", journey(Report.DAILY)) == lock_name("task", Report.DAILY)


@given(st.text(min_size=1, max_size=5), st.text(max_size=5), st.text(min_size=1, max_size=5), st.text(max_size=5))
@example("a", "b:c", "a:b", "c")
@example("a", "b", "a:b", "")
@example("a%3Ab", "c", "a:b", "c")
def test_two_tasks_never_share_a_lock(task, key, other, other_key):
    assume(task != other)
    assert lock_name(task, key) != lock_name(other, other_key)


@given(st.text(st.characters(), max_size=400), st.text(st.characters(), min_size=400, max_size=1200))
def test_a_lock_name_is_never_too_long_nor_invalid(task, key):
    names = {lock_name(task, key), lock_name(task, key + "x"), lock_name(task, key, message=f"{'i' * 64}:9:{'n' * 64}")}
    assert len(names) == 3
    assert all(1 <= len(name.encode()) <= 1000 for name in names)


@given(st.text(max_size=400), st.text(max_size=400), st.one_of(st.text(max_size=9), st.text(min_size=400)))
def test_all_locks_of_a_key_are_in_one_bucket(task, group, key):
    """So one script takes the lock of a run and gives back that of its message."""
    waiting, runs = waiting_name(task, key, "queued+run"), lock_name(group, key)
    of_message = lock_name(task, key, message="id:0:nonce")
    held = {lock_keys("redislock", name).held for name in (waiting, runs, of_message)}
    assert len(held | {slots_keys("redislock", runs, 3).held}) == 1


def test_a_lock_is_named_for_people():
    assert lock_name("proj.tasks.report", "42") == "celery:proj.tasks.report:42"
    assert lock_name("proj.tasks.report", "") == "celery:proj.tasks.report"
    assert lock_name("proj.tasks.report", hash_arguments({"a": 1})).startswith("celery:proj.tasks.report:")


def test_a_task_that_takes_no_arguments_has_the_task_as_its_key():
    def nightly():
        pass

    assert lock_name("shop.tasks.nightly", key_of(nightly)) == "celery:shop.tasks.nightly"
    assert key_of(f, 1) != ""


def test_names_for_type_checkers_only_do_not_hurt():
    namespace = {}
    exec("from __future__ import annotations\ndef g(a: Nowhere) -> Neither: ...", namespace)
    assert list(signature_of(namespace["g"]).parameters) == ["a"]


class Tagged(pydantic.BaseModel):
    tags: list[set[str]] | list[str] = []


def test_a_model_with_a_set_has_no_key():
    """Its order is another one in each process: two producers had two keys."""
    with pytest.raises(TypeError, match="Tagged contains a set, which has no order"):
        key_of(f, Tagged(tags=[{"a", "b"}]))
    with pytest.raises(TypeError, match="'a' contains a set, which has no order"):
        key_of(f, Tagged(tags=[{"a", "b"}]), key="{a}")
    assert key_of(f, Tagged(tags=["a", "b"])) == key_of(f, {"tags": ["a", "b"]})
