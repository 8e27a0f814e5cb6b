"""What the processes of the fault tests do; each says what happens to it in JSON lines."""

from __future__ import annotations

import os
import time

import redis

from django_redislock.core import Lock
from django_redislock.exceptions import LockError, LockLost
from tests.support import say


def hold(url: str, name: str, expire: float, auto_renewal: bool = True) -> None:
    """Acquire, say so, and keep the lock until a line comes; then take the next step, if it is still ours."""
    lock = Lock(redis.Redis.from_url(url), name, expire=expire, auto_renewal=auto_renewal)
    lock.acquire()
    say(event="held", fence=lock.fence, id=lock.id)
    input()
    try:
        lock.raise_if_lost()
        say(event="step")
    except LockLost as error:
        say(event="told", reason=error.record.reason)
    try:
        lock.release()
        say(event="released")
    except LockError as error:
        say(event="not released", error=type(error).__name__)


def wait_and_hold(url: str, name: str, options: dict, timeout: float | None, client_options: dict) -> None:
    """Wait for the lock, say when it was taken, and keep it until a line comes."""
    lock = Lock(redis.Redis.from_url(url, **client_options), name, **options)
    say(event="waiting")
    if lock.acquire(timeout=timeout):
        say(event="held", fence=lock.fence, at=time.time())
        input()
        lock.release()
        say(event="released")
    else:
        say(event="gave up")


def race(url: str, rounds: int) -> None:
    """In each round try once to take the dead holder's lock; the winner releases late, after the next one took it."""
    client = redis.Redis.from_url(url)
    say(event="ready")
    for number in range(rounds):
        client.blpop([f"go:{number}:{os.getpid()}"], timeout=60)
        lock = Lock(client, f"dead:{number}", expire=60, auto_renewal=False)
        won = lock.acquire(blocking=False)
        client.rpush(f"result:{number}", f"{os.getpid()}:{int(won)}")
    say(event="done")
