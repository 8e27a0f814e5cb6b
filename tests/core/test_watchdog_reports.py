"""What the watchdog reports: those who are told may take long."""

from __future__ import annotations

import gc
import logging
import sys
import threading

import pytest

from django_redislock.core import Lock, watchdog
from django_redislock.core.driver import os_threads
from tests.support import lived, wait_until


@pytest.mark.slow
def test_a_log_handler_that_blocks_stops_no_renewal(client):
    """As one that sends mail; or that was interrupted with its lock acquired, which all other threads wait for then."""
    entered, done = threading.Event(), threading.Event()

    class Blocking(logging.Handler):
        def emit(self, record):
            if "not renewed" in record.getMessage():
                entered.set()
                done.wait(30)

    handler, log = Blocking(), logging.getLogger("django_redislock")
    log.addHandler(handler)
    gc.collect()
    try:
        held = Lock(client, "held", expire=1.2)
        held.acquire()
        Lock(client, "abandoned", expire=60).acquire()
        # Only what is young: among the objects of all tests it keeps the GIL for ten seconds on a busy machine.
        gc.collect(1)
        wait_until(entered.is_set)
        lived(2)
        assert held.owned()
        assert held.lost is None
    finally:
        log.removeHandler(handler)
        done.set()


def test_the_loss_of_many_locks_is_reported_by_few_threads(client):
    """Else a server that lost its data started a thread for each lock, all at once."""
    many, told, go_on = 100, [], threading.Event()

    def on_lost(lock):
        go_on.wait(30)
        told.append(lock.name)

    locks = [Lock(client, f"lock {number}", expire=1, on_lost=on_lost) for number in range(many)]
    for lock in locks:
        lock.acquire()
    client.flushdb()
    try:
        wait_until(lambda: all(lock._leases[threading.current_thread()].noted_loss for lock in locks))
        assert 1 <= os_threads.running(watchdog.REPORTER) <= 16
    finally:
        go_on.set()
    wait_until(lambda: len(told) == many)
    assert sorted(told) == sorted(lock.name for lock in locks)


def test_listeners_that_end_their_threads_stop_no_other_report(monkeypatch):
    go_on, told, ended = threading.Event(), [], []
    monkeypatch.setattr(threading, "excepthook", ended.append)

    def end():
        go_on.wait()
        sys.exit()

    for _ in range(watchdog.MAX_REPORTERS):
        watchdog.report(end)
    watchdog.report(lambda: told.append(1))
    go_on.set()
    wait_until(lambda: told and len(ended) == watchdog.MAX_REPORTERS)


REPORTS_AT_THE_END = """
import atexit, gc, threading, time
from django_redislock.core import Lock, events
from tests.support import client_at

def listen(event, data):
    if event == "not_renewed":
        entered.set()
        ending.wait()
        time.sleep(0.6)
        say(told=True)

entered, ending = threading.Event(), threading.Event()
atexit.register(ending.set)
events.listeners.append(listen)
client = client_at(args[0])
Lock(client, "abandoned", expire=1.2).acquire()
gc.collect()
entered.wait()
"""


@pytest.mark.processes
def test_a_process_that_ends_waits_for_the_report_that_is_under_way(redis_url, run_python):
    """Python would end the thread at any point: within a write to stderr, that aborted the process."""
    assert run_python(REPORTS_AT_THE_END, redis_url).finish()[-1] == {"told": True}


def test_when_the_process_ends_no_report_starts(monkeypatch):
    told, before = [], set(threading.enumerate())
    monkeypatch.setattr(watchdog.Renewals, "ending", True)
    watchdog.report(lambda: told.append(1))
    assert set(threading.enumerate()) <= before
    assert not told
