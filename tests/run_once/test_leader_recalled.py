"""A leader that is asked steps down, and another one leads."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from django_redislock import Leader, held_locks, leader, lock
from tests.support import BUSY, wait_until

pytestmark = pytest.mark.usefixtures("locks_by_url")


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_leader_that_is_asked_steps_down_and_lets_another_one_lead(coroutine: bool) -> None:
    terms: list[float] = []
    candidate = Leader("scheduler", on_elected=lambda term: terms.append(time.monotonic()), expire=0.9)
    thread = threading.Thread(target=lambda: asyncio.run(candidate.arun()) if coroutine else candidate.run())
    thread.start()
    wait_until(lambda: terms)
    assert lock("scheduler").recall(by="a deploy")
    asked = time.monotonic()
    with leader("scheduler", expire=0.9):
        assert time.monotonic() - asked < 0.3 + BUSY
    wait_until(lambda: len(terms) == 2)
    assert terms[1] - asked > 0.9
    assert lock("scheduler").recall()
    wait_until(lambda: not list(held_locks()))
    candidate.stop()  # while it waits to stand again
    thread.join(30)
    assert not thread.is_alive()
    assert len(terms) == 2
