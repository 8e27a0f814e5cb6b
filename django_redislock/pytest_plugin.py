"""The fixture for pytest. pytest loads this module first, so it does not import Django."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture
def redislock_unlocked() -> Iterator[None]:
    """Grant every lock at once, without Redis, in this test: see `django_redislock.testing.unlocked`."""
    from .testing import unlocked

    with unlocked():
        yield


@pytest.fixture
def redislock_held() -> Iterator[Callable[..., Any]]:
    """``redislock_held("name")`` holds a lock until the end of the test: see `django_redislock.testing.held`."""
    from .testing import held

    with ExitStack() as stack:
        yield lambda which: stack.enter_context(held(which))
