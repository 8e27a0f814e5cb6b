from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_redislock.core import Lock
from tests.support.tasks import Tasks, lock_for_threads


@pytest.fixture(scope="module")
def tasks() -> Iterator[Tasks]:
    with Tasks() as tasks:
        yield tasks


@pytest.fixture(params=["thread", "task"])
def make_lock(request: pytest.FixtureRequest) -> type:
    """``make_lock(client, name, …)``: a Lock, or what is used like one, but is an AsyncLock that a task of each thread uses for it.

    A test that asks for it holds for both; one that uses Lock itself is about threads, signals, forks or pickles.
    """
    return Lock if request.param == "thread" else lock_for_threads(request.getfixturevalue("tasks"))
