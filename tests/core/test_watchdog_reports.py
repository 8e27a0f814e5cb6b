"""What the watchdog reports: those who are told may take long."""

from __future__ import annotations

import gc
import logging
import threading

import pytest

from django_redislock.core import Lock, renewals
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
    try:
        held = Lock(client, "held", expire=1.2)
        held.acquire()
        Lock(client, "abandoned", expire=60).acquire()
        gc.collect()
        wait_until(entered.is_set)
        lived(2)
        assert held.owned()
        assert held.lost is None
    finally:
        log.removeHandler(handler)
        done.set()


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
    monkeypatch.setattr(renewals.Renewals, "ending", True)
    renewals.report(lambda: told.append(1))
    assert set(threading.enumerate()) <= before
    assert not told
