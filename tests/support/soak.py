"""What the soak's processes do: they take locks, compute and change values, and note what they believe, and when."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import redis

from django_redislock.cache.lease.request import computing
from django_redislock.core import Lock, RLock
from django_redislock.core.clock import monotonic
from django_redislock.exceptions import LockError
from tests.support import say
from tests.support.cache_programs import cache_at

LOCKS = ("x", "y", "z")
UNCONFIRMED = "z"
"""The lock that no replica has to confirm, where there is one."""
STEP = 0.005


class Ledger:
    """A file to which all processes append lines, each with the time on the clock of the machine."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, **values: object) -> None:
        """Append a line."""
        os.write(self._file, json.dumps({"pid": os.getpid(), "at": monotonic(), **values}).encode() + b"\n")


def soak(url: str, direct_url: str, path: str, seed: int, min_replicas: int) -> None:
    """Work until a line comes."""
    ledger, over = Ledger(path), threading.Event()
    locks = partial(_locks, min_replicas)
    programs = [locks, locks, _values]

    def run(program: Any, chance: random.Random) -> None:
        try:
            program(url, direct_url, ledger, chance, over)
        except BaseException as error:
            ledger.note(event="crashed", error=repr(error))
            raise

    threads = [
        threading.Thread(target=run, args=(program, random.Random(seed * 8 + number)))
        for number, program in enumerate(programs)
    ]
    for thread in threads:
        thread.start()
    say(event="works")
    input()
    over.set()
    for thread in threads:
        thread.join()
    say(event="ended")


def _locks(
    min_replicas: int, url: str, direct_url: str, ledger: Ledger, chance: random.Random, over: threading.Event
) -> None:
    """Acquire, hold and release; note from when to when the lock was believed to be held."""
    client = redis.Redis.from_url(url, socket_timeout=2)
    while not over.is_set():
        name, expire = chance.choice(LOCKS), chance.choice([0.5, 1.0, 2.0])
        kind = chance.choice([Lock, Lock, RLock])
        confirmed = 0 if name == UNCONFIRMED else min_replicas
        lock = kind(client, name, expire=expire, auto_renewal=chance.random() < 0.8, min_replicas=confirmed)
        timeout, asked = chance.choice([0.0, 0.5, 3.0]), monotonic()
        try:
            acquired = lock.acquire(timeout=timeout)
        except LockError:
            acquired = False
        began = monotonic()
        ledger.note(event="asked", took=began - asked, timeout=timeout)
        if not acquired:
            continue
        with suppress(LockError):
            lock.raise_if_lost()
            fence, last = lock.fence, began
            until = began + chance.choice([0.0, 0.02, 0.3, 2.5]) * chance.random()
            while (now := monotonic()) < until and lock.lost is None:
                last = now
                time.sleep(STEP)
            ledger.note(event="held", name=name, fence=fence, began=began, ended=last)
        with suppress(LockError):
            lock.release()
    client.close()


def _values(url: str, direct_url: str, ledger: Ledger, chance: random.Random, over: threading.Event) -> None:
    """Get values of which some change; note who computed, and which changes came to their end."""
    cache = cache_at(url, OPTIONS={"LOCK": {"EXPIRE": 1.0}, "socket_timeout": 2})
    origin: Any = redis.Redis.from_url(direct_url, socket_timeout=2)

    def compute(key: str) -> int:
        lease = next((each for each in computing.get() if each.fence), None)
        version, began = int(origin.get(key) or 0), monotonic()
        if lease is not None and lease.loss is not None:  # it ended while the origin was asked
            lease = None
        last, until = began, began + chance.choice([0.0, 0.05, 0.5]) * chance.random()
        while (now := monotonic()) < until:
            if lease is not None and lease.loss is None:
                last = now
            time.sleep(STEP)
        if lease is not None:
            ledger.note(event="computed", name=key, fence=lease.fence, began=began, ended=last)
        return version

    while not over.is_set():
        period = int(time.time() / 3)
        changing = chance.random() < 0.5
        key = f"{'changing' if changing else 'constant'}:{period}:{chance.randrange(3)}"
        try:
            if changing and chance.random() < 0.4:
                ledger.note(event="changes", name=key)
                origin.incr(key)
                cache.delete(key)
                ledger.note(event="changed", name=key)
            else:
                cache.get_or_set(key, lambda key=key: compute(key), timeout=3600)
        except (redis.RedisError, LockError) as error:
            ledger.note(event="failed", name=key, error=type(error).__name__)
        time.sleep(chance.choice([0.0, 0.01, 0.05]))
    origin.close()
