"""The fixture for pytest. Its entry point is loaded before anything else, so nothing of Django is imported with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def redislock_unlocked() -> Iterator[None]:
    """Grant every lock at once, without Redis, in this test: see `django_redislock.testing.unlocked`."""
    from .testing import unlocked

    with unlocked():
        yield
