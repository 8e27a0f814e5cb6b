"""What the soak's processes do: they take locks, compute and change values, and note what they believe, and when."""

from __future__ import annotations

import importlib
import json
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import redis

from django_redislock.cache.lease.request import computing
from django_redislock.core import Lock, Semaphore
from django_redislock.core.clock import monotonic
from django_redislock.exceptions import LockError
from tests.support import say
from tests.support.cache_programs import cache_at

from .locks import RLock

LOCKS = ("x", "y", "z")
UNCONFIRMED = "z"
"""The lock that no replica has to confirm, where there is one."""
SEMAPHORE, LIMIT = "slots", 2
STEP = 0.005


class Ledger:
    """A file to which all processes append lines, each with the time on the clock of the machine."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, event: str, **values: object) -> None:
        """Append a line of tests/histories/README.rst."""
        who = f"{process_name(os.getpid())} thread {threading.get_native_id()}"
        line = {"event": event, "at": monotonic(), "who": who, **values}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def process_name(pid: int) -> str:
    """Return what the lines of a process begin with: none begins with the name of another."""
    return f"process {pid:08d}"


def soak(url: str, direct_url: str, path: str, seed: int, min_replicas: int, library: str = "") -> None:
    """Work until a line comes. `library`: the locks of a peer only."""
    ledger, over = Ledger(path), threading.Event()
    locks = partial(_locks, min_replicas)
    programs = [locks, locks, _values] if not library else [partial(_locks_of_a_peer, library)] * 2

    def run(program: Any, chance: random.Random) -> None:
        try:
            program(url, direct_url, ledger, chance, over)
        except BaseException as error:
            ledger.note("crashed", error=repr(error))
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
        name, expire = chance.choice([*LOCKS, SEMAPHORE, SEMAPHORE]), chance.choice([0.5, 1.0, 2.0])
        kind: Any = partial(Semaphore, limit=LIMIT) if name == SEMAPHORE else chance.choice([Lock, Lock, RLock])
        confirmed = 0 if name == UNCONFIRMED else min_replicas
        lock = kind(client, name, expire=expire, auto_renewal=chance.random() < 0.8, min_replicas=confirmed)
        timeout = chance.choice([0.0, 0.5, 3.0])
        if not _asked(ledger, name, timeout, partial(lock.acquire, timeout=timeout)):
            continue
        began, held, released = monotonic(), dict[str, Any](), False
        with suppress(LockError):
            lock.raise_if_lost()
            owner, last = {"fence": lock.fence, "id": lock.id}, began
            until = began + chance.choice([0.0, 0.02, 0.3, 2.5]) * chance.random()
            while (now := monotonic()) < until and lock.lost is None:
                last = now
                time.sleep(STEP)
            held = {"from": began, "until": last, "expires": last + expire, **owner}
        with suppress(LockError):
            lock.release()
            released = True
        if held:
            ledger.note("believed", name=name, released=released, **held)
    client.close()


def _asked(ledger: Ledger, name: str, timeout: float, acquire: Callable[[], bool]) -> bool:
    """Acquire, and note how the call ended."""
    asked, outcome = monotonic(), "raised"
    with suppress(LockError, redis.RedisError):
        outcome = "granted" if acquire() else "empty"
    ledger.note(outcome, name=name, asked=asked, timeout=timeout, shared=False)
    return outcome == "granted"


def _locks_of_a_peer(
    library: str, url: str, direct_url: str, ledger: Ledger, chance: random.Random, over: threading.Event
) -> None:
    """Do with a lock of redis-py or python-redis-lock what is done with ours, in whole seconds.

    Its holder believes in it until it releases, because neither tells of a loss. With redis-py, which does not renew,
    no body takes longer than half the expiry.
    """
    redis_lock = importlib.import_module("redis_lock")  # only who compares installs it
    client, expire = redis.Redis.from_url(url, socket_timeout=5), 2
    while not over.is_set():
        name, timeout = chance.choice(LOCKS), chance.choice([0, 1, 2])
        if library == "redis-py":
            lock: Any = redis.lock.Lock(client, name, timeout=expire, sleep=0.1)
            acquire = partial(lock.acquire, blocking=timeout > 0, blocking_timeout=timeout or None)
        else:
            lock = redis_lock.Lock(client, name, expire=expire, auto_renewal=True)
            acquire = partial(lock.acquire, blocking=timeout > 0, timeout=timeout or None)
        if not _asked(ledger, name, timeout, acquire):
            continue
        began, released = monotonic(), False
        time.sleep(chance.choice([0.0, 0.02, 0.3, 1.0 if library == "redis-py" else 2.5]) * chance.random())
        last = monotonic()
        with suppress(redis.RedisError, redis.exceptions.LockError, redis_lock.NotAcquired):
            lock.release()
            released = True
        held = {"from": began, "until": last, "expires": last + expire, "released": released}
        ledger.note("believed", name=name, id=uuid.uuid4().hex, fence=None, **held)
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
            held = {"from": began, "until": last, "expires": last, "released": True, "id": lease.id}
            if key.startswith("changing"):  # after the change it may go on, beside the next one
                ledger.note("computed", key=key)
            else:
                ledger.note("believed", name=f"cache:{key}", fence=lease.fence, **held)
        return version

    while not over.is_set():
        period = int(time.time() / 3)
        changing = chance.random() < 0.5
        key = f"{'changing' if changing else 'constant'}:{period}:{chance.randrange(3)}"
        try:
            if changing and chance.random() < 0.4:
                ledger.note("changes", key=key)
                origin.incr(key)
                cache.delete(key)
                ledger.note("changed", key=key)
            else:
                cache.get_or_set(key, lambda key=key: compute(key), timeout=3600)
        except (redis.RedisError, LockError) as error:
            ledger.note("failed", key=key, error=type(error).__name__)
        time.sleep(chance.choice([0.0, 0.01, 0.05]))
    origin.close()
