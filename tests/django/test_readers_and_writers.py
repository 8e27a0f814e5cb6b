"""The recipe for many readers or one writer, as the page of how-tos has it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_redislock import held_locks
from tests.project.test_docs import DOCS, blocks
from tests.support import wait_until


@pytest.fixture
def recipe(client):
    (code,) = [block for block in blocks(DOCS / "howto.rst") if "def reading" in block]
    names = {}
    exec(compile(code, "howto.rst", "exec"), names)
    return names["reading"], names["writing"]


def test_readers_overlap_with_readers_and_a_writer_with_nobody(recipe):
    inside, seen, guard = Counter(), Counter(), threading.Lock()
    until = time.monotonic() + 3

    def hold(kind, by):
        while time.monotonic() < until:
            with by("catalogue", timeout=60):
                with guard:
                    inside[kind] += 1
                    assert inside["writer"] <= (1 if not inside["reader"] else 0), inside
                    seen[kind, inside[kind]] += 1
                time.sleep(0.002)
                with guard:
                    inside[kind] -= 1

    reading, writing = recipe
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(hold, "reader", reading) for _ in range(6)]
        calls += [pool.submit(hold, "writer", writing) for _ in range(2)]
        for call in calls:
            call.result(60)
    assert seen["writer", 1] > 0, "readers starve no writer"
    assert any(kind == "reader" and number > 1 for kind, number in seen), "readers read at the same time"
    assert list(held_locks()) == []


def test_a_reader_that_comes_after_a_waiting_writer_comes_in_after_it(recipe):
    reading, writing = recipe
    order = []

    def enter(kind, by):
        with by("catalogue", timeout=60):
            order.append(kind)

    with ThreadPoolExecutor(2) as pool:
        with reading("catalogue"):
            writer = pool.submit(enter, "writer", writing)
            gate = "catalogue:gate"
            wait_until(lambda: gate in {info.name for info in held_locks()}, message="the writer keeps the gate")
            late = pool.submit(enter, "reader", reading)
            wait_until(lambda: any(info.waiting for info in held_locks() if info.name == gate))
        writer.result(60), late.result(60)
    assert order == ["writer", "reader"]
