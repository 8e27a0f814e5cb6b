"""How fast is an uncontended acquire and release, and how many commands does it send?"""

from __future__ import annotations

import statistics
import time

import redis
from common import (
    NAMES,
    commands,
    floor,
    ours,
    pottery,
    python_redis_lock,
    python_redis_lock_renewed,
    redis_py,
    server,
    table,
)

ROUNDS, SECONDS = 20, 0.25
MAKERS = (floor, ours, redis_py, python_redis_lock, python_redis_lock_renewed, pottery)


def cycles(pair, seconds: float) -> int:
    done, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        pair.acquire()
        pair.release()
        done += 1
    return done


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        pairs = {make: make(client, make.__name__) for make in MAKERS}
        speed: dict = {make: [] for make in MAKERS}
        for make in MAKERS:
            cycles(pairs[make], 0.1)
        for number in range(ROUNDS):
            order = MAKERS[number % len(MAKERS) :] + MAKERS[: number % len(MAKERS)]
            for make in order:
                speed[make].append(cycles(pairs[make], SECONDS) / SECONDS)
        rows = []
        for make in MAKERS:
            ratio = statistics.median(a / b for a, b in zip(speed[make], speed[floor], strict=True))

            def twenty(pair=pairs[make]) -> int:
                for _ in range(20):
                    pair.acquire()
                    pair.release()
                return 20

            rows.append(
                [
                    NAMES[make],
                    f"{statistics.median(speed[make]):.0f}",
                    f"{ratio:.2f}",
                    f"{commands(client, twenty):.1f}",
                ]
            )
        table("Uncontended cycle", ["", "cycles/s", "to the floor", "commands/cycle"], rows)


if __name__ == "__main__":
    main()
