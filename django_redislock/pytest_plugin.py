"""The fixture for pytest. pytest loads this module first, so it does not import Django."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def redislock_unlocked() -> Iterator[None]:
    """Grant every lock at once, without Redis, in this test: see `django_redislock.testing.unlocked`."""
    from .testing import unlocked

    with unlocked():
        yield
