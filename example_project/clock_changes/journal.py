"""Who computed, who waited and who was refused: a line for each year and way of asking, kept in Redis.

The counts come from the work itself, so they show what the locks spared.
"""

from __future__ import annotations

import time
from typing import Any

from django_redis import get_redis_connection

LINES = "clock_changes:journal"
LONGEST = "clock_changes:journal:longest"
SENT = "clock_changes:journal:sent"


def count(year: int, asked_by: str, what: str) -> None:
    """Count one more of `what`: a computation that was begun or finished, or one that was "waited" for or "refused"."""
    redis, line = get_redis_connection(), f"{LINES}:{year}:{asked_by}"
    redis.hincrby(line, what)
    redis.zadd(LINES, {line: time.time()})


def count_finished(year: int, asked_by: str, pid: int, seconds: float) -> None:
    count(year, asked_by, "finished")
    get_redis_connection().hset(f"{LINES}:{year}:{asked_by}", mapping={"pid": pid, "seconds": seconds})


def count_waited(year: int, asked_by: str, seconds: float) -> None:
    count(year, asked_by, "waited")
    get_redis_connection().zadd(LONGEST, {f"{LINES}:{year}:{asked_by}": seconds}, gt=True)


def runs(year: int, asked_by: str) -> int:
    """Return how many computations were begun."""
    return int(get_redis_connection().hget(f"{LINES}:{year}:{asked_by}", "begun") or 0)


def note_sending(what: str, subscriber: int) -> None:
    """Note that sending to a subscriber was "begun" or "ended". The server puts the notes of all processes in order."""
    get_redis_connection().rpush(SENT, f"{what} {subscriber}")


def sendings() -> list[tuple[str, int]]:
    """Return all these notes, the oldest first."""
    notes = (note.decode().split() for note in get_redis_connection().lrange(SENT, 0, -1))
    return [(what, int(subscriber)) for what, subscriber in notes]


def lines(length: int = 5) -> list[dict[str, Any]]:
    """Return what is known, the latest first."""
    redis = get_redis_connection()
    found = []
    for line in redis.zrevrange(LINES, 0, length - 1):
        _, year, asked_by = line.decode().rsplit(":", 2)
        facts = {name.decode(): float(value) for name, value in redis.hgetall(line).items()}
        found.append({"year": year, "asked_by": asked_by, "longest_wait": redis.zscore(LONGEST, line)} | facts)
    return found
