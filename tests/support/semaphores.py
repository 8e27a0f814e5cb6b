"""Programs that take turns at a semaphore, and what was seen of them."""

from __future__ import annotations

import os
import time

from django_redislock.core import Semaphore

from .clients import client_at
from .waiting import wait_until


def take_turns(url: str, name: str, limit: int, processes: int, rounds: int) -> None:
    """Hold a slot in each of so many processes, some times; write the spans into the list ``spans``."""
    children = []
    for _ in range(processes):
        child = os.fork()
        if not child:
            _work(url, name, limit, rounds)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * processes


def _work(url: str, name: str, limit: int, rounds: int) -> None:
    client = client_at(url)
    for _ in range(rounds):
        with Semaphore(client, name, limit, timeout=60) as held:
            began = time.monotonic()
            client.incr("inside")
            # The first ones wait for each other: on a busy machine all slots were never in use at the same time.
            wait_until(lambda: int(client.get("inside")) >= limit)
            time.sleep(0.005)
            client.rpush("spans", f"{began} {time.monotonic()} {held.fence}")


def most_at_once(spans: list[tuple[float, ...]]) -> int:
    """Return how many of the spans overlap at most."""
    steps = sorted([(span[0], 1) for span in spans] + [(span[1], -1) for span in spans])
    inside = most = 0
    for _, step in steps:
        inside += step
        most = max(most, inside)
    return most
