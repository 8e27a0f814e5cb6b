"""Holders that are killed, paused or late: who gets the lock, and what the former holder may still do."""

from __future__ import annotations

import re
import time

import psutil
import pytest

from django_redislock.core import Lock
from django_redislock.exceptions import LockLost, NotAcquired
from tests.support import BUSY, lived, lock_programs, queued, wait_until

pytestmark = pytest.mark.processes

WAITERS = [
    ({}, 300),
    ({"expire": 60}, None),
    ({"expire": 2.5}, 300),
    ({"expire": 60, "auto_renewal": False}, 200),
    ({"expire": 2}, None),
    ({"auto_renewal": False}, 250),
    ({"expire": 3, "max_hold": 60}, 300),
    ({"expire": 600}, 300),
]


def test_a_killed_holders_lock_goes_to_exactly_one_of_many(client, redis_url, run_python):
    life = 2
    holder = run_python(lock_programs.hold, redis_url, "a", life)
    holder.wait_for(event="held")
    waiters = [
        run_python(
            lock_programs.wait_and_hold, redis_url, "a", options, timeout, {"socket_timeout": (None, 1, 5)[i % 3]}
        )
        for i, (options, timeout) in enumerate(WAITERS)
    ]
    wait_until(lambda: queued(client, "a") == 8, timeout=120)
    holder.kill()
    killed = time.time()

    def winners():
        return [line for waiter in waiters for line in waiter.lines if line["event"] == "held"]

    wait_until(winners)
    assert winners()[0]["at"] - killed < life + BUSY
    lived(1)
    assert len(winners()) == 1
    served = []
    for turn in range(8):  # each that holds gives way, and the next one holds
        wait_until(lambda turn=turn: len(winners()) == turn + 1)
        (holding,) = [w for w in waiters if w not in served and w.lines[-1]["event"] == "held"]
        holding.send()
        served.append(holding)


def test_a_paused_holder_is_told_and_its_successor_untouched(client, redis_url, run_python):
    holder = run_python(lock_programs.hold, redis_url, "a", 1)
    fence = holder.wait_for(event="held")["fence"]
    holder.pause()
    with Lock(client, "a", timeout=10) as successor:
        assert successor.fence > fence
        holder.send()
        holder.resume()
        assert holder.wait_for(event="told")
        assert holder.wait_for(event="not released")["error"] == "LockLost"
        assert successor.owned()
        successor.raise_if_lost()


def test_a_late_release_frees_nothing_of_the_successors(make_lock, client):
    late = make_lock(client, "a", expire=0.1, auto_renewal=False)
    late.acquire()
    successor = make_lock(client, "a", timeout=5)
    wait_until(lambda: not late.locked())
    successor.acquire()
    with pytest.raises(LockLost):
        late.release()
    with pytest.raises(NotAcquired):
        make_lock(client, "a", id="0" * 32).release()
    assert successor.owned()
    successor.release()


def test_fifty_processes_race_for_a_dead_holders_lock_and_one_wins(client, redis_url, run_python):
    """The promise of the SETNX + timestamp + GETSET recipe; also, a late holder never deletes its successor's lock."""
    rounds, count = 60, 50
    racers = run_python(lock_programs.race, redis_url, count)
    wait_until(lambda: client.pubsub_numsub("go")[0][1] == count)
    for number in range(rounds):
        name = f"dead:{number}"
        dead = Lock(client, name, expire=0.005, auto_renewal=False)
        dead.acquire()
        wait_until(lambda dead=dead: not dead.locked())
        assert client.publish("go", name) == count
        wait_until(lambda name=name: client.llen(f"result:{name}") == count, timeout=30)
        results = [result.split(b":") for result in client.lrange(f"result:{name}", 0, -1)]
        (winner,) = [int(pid) for pid, won in results if won == b"1"]
        with pytest.raises(LockLost):
            dead.release()
        owner = dead.owner()
        assert owner is not None
        assert owner.pid == winner
    client.publish("go", "stop")
    assert racers.finish()[-1]["statuses"] == [0] * count


HOLDING = """
import os, signal
from django_redislock.core import Lock
from tests.support import client_at

lock = Lock(client_at(args[0]), "a", expire=1, on_lost=lambda lock: say(event="lost", reason=lock.lost.reason))
lock.acquire()
os.kill(os.getpid(), signal.SIGSTOP)  # at once: no renewal may be under way
input()
"""


def test_the_loss_of_a_frozen_process_says_how_late_its_watchdog_woke(client, redis_url, run_python):
    began = time.monotonic()
    holder = run_python(HOLDING, redis_url)
    wait_until(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_STOPPED)
    wait_until(lambda: not Lock(client, "a").locked())
    holder.resume()
    reason = holder.wait_for(event="lost")["reason"]
    due, late = re.fullmatch(
        r"its expiry of 1 s ended without a renewal, which was due (.+) s earlier; the watchdog woke (.+) s late",
        reason,
    ).groups()
    assert float(due) > 0.6
    assert 0.6 < float(late) < time.monotonic() - began
