from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.managed import Managed


@pytest.fixture
def manage(redis_url: str) -> Iterator[Callable[..., Managed]]:
    """``manage(*arguments, **settings)`` starts a process of ``manage.py`` that ends with the test at the latest."""
    with ExitStack() as stack:

        def start(*arguments: str, **options: Any) -> Managed:
            options.setdefault("DJANGO_REDISLOCK", {"URL": redis_url})
            process = Managed(*arguments, **options)
            stack.callback(process.close)
            return process

        yield start
