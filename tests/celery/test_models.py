"""Tasks with ``pydantic=True``: their keys see the models that their bodies get."""

from __future__ import annotations

import enum
import itertools
import types
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Optional

import pytest
from celery import VERSION, Celery
from pydantic import BaseModel, ValidationInfo, field_validator

from django_redislock.celery import DuplicateResult, SingleInstanceTask, single_instance
from django_redislock.core import held_locks
from tests.celery.deliveries import deliver, take, trace

if TYPE_CHECKING:
    from nowhere import Nothing

QUEUE = "models"  # that broker is shared by all tests of a process


class Status(enum.Enum):
    PAID = "paid"


class Order(BaseModel):
    id: int
    shop: str = "main"
    status: Status = Status.PAID
    due: datetime | None = None

    @property
    def place(self):
        return f"{self.shop}-{self.id}"


class Contextual(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _name(cls, value: str, info: ValidationInfo) -> str:
        return f"{value} of {info.context['site']} in {info.context['celery_task_name']}"


@pytest.fixture
def app():
    with Celery("models", set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        app.conf.task_default_queue = QUEUE
        yield app


def copied(function):
    """Return a function of the same code, so that no other task has its mark."""
    code = (function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy = types.FunctionType(*code)
    copy.__annotations__ = function.__annotations__
    return copy


@pytest.fixture
def make(app, request):
    numbers = itertools.count()

    def make(function, *, bare=False, task_options=None, **options):
        function = copied(function)
        name = f"{request.node.originalname}.{next(numbers)}"
        given = {"name": name, "pydantic": True, "shared": False, "lazy": False, **(task_options or {})}
        if bare:
            return app.task(base=SingleInstanceTask, single_instance=options, **given)(function)
        return app.task(**given)(single_instance(**options)(function))

    return make


def ship(m: Order, note: str = ""):
    return m.place


def ship_perhaps(m: Optional[Order] = None):  # noqa: UP045 - which Celery knows as well
    return m and m.place


def ship_each(*m: Order):
    return len(m)


def ship_oddly(m: Order, other: Nothing = None):
    return m.place


def key(m, note=""):
    return f"{m.place}/{m.status.name}"


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{m.id}", "5"),
        ("{m.shop}:{m.place}", "main:main-5"),
        ("{m.due:%Y}", "2026"),
        (key, "main-5/PAID"),
    ],
)
def test_a_key_takes_what_the_model_has(client, make, bare, given, expected):
    """Whether the producer gives a model or what it is made from."""
    task = make(ship, bare=bare, scope="job", key=given)
    first = task.delay({"id": 5, "due": "2026-02-03T04:05:06"})
    (info,) = held_locks(client)
    assert info.name == f"celery:{task.name}:{expected}"
    same = {"id": "5", "shop": "main", "due": datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)}
    assert task.delay(same, note="other").id == first.id
    assert not isinstance(task.delay({"id": 6, "due": "2027-02-03T04:05:06"}), DuplicateResult)


@pytest.mark.parametrize("bind", [True, False])
def test_a_model_of_the_producers_own_has_the_same_key(make, bind):
    def bound(self, m: Order):
        pass

    task = make(bound if bind else ship, task_options={"bind": bind}, key="{m.place}")
    assert task._key_of((Order(id=5),), {}) == task._key_of(({"id": 5},), {}) == "main-5"
    assert task._key_of((), {"m": Order(id=5, shop="b")}) == "b-5"


@pytest.mark.skipif(VERSION < (5, 5), reason="Celery 5.4 makes no models")
def test_the_worker_comes_to_the_same_key_and_runs(client, app, make):
    ran = []

    def body(m: Order):
        ran.append([type(m).__name__, task.lock_info(m).name])

    task = make(body, key="{m.place}")
    trace(task, {"id": "foreign"}, ({"id": 5},))
    assert ran == [["Order", f"celery:{task.name}:main-5"]]


def test_what_is_missing_or_no_model_to_celery_or_for_type_checkers_only_is_what_came(make):
    task = make(ship_perhaps, key=lambda m=None: "none" if m is None else m.place)
    assert task._key_of((), {}) == "none"
    assert task._key_of(({"id": 5},), {}) == "main-5"
    assert make(ship_each, key="{m[0][id]}")._key_of(({"id": 5},), {}) == "5"
    assert make(ship, task_options={"pydantic": False}, key="{m[id]}")._key_of(({"id": 5},), {}) == "5"
    assert make(ship_oddly, key=[])._key_of(({"id": 5},), {}) == ""


def test_the_context_and_the_strictness_of_the_task_count(make):
    def body(m: Contextual):
        pass

    task = make(body, key="{m.name}", task_options={"pydantic_context": {"site": "a"}})
    assert task._key_of(({"name": "x"},), {}) == f"x of a in {task.name}"
    strict = make(ship, key="{m.id}", task_options={"pydantic_strict": True})
    assert strict._key_of(({"id": 5},), {}) == "5"
    with pytest.raises(TypeError, match="does not fit the arguments"):
        strict._key_of(({"id": "5"},), {})


def test_what_is_no_model_is_a_type_error_of_publishing(make):
    """As a format string that does not fit is; the worker would refuse it, too."""
    with pytest.raises(TypeError, match=r"key='\{m.id\}' does not fit the arguments"):
        make(ship, key="{m.id}").delay({"id": "no number"})


@pytest.mark.parametrize(
    ("value", "key"), [(enum.StrEnum("Word", {"RED": "red"}).RED, "red"), (enum.IntEnum("Number", {"ONE": 1}).ONE, "1")]
)
def test_an_enum_is_its_value_in_a_format_string(make, value, key):
    def body(status):
        pass

    assert make(body, key="{status}", task_options={"pydantic": False})._key_of((value,), {}) == key


@pytest.mark.skipif(VERSION < (5, 7), reason="Celery 5.6 sends no models")
@pytest.mark.parametrize("bind", [False, True])
def test_a_duplicate_replaces_models_too(client, app, make, bind):
    """Celery makes JSON of the models of a message, and the newest arguments went to the serializer as they were."""

    def body(m: Order, note: str = ""):
        return f"{m.place} {note}"

    def bound_body(self, m: Order, note: str = ""):
        return body(m, note)

    task_options = {"bind": bind, "autoretry_for": (ZeroDivisionError,)}
    options = {"key": "{m.shop}", "scope": "queued", "on_duplicate": "replace"}
    task = make(bound_body if bind else body, task_options=task_options, **options)
    first = task.delay(Order(id=1))
    assert task.delay(Order(id=2), "new").id == first.id
    (message,) = take(app, QUEUE)
    assert deliver(app, message) == "main-2 new"
